"""`benchmarks/compare_serving.py`: order, arguments and page from made-up reports, and one run on the demo model."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
MODULES = ("compare_serving", "serving_table", "compare", "comparison")


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("compare_serving")


def report(*, tok_s: float, itl: float, failed: int = 0, events: int = 100, good: float | None = 0.4) -> dict[str, Any]:
    times = {"mean": itl, "p50": itl, "p90": itl, "p99": 2 * itl, "max": 3 * itl}
    return {
        "failed": failed, "output_tok_s": tok_s, "requests_per_s": tok_s / 64, "goodput_per_s": good, "ttft_ms": times,
        "tpot_ms": times, "itl_ms": times, "e2e_ms": times, "output_tokens": 100, "token_events": events,
    }  # fmt: skip


def run(serving: Any, engine: str, scenario: str, quiet: bool = True, **values: Any) -> dict[str, Any]:
    made = report(**values)
    head = {"engine": engine, "workload": scenario, "round": 0, "quiet": quiet, "read_bandwidth": [40e9, 42e9]}
    return {**head, **serving.figures(made), "report": made}


def test_servers_take_turns_in_going_first(serving: Any) -> None:
    assert list(serving.schedule(["ours", "vllm"], 2)) == [(0, "ours"), (0, "vllm"), (1, "vllm"), (1, "ours")]


def test_both_servers_run_the_same_model_with_the_same_pool(serving: Any, tmp_path: Path) -> None:
    model = str(tmp_path / serving.MODEL)
    own, other = (make(tmp_path, 2) for make in serving.SERVERS.values())
    assert model in own.command
    assert model in other.command
    assert own.command[own.command.index("--kv-cache-memory") + 1] == str(4 << 30)
    assert other.variables["VLLM_CPU_KVCACHE_SPACE"] == "4"
    assert other.variables["VLLM_CPU_OMP_THREADS_BIND"] == "0-1"
    assert "--no-enable-prefix-caching" in serving.FLAGS


def test_scenarios_are_flags_that_the_client_knows(serving: Any) -> None:
    from typer.main import get_command

    from minipaged.cli.main import app

    bench = get_command(app).commands["bench"]  # type: ignore[attr-defined]
    client = bench.commands["serve"]
    for scenario in [*serving.SCENARIOS.values(), serving.WARM_UP]:
        arguments = serving.scenario_arguments(scenario, Path(__file__))
        parameters = client.make_context("serve", list(arguments)).params
        assert (parameters["dataset"] == "azure") == scenario.trace
        assert parameters["seed"] == (1 if scenario is serving.WARM_UP else 0)
        assert parameters["num_requests"] >= 4
        limited = serving.scenario_arguments(scenario.limited(3), Path(__file__))
        assert client.make_context("serve", limited).params == {**parameters, "num_requests": 3}
    with pytest.raises(ValueError, match="trace"):
        serving.scenario_arguments(serving.SCENARIOS["azure"], None)


def test_figures_leave_out_what_a_report_lacks(serving: Any) -> None:
    found = serving.figures({**report(tok_s=64, itl=50, events=50, good=None), "tpot_ms": None})
    assert found["itl_p99_ms"] == 100
    assert found["requests_per_s"] == 1
    assert found["tokens_per_event"] == 2
    assert "goodput_per_s" not in found
    assert "tpot_p50_ms" not in found


def test_medians_over_quiet_runs_and_ratios(serving: Any) -> None:
    runs = [
        run(serving, "ours", "steady", tok_s=30, itl=40),
        run(serving, "ours", "steady", tok_s=32, itl=42),
        run(serving, "ours", "steady", quiet=False, tok_s=5, itl=900, failed=1),
        run(serving, "vllm", "steady", tok_s=20, itl=80, good=0.0),
        {"engine": "vllm", "workload": "-", "round": 1, "error": "not ready"},
    ]
    (entry,) = serving.summarise(runs)
    assert entry["values"]["ours"]["output_tok_s"] == 31
    assert entry["values"]["ours"]["itl_p99_ms"] == 82
    assert entry["values"]["ours"]["failed"] == 1, "also those of noisy runs"
    assert entry["ratios"]["vllm"]["output_tok_s"] == pytest.approx(31 / 20)
    assert entry["ratios"]["vllm"]["itl_p99_ms"] == pytest.approx(82 / 160)
    assert "goodput_per_s" not in entry["ratios"]["vllm"], "nothing is divided by 0"
    assert (entry["measurements"], entry["noisy"]) == (4, 1)


def test_page(serving: Any) -> None:
    runs = [
        run(serving, "ours", "steady", tok_s=30, itl=40),
        run(serving, "vllm", "steady", quiet=False, tok_s=20, itl=80),
        {"engine": "vllm", "workload": "-", "round": 1, "error": "not ready after 900 s"},
    ]
    page = {
        "when": "now", "minutes": 13.2, "threads": 2, "read_probe": "a probe", "flags": ["--dtype", "bfloat16"],
        "machine": {"cpu": "A CPU", "cores": 2, "cpu_features": ["avx2"], "memory_bytes": 2**34, "system": "Linux"},
        "scenarios": {"steady": {"what": "few requests", "arguments": []}}, "kv_pool_gib": 4, "runs": runs,
        "summary": serving.summarise(runs),
        "servers": {"ours": {"version": "1.0", "precision": "bfloat16 weights and KV cache", "start_s": 4.0}},
    }  # fmt: skip
    text = serving.to_markdown(page)
    assert "A CPU, 2 cores (avx2), 16.0 GiB, Linux; 2 threads." in text
    assert "`--dtype bfloat16`" in text
    assert "## steady: few requests" in text
    assert "| ours | 1.0 | bfloat16 weights and KV cache | 4 |" in text
    assert "| ours | 30.0 | 0.47 | 0.40 | 40.0 | 80.0 | 40.0 | 40.0 | 80.0 | 80.0 | 1.00 | 0 |" in text
    assert "| ours / vllm | 1.50 | 1.50 | 1.00 | 0.50 | 0.50 | 0.50 | 0.50 | 0.50 | 0.50 | | |" in text
    assert "vllm, round 2: not ready after 900 s" in text
    assert "| 1 | vllm | steady | 20.0 | 160 | 160 | 40.0 -> 42.0 | noisy |" in text
    assert "Noisy: 1 of 2 runs." in text
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert {line.count("|") - 1 for line in table} == {4, 8, 12}, "every row has its table's number of cells"


def test_our_server_is_started_driven_and_ended(serving: Any) -> None:
    """The whole way, on the demo model: readiness, the client's process, and nobody left on the port."""
    from minipaged.model.hub import resolve_model

    command = [sys.executable, "-m", "minipaged", "serve", str(resolve_model(None))]
    server = serving.Server(command, {"PYTHONPATH": str(serving.SOURCES), "OMP_WAIT_POLICY": "PASSIVE"})
    small = serving.Scenario("", ("--num-requests", "2", "--prompt-tokens", "16", "--output-tokens", "4"))
    flags = ["--max-model-len", "256", "--dtype", "float32"]
    with serving.running(server, flags, 120) as url:
        assert json.loads(serving._get(f"{url}/v1/models"))["data"][0]["id"] == serving.NAME
        result = serving.send(url, small, None)
    assert (result["completed"], result["failed"]) == (2, 0)
    assert result["token_events"] == result["output_tokens"]
    assert not serving._answers(f"{url}/v1/models")


def test_a_server_that_ends_says_why(serving: Any) -> None:
    server = serving.Server([sys.executable, "-c", "raise SystemExit('no model here')"], {})
    with pytest.raises(serving.ServerError, match="status 1: no model here"), serving.running(server, [], 60):
        pass
    silent = serving.Server([sys.executable, "-c", "import time; time.sleep(600)"], {"HOME": None})
    with pytest.raises(serving.ServerError, match=r"not ready after 0\.2 s"), serving.running(silent, [], 0.2):
        pass
    assert "HOME" in os.environ, "only the server's environment loses it"
