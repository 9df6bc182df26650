"""`benchmarks/compare.py`: the order of measurements, and verdicts from made-up runs."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.syspath_prepend(str(BENCHMARKS / "rivals"))

    def module(name: str) -> ModuleType:
        path = next(BENCHMARKS.rglob(f"{name}.py"))
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        made = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, made)
        spec.loader.exec_module(made)
        return made

    return module


def run(engine: str, workload: str, quiet: bool = True, probe: float = 40e9, **figures: float) -> dict[str, Any]:
    return {
        "engine": engine, "workload": workload, "round": 0, "quiet": quiet, "read_bandwidth": [probe, probe], **figures,
    }  # fmt: skip


def test_every_engine_takes_its_turn_and_long_workloads_run_once(load: Any) -> None:
    compare = load("compare")
    plan = list(compare.schedule(["ours", "hf"], ["W1", "W3", "startup"], 2))
    assert plan == [
        (0, "W1", "ours"),
        (0, "W1", "hf"),
        (0, "W3", "ours"),
        (0, "W3", "hf"),
        (0, "startup", "ours"),
        (1, "W1", "hf"),
        (1, "W1", "ours"),
        (1, "startup", "ours"),
    ]


def test_a_comparison_stops_without_the_back_end_that_it_is_about(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    compare = load("compare")
    compare.require_backend("torch")
    with pytest.raises(SystemExit, match=r"--backend abacus is unknown: choose from .*cpu"):
        compare.require_backend("abacus")
    from minipaged.ops import registry

    monkeypatch.setattr(registry, "available_backends", lambda: {"cpu": "the native library was not built"})
    with pytest.raises(SystemExit, match=r"'cpu' cannot run here: .* was not built; `python tools/build"):
        compare.require_backend("cpu")


def test_verdicts_follow_medians_of_quiet_runs_and_the_best_rival(load: Any) -> None:
    comparison = load("comparison")
    runs = [
        run("ours", "W1", decode_tok_s=30.0, bytes_per_step=1.2e9),
        run("ours", "W1", decode_tok_s=31.0, bytes_per_step=1.2e9),
        run("ours", "W1", quiet=False, decode_tok_s=5.0, bytes_per_step=1.2e9),
        run("a", "W1", decode_tok_s=20.0),
        run("b", "W1", decode_tok_s=25.0),
        run("b", "W1", quiet=False, decode_tok_s=99.0),
    ]
    speed, share = comparison.summarise(runs)
    assert speed["values"] == {"ours": 30.5, "a": 20.0, "b": 25.0}
    assert (speed["best_rival"], speed["ratio"]) == ("b", pytest.approx(1.22))
    assert speed["verdict"] == "must reached"  # must 1.2, aim 1.3
    assert (speed["measurements"], speed["noisy"]) == (6, 2)
    assert share["values"]["ours"] == pytest.approx(100 * 30.5 * 1.2e9 / 40e9)
    assert share["verdict"] == "must reached"  # 91.5 %: must 85, aim 95


def test_time_to_first_token_is_better_when_smaller(load: Any) -> None:
    comparison = load("comparison")
    runs = [
        run("ours", "W5", decode_tok_s=16.0, ttft_s=40.0),
        run("a", "W5", decode_tok_s=10.0, ttft_s=45.0),
        run("b", "W5", decode_tok_s=8.0, ttft_s=50.0),
    ]
    decode, first = comparison.summarise(runs)
    assert (decode["best_rival"], decode["ratio"], decode["verdict"]) == ("a", 1.6, "aim reached")
    assert (first["best_rival"], first["verdict"]) == ("a", "must reached")  # 0.89: must 1.0, aim 0.85


def test_only_disturbed_runs_still_give_a_median_and_say_so(load: Any) -> None:
    comparison = load("comparison")
    runs = [run("ours", "W2", quiet=False, output_tok_s=10.0), run("a", "W2", quiet=False, output_tok_s=9.0)]
    (entry,) = comparison.summarise(runs)
    assert (entry["ratio"], entry["verdict"], entry["noisy"]) == (pytest.approx(10 / 9), "missed", 2)


def test_page_has_machine_precision_failures_and_every_workload(load: Any) -> None:
    comparison = load("comparison")
    runs = [
        run("ours", "W4", prefill_tok_s=400.0, version="minipaged 1", precision="bf16", backend="cpu"),
        run("a", "W4", prefill_tok_s=300.0, version="a 7", precision="KV u8"),
        run("b", "W4", error="exit status 1: no such file"),
        run("ours", "attention", share_of_bandwidth=0.8),
        run("ours", "startup", own_s=1.4),
    ]
    machine = {"cpu": "A CPU", "cores": 2, "cpu_features": ["avx2"], "memory_bytes": 2**34, "system": "Linux"}
    report = {"when": "now", "machine": machine, "threads": 2, "read_probe": "a probe", "runs": runs}
    page = comparison.to_markdown({**report, "summary": comparison.summarise(runs)})
    assert "A CPU, 2 cores (avx2), 16.0 GiB" in page
    assert "| ours (cpu) | minipaged 1 | bf16 |" in page
    assert "| workload | figure | ours (cpu) | a | b | best rival" in page
    assert "| a | a 7 | KV u8 |" in page
    assert (
        "| W4: 1 prompt of 2048 | prefill_tok_s (tok/s) | 400.0 | 300.0 | - | a | 1.33 | 1.05 | 1.25 | aim reached |"
        in page
    )
    assert "| 80.0 | - | - | - | - | 75 | 88 | must reached |" in page
    assert "| 1.40 | - | - | - | - | 2 | 1.5 | aim reached |" in page
    assert "b failed on W4: exit status 1: no such file" in page


def test_figures_of_a_rival_come_from_its_timestamps(load: Any) -> None:
    harness = load("harness")
    from minipaged.bench.workloads import BenchRequest

    one = harness.figures([BenchRequest([1] * 8, 5)], harness.Timing(10.0, 12.0, [10.5], [11.9]))
    assert one == {"total_s": 2.0, "output_tok_s": 2.5, "ttft_s": 0.5, "decode_tok_s": pytest.approx(4 / 1.4)}
    many = harness.figures([BenchRequest([1] * 8, 5)] * 2, harness.Timing(10.0, 12.0))
    assert many == {"total_s": 2.0, "output_tok_s": 5.0}
    assert harness.figures([BenchRequest([1] * 8, 1)], harness.Timing(0.0, 2.0, [2.0], [2.0])) == {
        "total_s": 2.0, "prefill_tok_s": 4.0, "ttft_s": 2.0,
    }  # fmt: skip


def test_our_runner_writes_its_figures(load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole way through `run_minipaged.py`, on the demo model with a workload that fits it."""
    harness = load("harness")
    runner = load("run_minipaged")
    from minipaged.bench.workloads import BenchRequest, Workload
    from minipaged.model.hub import resolve_model

    small = Workload("W1", "", [BenchRequest(list(range(20)), 6)])
    monkeypatch.setattr(harness, "workload", lambda name: small)
    out = tmp_path / "result.json"
    options = '{"num_blocks": 16, "max_model_len": 256}'
    arguments = ["--workload", "W1", "--model", str(resolve_model(None)), "--out", str(out), "--options", options]
    monkeypatch.setattr(sys, "argv", ["run", *arguments])
    harness.main(runner.Minipaged)
    import json

    result = json.loads(out.read_text())
    assert result["decode_tok_s"] > 0
    assert result["ttft_s"] > 0
    assert result["bytes_per_step"] > 6e6 / 2  # at least the weights of the demo model in their type
    assert result["peak_bytes"] > 100e6
    assert "minipaged" in result["version"]
    assert "weights and KV cache" in result["precision"]
