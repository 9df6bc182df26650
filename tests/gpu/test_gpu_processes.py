"""The kernels in Triton's interpreter, and compiled ahead of time for sm_90: each in a process of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

needs_triton = pytest.mark.skipif(
    find_spec("triton") is None, reason="triton is not installed: pip install '.[gpu]' (Linux)"
)


def run(*command: str, interpret: bool) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    environment.pop("TRITON_INTERPRET", None)
    environment["OMP_NUM_THREADS"] = "1"  # problems so small that a second thread only waits
    if interpret:
        environment["TRITON_INTERPRET"] = "1"
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, check=False, env=environment, cwd=ROOT, timeout=570
    )


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="triton exists for Linux only")
def test_triton_is_installed_where_these_tests_count() -> None:
    """The extra [test] brings it on Linux: in CI nothing below may be skipped."""
    assert find_spec("triton") is not None or "CI" not in os.environ


@needs_triton
@pytest.mark.timeout(600)  # 45 s of computing, but machines can be busy
def test_kernels_in_the_interpreter() -> None:
    """Everything under interpreted/, none of it skipped."""
    done = run("-m", "pytest", str(HERE / "interpreted"), "-p", "no:cacheprovider", "-m", "not slow", interpret=True)
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) > 90, done.stdout
    assert "skipped" not in done.stdout


@needs_triton
def test_shipped_configurations_compile_for_sm_90_without_spills() -> None:
    """Registers, shared memory and spills from the assembler; matrix units and asynchronous copies are in use."""
    done = run(str(ROOT / "tools" / "gpu" / "compile_kernels.py"), "--arch", "90", "--json", interpret=False)
    assert done.stdout.startswith("{"), done.stderr
    report = json.loads(done.stdout)
    kernels = {row["kernel"]: row for row in report["kernels"]}
    assert 10 <= len(kernels) <= 12
    for name, row in kernels.items():
        assert "error" not in row, (name, row.get("error"))
        assert 0 < row["registers"] <= 255
        assert row["spill_stores"] == row["spill_loads"] == 0, name
        assert row["shared"] <= 227 << 10
        if name.startswith(("decode", "varlen")) and "float32" not in name:
            assert row["matrix"] == ("wgmma" if name.startswith("varlen") else "mma"), name
            assert row["asynchronous_copies"] > 0, name
    assert done.returncode == 0
    assert report["failed"] == 0


@needs_triton
def test_the_compiler_tool_refuses_to_run_interpreted() -> None:
    done = run(str(ROOT / "tools" / "gpu" / "compile_kernels.py"), interpret=True)
    assert done.returncode == 2
    assert "TRITON_INTERPRET=1 is set" in done.stderr
