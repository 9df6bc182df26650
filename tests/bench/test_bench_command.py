"""`minipaged bench`: reports in both forms, their keys, comparison with an earlier one, profile, exit codes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from minipaged.bench import probes

Bench = Callable[..., Result]
BenchJson = Callable[..., dict[str, Any]]

FRAME = {
    "benchmark", "model", "read_bandwidth_gb_s", "read_bandwidth_spread", "read_probe", "matrix_peak_gflop_s",
    "other_cores", "rounds", "noisy_rounds", "matrix_probe", "threads", "backend", "dtype", "device", "machine",
    "versions", "notes",
}  # fmt: skip
FIGURES = {
    "ttft_s",
    "total_s",
    "steps",
    "bytes_per_step",
    "share_of_bandwidth",
    "share_of_limit",
    "share_outside_runner",
}
FIGURES |= {"preemptions", "cached_tokens", "workload", "description", "requests", "prompt_tokens", "output_tokens"}
FIGURES |= {"prefix_caching", "runs", "engine"}
SHORT = ("--prompt-tokens", 16, "--output-tokens", 5)
TINY = ("--shape", "qwen3-tiny", "--kv-cache-memory", 4 << 20)


def test_latency_has_the_fixed_keys(bench_json: BenchJson, monkeypatch: pytest.MonkeyPatch) -> None:
    """The contract's keys, and the share worked out again from a made-up probe of 2 GB/s."""
    monkeypatch.setattr(probes.Probes, "read_bandwidth", lambda self: 2e9)
    report = bench_json("latency", *TINY, *SHORT)
    assert set(report) == FRAME | FIGURES | {"decode_tok_s"}
    assert report["read_bandwidth_gb_s"] == 2.0
    assert report["read_bandwidth_spread"] == 0.0
    # 4 decode steps over 17 to 20 tokens; 2 layers of 2 heads of 32 in bf16, K and V
    weights = 2 * (2 * (64 * 128 * 2 + 64 * 64 * 2 + 3 * 64 * 96 + 2 * 64 + 2 * 32) + 320 * 64 + 64)
    assert report["bytes_per_step"] == round(weights + 18.5 * 2 * 2 * 2 * 32 * 2)
    assert report["share_of_bandwidth"] == pytest.approx(report["bytes_per_step"] * report["decode_tok_s"] / 2e9)
    assert (report["prompt_tokens"], report["output_tokens"], report["steps"]) == (16, 5, 5)
    assert report["workload"] == "W1"
    assert report["prefix_caching"] is False
    assert report["dtype"] == "bfloat16" or "avx512_bf16" not in report["machine"]["cpu_features"]
    assert {"cpu", "cores", "cpu_features", "memory_bytes"} <= set(report["machine"])
    assert {"minipaged", "python", "torch", "numpy"} <= set(report["versions"])
    assert report["threads"] >= 1
    assert report["backend"] in ("cpu", "torch")
    assert len(report["runs"]) == report["rounds"] == 1


def test_bundled_model_is_the_default(bench_json: BenchJson) -> None:
    report = bench_json("latency", *SHORT)
    assert "demo" in report["model"]
    assert "folded into 1024" in report["description"]
    assert (
        any("last-level cache" in note for note in report["notes"]) or not report["machine"]["last_level_cache_bytes"]
    )


def test_throughput_of_many_requests(bench_json: BenchJson) -> None:
    report = bench_json("throughput", *TINY, "--workload", "w2", *SHORT)
    assert set(report) == FRAME | FIGURES | {"decode_tok_s", "output_tok_s"}
    assert (report["requests"], report["prompt_tokens"], report["output_tokens"]) == (8, 128, 40)
    assert report["output_tok_s"] == pytest.approx(40 / report["total_s"])


def test_w3_runs_whole_with_its_own_lengths(bench_json: BenchJson) -> None:
    """All 32 requests in steps of at most 64 sequences: every token is generated, or the benchmark fails."""
    report = bench_json("throughput", "--shape", "qwen3-tiny", "--output-tokens", 2, "--prompt-tokens", 40)
    assert (report["workload"], report["requests"], report["output_tokens"]) == ("W3", 32, 64)


def test_shared_prefix_is_found_in_the_cache(bench_json: BenchJson) -> None:
    """16 prompts of 64 equal tokens each: all but the first admission find what is computed by then."""
    report = bench_json(
        "throughput",
        *TINY,
        "--workload",
        "shared-prefix",
        "--prompt-tokens",
        64,
        "--max-num-seqs",
        1,
        "--output-tokens",
        2,
    )
    assert report["prefix_caching"] is True
    assert report["cached_tokens"] == 15 * 48  # whole blocks of 16, the last token is always computed
    off = bench_json(
        "throughput", *TINY, "--workload", "shared-prefix", "--prompt-tokens", 64, "--output-tokens", 2,
        "--no-enable-prefix-caching",
    )  # fmt: skip
    assert (off["prefix_caching"], off["cached_tokens"]) == (False, 0)


def test_prefill(bench_json: BenchJson) -> None:
    report = bench_json("prefill", *TINY, "--prompt-tokens", 100)
    assert set(report) == FRAME | FIGURES | {"prefill_tok_s", "share_of_matrix_peak"}
    assert report["prefill_tok_s"] == pytest.approx(100 / report["ttft_s"])
    assert report["bytes_per_step"] == 0  # no step decodes


def test_step(bench_json: BenchJson) -> None:
    report = bench_json("step", "--shape", "qwen3-tiny", "--sequences", 3, "--context", 40, "--prefill-tokens", 50)
    assert [case["case"] for case in report["cases"]] == ["decode, 3 x 40", "prefill of 50"]
    decode, prefill = report["cases"]
    assert decode["tok_s"] == pytest.approx(3 / decode["seconds"])
    assert prefill["tok_s"] == pytest.approx(50 / prefill["seconds"])
    assert report["bytes_per_step"] == decode["bytes"]
    assert prefill["share_of_limit"] == pytest.approx(
        max(prefill["share_of_bandwidth"], prefill["share_of_matrix_peak"])
    )


def test_attention_alone(bench_json: BenchJson) -> None:
    """Decode counts the bytes of K and V, prefill the operations of visible keys only."""
    sizes = ("--shape", "qwen3-tiny", "--sequences", 3, "--context", 50)
    (case,) = bench_json("attention", *sizes)["cases"]
    assert case["case"] == "attention decode, 3 x 50"
    assert case["bytes"] == 2 * 3 * 50 * 2 * 32 * 2
    (case,) = bench_json("attention", *sizes, "--scattered")["cases"]
    assert case["case"] == "attention decode, 3 x 50, scattered blocks"
    (case,) = bench_json("attention", *sizes, "--queries", 20)["cases"]
    visible = 3 * sum(range(31, 51))
    assert case["gflop_s"] * case["seconds"] * 1e9 == pytest.approx(4 * visible * 4 * 32)


def test_linear_alone(bench_json: BenchJson) -> None:
    report = bench_json("linear", "--shape", "qwen3-tiny", "--rows", 1, "--rows", 5)
    names = [case["case"] for case in report["cases"]]
    assert names[:2] == ["linear qkv 64 -> 256, 1 rows", "linear qkv 64 -> 256, 5 rows"]
    assert len(names) == 10
    assert names[-1] == "linear head 64 -> 320, 5 rows"


def test_startup_of_a_random_shape_from_a_temporary_file(bench_json: BenchJson) -> None:
    report = bench_json("startup", "--shape", "qwen3-tiny", "--num-blocks", 8, "--max-model-len", 64)
    assert report["total_s"] == pytest.approx(report["own_s"] + report["import_torch_s"])
    assert 0 < report["load_s"] < report["total_s"]
    numbers = 2 * (64 * 128 * 2 + 64 * 64 * 2 + 3 * 64 * 96 + 2 * 64 + 2 * 32) + 320 * 64 + 64
    assert report["packed_weight_bytes"] == numbers * (2 if report["dtype"] == "bfloat16" else 4)
    assert report["weight_file_bytes"] > numbers * 2
    if sys.platform == "linux":
        assert report["anonymous_growth_bytes"] > 0


def test_text_report_says_what_ran_where(bench: Bench) -> None:
    result = bench("latency", *TINY, *SHORT, "--rounds", 1)
    assert result.exit_code == 0, result.output
    for word in ("machine", "CPU features", "versions", "threads", "read probe", "noise", "spread", "GFLOP/s"):
        assert word in result.stdout
    for word in (
        "decode, per sequence",
        "time to first token",
        "share of read bandwidth",
        "qwen3-tiny (random weights)",
    ):
        assert word in result.stdout
    assert "\x1b" not in result.stdout


def test_vs_compares_with_an_earlier_report(bench: Bench, bench_json: BenchJson, tmp_path: Path) -> None:
    first = bench_json("latency", *TINY, *SHORT)
    other = {**first, "decode_tok_s": first["decode_tok_s"] * 2, "threads": first["threads"] + 1}
    path = tmp_path / "other.json"
    path.write_text(json.dumps(other))
    report = bench_json("latency", *TINY, *SHORT, "--vs", path)
    row = report["vs"]["figures"]["decode_tok_s"]
    assert row == {"now": report["decode_tok_s"], "other": other["decode_tok_s"], "ratio": row["now"] / row["other"]}
    assert report["vs"]["figures"]["bytes_per_step"]["ratio"] == 1.0
    assert report["vs"]["differences"] == {"threads": [first["threads"] + 1, first["threads"]]}
    text = bench("latency", *TINY, *SHORT, "--rounds", 1, "--vs", path)
    assert "now / other" in text.stdout
    assert "not the same threads" in " ".join(text.stdout.split())


def test_profile_accounts_for_the_whole_step(bench: Bench, bench_json: BenchJson) -> None:
    report = bench_json("latency", *TINY, *SHORT, "--profile")
    decode, prefill = report["profile"]["decode"], report["profile"]["prefill"]
    assert (decode["steps"], prefill["steps"]) == (4, 1)
    for part in (decode, prefill):
        assert sum(op["share"] for op in part["ops"]) == pytest.approx(1.0)
        calls = {op["op"]: op["calls_per_step"] for op in part["ops"]}
        assert calls["attention"] == calls["linear qkv"] == calls["linear down"] == calls["qk_norm_rope_write"] == 2
        assert calls["linear head"] == calls["embed"] == calls["attention plan"] == 1
    text = bench("step", "--shape", "qwen3-tiny", "--sequences", 1, "--rounds", 1, "--profile")
    assert "8 decode steps" in text.stdout
    assert "linear gate_up" in text.stdout


def test_plot_is_written(bench: Bench, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="drawn only where matplotlib is installed; it is not a dependency")
    result = bench("latency", *TINY, *SHORT, "--rounds", 1, "--plot", tmp_path / "profile.svg")
    assert result.exit_code == 0, result.output
    assert "attention" in (tmp_path / "profile.svg").read_text()


def test_plot_without_matplotlib_says_what_to_install(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = bench("latency", *TINY, *SHORT, "--rounds", 1, "--plot", tmp_path / "profile.svg")
    assert result.exit_code == 1
    assert "pip install matplotlib" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("latency", "--workload", "W9"), "'W9' is unknown; choose one of W1"),
        (("latency", "--workload", "W2"), "one request"),
        (("latency", "--shape", "qwen3-9b"), "choose one of qwen3-0.6b"),
        (("latency", "somewhere", "--shape", "qwen3-0.6b"), "give one"),
        (("latency", "--rounds", "0"), "--rounds must be at least 1"),
        (("latency", "--vs", "/no/such/report.json"), "cannot be read"),
        (("latency", "--workload", "W5"), "needs 8224 positions"),
        (("step", "--context", "5000"), "more than the 512 positions"),
        (("step", "--sequences", "0"), "above 0"),
        (("attention", "--sequences", "2"), "give both or neither"),
        (("attention", "--sequences", "2", "--context", "8", "--queries", "9"), "more than --context 8"),
        (("latency", "--block-size", "0"), "block_size must be"),
        (("latency", "--threads", "0"), "threads must be"),
        (("step", "--block-size", "0"), "--block-size must be"),
        (("attention", "--dtype", "int3"), "--dtype int3: choose"),
        (("linear", "--backend", "abacus"), "--backend abacus: choose"),
        (("latency", "--plot", "/no/such/folder/x.svg"), "there is no folder"),
    ],
)
def test_wrong_usage_is_status_2_and_one_line(bench: Bench, arguments: tuple[str, ...], words: str) -> None:
    result = bench(*arguments)
    assert result.exit_code == 2, result.output
    assert words in result.stderr
    assert result.stdout == ""
    assert len(result.stderr.strip().splitlines()) <= 2


def test_missing_model_is_status_1(bench: Bench) -> None:
    result = bench("latency", "/no/such/model", "--rounds", 1)
    assert result.exit_code == 1
    assert "/no/such/model" in result.stderr


def test_a_failing_start_gives_the_reason(bench: Bench) -> None:
    result = bench("startup", "--shape", "qwen3-tiny", "--block-size", 0, "--rounds", 1)
    assert result.exit_code == 1
    assert "block_size must be" in result.stderr


@pytest.mark.parametrize("name", ["latency", "throughput", "prefill", "attention", "linear", "step", "startup"])
def test_help_shows_an_example_and_every_option(bench: Bench, name: str) -> None:
    result = bench(name, "--help")
    assert result.exit_code == 0
    for word in ("Example:", "--shape", "--json", "--vs", "--threads", "--backend"):
        assert word in result.stdout
