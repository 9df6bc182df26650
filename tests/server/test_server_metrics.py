"""Prometheus metrics: every promised name, and numbers that agree with what happened."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from server_rig import Rig, stub_rig, wait_until

GAUGES = (
    "num_requests_running",
    "num_requests_waiting",
    'num_requests_waiting_by_reason{reason="capacity"}',
    "kv_cache_usage_perc",
    "kv_internal_fragmentation_tokens",
)
COUNTERS = (
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "num_preemptions_total",
    "recomputed_tokens_total",
    "prompt_tokens_total",
    "generation_tokens_total",
    'request_success_total{finished_reason="stop"}',
    'request_success_total{finished_reason="length"}',
    'request_success_total{finished_reason="abort"}',
    'request_success_total{finished_reason="error"}',
    "prompt_tokens_cached_total",
    'prompt_tokens_by_source_total{source="local_compute"}',
    'prompt_tokens_by_source_total{source="local_cache_hit"}',
)
HISTOGRAMS = (
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "iteration_tokens_total",
    "time_per_output_token_seconds",
    "request_time_per_output_token_seconds",
    "request_inference_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_max_num_generation_tokens",
    "request_prefill_kv_computed_tokens",
    "request_params_n",
    "request_params_max_tokens",
)
STATES = ("free", "idle", "private", "shared")


def test_every_promised_metric_exists_from_the_start(tokenizer_folder: Path) -> None:
    with stub_rig(tokenizer_folder) as rig:
        text = rig.http.get("/metrics").text
        families = {family.name for family in text_string_to_metric_families(text)}
        assert "minipaged:num_requests_running" in families
        for name in (*GAUGES, *COUNTERS, *(f"{name}_count" for name in HISTOGRAMS)):
            assert rig.metric(name) == 0, name
        blocks = [rig.metric(f'kv_blocks{{state="{state}"}}') for state in STATES]
        assert blocks == [256, 0, 0, 0]
        config = 'cache_config_info{block_size="4",enable_prefix_caching="True",num_gpu_blocks="256"}'
        assert rig.metric(config) == 1


def test_counters_agree_with_what_happened(tokenizer_folder: Path) -> None:
    with stub_rig(tokenizer_folder) as rig:
        prompt = "0123456789"
        for _ in range(2):
            rig.client.completions.create(model="stub", prompt=prompt, max_tokens=5)
        rig.runner.says("ab")
        rig.client.completions.create(model="stub", prompt="x", n=2)
        rig.runner.errors = [RuntimeError("injected")]
        rig.http.post("/v1/completions", json={"prompt": "y"})
        rig.wait_idle()
        assert rig.metric("prompt_tokens_total") == 10 + 10 + 1
        assert rig.metric("generation_tokens_total") == 5 + 5 + 2 * 3
        assert rig.metric("prefix_cache_queries_total") == 10 + 10 + 1 + 1
        assert rig.metric("prefix_cache_hits_total") == 8
        assert rig.metric('request_success_total{finished_reason="length"}') == 2
        assert rig.metric('request_success_total{finished_reason="stop"}') == 1
        assert rig.metric('request_success_total{finished_reason="error"}') == 1
        assert rig.metric("time_to_first_token_seconds_count") == 3
        assert rig.metric("e2e_request_latency_seconds_count") == 3
        assert rig.metric("inter_token_latency_seconds_count") == 4 + 4 + 2
        # 10 + 2 prompt tokens (8 were cached), 1, then decodes: 4 + 4 + 2 * 2
        assert rig.metric("iteration_tokens_total_sum") == 10 + 2 + 1 + 4 + 4 + 2 * 2
        assert not rig.service.metrics._progress
        # Requests that ended by themselves: two of 10 prompt tokens and 5 new ones, one of 1 and 2 x 3.
        assert rig.metric("prompt_tokens_cached_total") == 8
        assert rig.metric('prompt_tokens_by_source_total{source="local_compute"}') == 10 + 2 + 1
        assert rig.metric('prompt_tokens_by_source_total{source="local_cache_hit"}') == 8
        assert rig.metric("request_prompt_tokens_sum") == 10 + 10 + 1
        assert rig.metric("request_prefill_kv_computed_tokens_sum") == 10 + 2 + 1
        assert rig.metric("request_generation_tokens_sum") == 5 + 5 + 2 * 3
        assert rig.metric("request_max_num_generation_tokens_sum") == 5 + 5 + 3
        assert rig.metric("request_params_n_sum") == 1 + 1 + 2 + 1
        assert rig.metric("request_params_max_tokens_sum") == 5 + 5 + 16 + 16
        assert rig.metric("time_per_output_token_seconds_count") == rig.metric("inter_token_latency_seconds_count")
        names = ("inference", "prefill", "decode")
        inference, prefill, decode = (rig.metric(f"request_{name}_time_seconds_sum") for name in names)
        assert inference == pytest.approx(prefill + decode)
        assert rig.metric("e2e_request_latency_seconds_sum") >= inference
        per_token = rig.metric("request_time_per_output_token_seconds_sum")
        assert decode / 4 <= per_token * 1.001
        assert per_token <= decode / 2 * 1.001


def test_gauges_while_requests_run(tokenizer_folder: Path) -> None:
    with stub_rig(tokenizer_folder, num_blocks=10, engine={"max_num_seqs": 2}) as rig:
        rig.runner.gate.clear()
        # Two prompts of 6 tokens with their first block in common, one that waits.
        first = rig.send("/v1/completions", {"prompt": "0123ab", "max_tokens": 2, "n": 2})
        rig.runner.in_step.wait(5)
        second = rig.send("/v1/completions", {"prompt": "zzzz", "max_tokens": 2})
        wait_until(lambda: rig.metric("num_requests_waiting") == 1, "one waits")
        assert rig.metric("num_requests_running") == 1, "n children run as one until the prompt is computed"
        assert rig.metric("kv_cache_usage_perc") == 2 / 10
        assert rig.metric("kv_internal_fragmentation_tokens") == 2
        assert [rig.metric(f'kv_blocks{{state="{state}"}}') for state in STATES] == [8, 0, 2, 0]
        rig.runner.gate.set()
        for sock in (first, second):
            sock.recv(65536)
            sock.close()
        rig.wait_idle()
        assert rig.metric("kv_cache_usage_perc") == 0
        assert rig.metric('kv_blocks{state="free"}') + rig.metric('kv_blocks{state="idle"}') == 10


def test_preemptions_are_counted(tokenizer_folder: Path) -> None:
    with stub_rig(tokenizer_folder, num_blocks=12) as rig:
        rig.runner.gate.clear()
        sockets = [rig.send("/v1/completions", {"prompt": f"{i}234", "max_tokens": 30}) for i in range(3)]
        wait_until(lambda: len(rig.service.admission.live) == 3, "all are there")
        rig.runner.gate.set()
        for sock in sockets:
            data = b""
            while b'"usage"' not in data:
                data += sock.recv(65536)
            assert b'"completion_tokens":30' in data
            sock.close()
        assert rig.metric("num_preemptions_total") > 0
        assert rig.metric("recomputed_tokens_total") > 0


def test_a_client_that_goes_counts_as_aborted(stub: Rig) -> None:
    before = stub.metric('request_success_total{finished_reason="abort"}')
    stub.runner.delay = 0.01
    sock = stub.send("/v1/completions", {"prompt": "x", "max_tokens": 500})
    wait_until(lambda: stub.metric("num_requests_running") == 1, "it runs")
    sock.close()
    stub.wait_idle()
    assert stub.metric('request_success_total{finished_reason="abort"}') == before + 1


def test_status_page(stub: Rig) -> None:
    page = stub.http.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "KV blocks" in page.text
    assert "http" not in page.text.replace("https", "").split("<body>")[1], "nothing is loaded from elsewhere"


def test_two_servers_in_one_process_count_apart(stub: Rig, tokenizer_folder: Path) -> None:
    before = stub.metric("generation_tokens_total")
    with stub_rig(tokenizer_folder) as other:
        other.client.completions.create(model="stub", prompt="x", max_tokens=3)
        assert other.metric("generation_tokens_total") == 3
    assert stub.metric("generation_tokens_total") == before
