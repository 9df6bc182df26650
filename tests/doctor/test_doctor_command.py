"""`minipaged doctor` as a user types it."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from minipaged.bench.machine import memory_bytes
from minipaged.cli.main import app
from minipaged.doctor.examine import Diagnosis, examine
from minipaged.doctor.finding import Finding
from minipaged.doctor.report import print_diagnosis
from minipaged.ops import available_backends, registry
from minipaged.ops.cpu import library as native_library
from minipaged.threads import default_threads

Doctor = Callable[..., Result]


@pytest.fixture
def doctor() -> Doctor:
    def run(*arguments: str) -> Result:
        return CliRunner().invoke(app, ["doctor", *arguments])

    return run


@pytest.mark.usefixtures("small_probe")
def test_json_is_one_object_with_the_promised_keys(doctor: Doctor) -> None:
    result = doctor("--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert {"cpu", "threads", "memory_limit_bytes", "read_bandwidth_gb_s", "backends"} <= set(report)
    assert report["threads"] == default_threads()
    assert report["memory_limit_bytes"] == memory_bytes()
    assert report["read_bandwidth_gb_s"] > 0
    on_cpu = available_backends("cpu")
    assert list(report["backends"]) == list(on_cpu)
    assert {name for name, reason in report["backends"].items() if reason is None} - {"triton"} == {
        name for name, reason in on_cpu.items() if reason is None and name != "triton"
    }
    for finding in report["findings"]:
        assert set(finding) == {"name", "value", "why", "state", "advice", "facts"}
        assert finding["state"] == "ok" or finding["advice"]


def test_quick_measures_nothing(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_probe(*_: object, **__: object) -> None:
        raise AssertionError("a probe was made")

    monkeypatch.setattr("minipaged.doctor.bandwidth.Probes", no_probe)
    result = doctor("--quick", "--json")
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert report["read_bandwidth_gb_s"] is None
    assert "could not be found out" not in {finding["value"] for finding in report["findings"]}


def test_text_for_a_pipe(doctor: Doctor) -> None:
    result = doctor("--quick")
    assert result.exit_code == 0, result.output
    assert "\x1b" not in result.stdout
    assert "usable: back end " in result.stdout
    for word in ("python", "torch", "threads", "memory", "huge pages", "back end cpu", "OpenMP", "Hub cache"):
        assert word in result.stdout


def test_no_back_end_is_status_1(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    """An instruction set that is not there keeps the chosen back end from starting; the text says how to go on."""
    if native_library.unavailable_reason("cpu") is not None:
        pytest.skip("the native library is not built here")
    monkeypatch.setenv("MINIPAGED_CPU_ISA", "sse9")
    result = doctor("--quick")
    assert result.exit_code == 1
    assert "not usable: MINIPAGED_CPU_ISA=sse9" in result.stdout
    assert "unset MINIPAGED_CPU_ISA" in result.stdout
    report = json.loads(doctor("--quick", "--json").stdout)
    assert report["usable"] is False
    assert "sse9" in report["backends"]["cpu"]


def test_a_back_end_that_does_not_import_is_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "half_a_backend.py").write_text("raise ImportError('libcuda.so.1: cannot open shared object file')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(registry._BACKENDS, "cpu", ("half_a_backend", "Half"))
    assert available_backends()["cpu"] == "it does not import: libcuda.so.1: cannot open shared object file"
    assert registry.best_backend() == "torch"


@pytest.mark.parametrize("width", [60, 80, 200])
def test_the_table_fits_the_terminal(width: int) -> None:
    """Nothing is cut off: every word of every finding is there, and no line of the table is too long."""
    diagnosis = examine(quick=True)
    console = Console(width=width, file=io.StringIO(), force_terminal=False)
    print_diagnosis(diagnosis, console)
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    table = printed.split("\nusable")[0].split("\nerror of the native")[0]
    assert max(map(len, table.splitlines())) <= width
    squeezed = "".join(printed.split())
    for finding in diagnosis.findings:
        assert "".join(finding.name.split()) in squeezed


def test_the_build_error_is_printed_as_it_is() -> None:
    """Brackets are no markup, long lines are not folded."""
    error = "native/x.h:1:1: error: [-Werror=shadow] " + "x" * 200
    facts = {"backend": "cpu", "reason": "not built", "build_error": error, "build_log": "/somewhere/build_error.txt"}
    finding = Finding(
        name="back end cpu", value="not available", why="not built", advice="build it", state="warning", facts=facts
    )
    console = Console(width=80, file=io.StringIO())
    print_diagnosis(Diagnosis((finding,), "torch", "cpu: not built"), console)
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert f"  {error}\n" in printed
    assert "/somewhere/build_error.txt" in printed
    assert "1 warning: back end cpu" in printed


def test_help_shows_an_example(doctor: Doctor) -> None:
    result = doctor("--help")
    assert result.exit_code == 0
    for word in ("Example:", "--quick", "--json", "Exit status"):
        assert word in result.stdout
