"""The processor and its instruction sets, on machines made of files."""

from __future__ import annotations

from pathlib import Path

import pytest
from pretended import Machine, only

from minipaged.doctor import processor

ALL_SETS = {"avx512bf16": True, "avx512": True, "avx2": True, "portable": True}
AVX512_FLAGS = frozenset(("avx2", "fma", "avx512f", "avx512bw", "avx512vl", "avx512dq"))


@pytest.mark.parametrize(
    ("built", "wanted", "flags", "value", "state"),
    [
        (ALL_SETS, "", AVX512_FLAGS | {"avx512_bf16"}, "avx512bf16", "ok"),
        (ALL_SETS, "avx512bf16", AVX512_FLAGS | {"avx512_bf16"}, "avx512bf16", "ok"),
        (ALL_SETS, "avx2", AVX512_FLAGS | {"avx512_bf16"}, "avx2", "warning"),
        (ALL_SETS, "sse9", AVX512_FLAGS, "sse9, which does not run here", "problem"),
        ({**ALL_SETS, "avx512bf16": False}, "", AVX512_FLAGS, "avx512", "note"),
        ({"portable": True}, "", frozenset({"asimd"}), "portable", "ok"),
    ],
)
def test_instruction_set(built: dict[str, bool], wanted: str, flags: frozenset[str], value: str, state: str) -> None:
    finding = processor.judge_instruction_set(built, wanted, flags)
    assert (finding.value, finding.state) == (value, state)
    if state == "note":
        assert "avx512bf16 needs avx512_bf16" in finding.why
        assert "computed in float32" in finding.advice


def test_needed_flags_are_those_of_the_build() -> None:
    """CMakeLists.txt compiles each set with -m flags; doctor has to look for the same ones."""
    text = (Path(__file__).parents[2] / "CMakeLists.txt").read_text()
    common = text[text.index("set(AVX512 ") :].split(")")[0].split()[1:]
    for name in ("avx2", "avx512", "avx512bf16"):
        line = text[text.index(f"mp_kernels({name} ") :].split(")")[0]
        flags = [part for word in line.split()[1:] for part in (common if word == "${AVX512}" else [word])]
        spelled = {flag.removeprefix("-m").replace("avx512bf16", "avx512_bf16") for flag in flags}
        assert spelled == set(processor.NEEDS[name])


def test_cpu_name_and_features(machine: Machine) -> None:
    root = machine({"proc/cpuinfo": "cpu family\t: 25\nmodel\t: 17\nmodel name\t: AMD EPYC\nflags\t: sse avx2 fma\n"})
    finding = only(processor.cpu(root))
    assert finding.facts == {"name": "AMD EPYC (cpu family 25, model 17)", "features": ["avx2", "fma"]}
