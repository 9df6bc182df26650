"""`bench serve`: what it sends, what it counts, what it prints; against this server and against a rude one."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from server_rig import Rig, stub_rig
from typer.testing import CliRunner

from minipaged.bench.load_client import LoadClient, Sample
from minipaged.bench.serve import LoadOptions, percentiles, run_load, summarise
from minipaged.bench.traffic import azure_trace, plan, poisson_times, random_lengths
from minipaged.cli.main import app

TRACE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:51.2224670,879,55
"""


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["bench", "serve", *arguments])


@pytest.mark.parametrize("arguments", [[], ["--chat"], ["--prompts", "text"], ["--concurrency", "2"]])
def test_json_against_this_server(stub: Rig, arguments: list[str]) -> None:
    stub.runner.delay = 0.003
    sizes = ("--prompt-tokens", "20", "--output-tokens", "8", "--num-requests", "12")
    result = run("--url", stub.url, *sizes, "--json", *arguments)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["completed"] == report["requests"] == 12
    assert report["failed"] == 0
    wanted = sum(output for _, output in random_lengths(12, 20, 8, 0.5, 0))
    assert report["output_tokens"] == wanted, "exactly as many tokens as planned"
    for key in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms"):
        values = [report[key][name] for name in ("p50", "p90", "p99", "max")]
        assert values == sorted(values)
        assert values[0] > 0
    assert report["ttft_ms"]["max"] <= report["e2e_ms"]["max"]
    assert report["model"] == "stub"
    assert {"machine", "versions", "duration_s", "requests_per_s", "cached_tokens"} <= set(report)


def test_prompts_have_the_planned_tokens_and_cached_ones_are_counted(stub: Rig) -> None:
    sizes = ("--prompt-tokens", "30", "--spread", "0", "--output-tokens", "2", "--num-requests", "3", "--seed", "5")
    first = json.loads(run("--url", stub.url, *sizes, "--json").stdout)
    again = json.loads(run("--url", stub.url + "/v1", *sizes, "--json").stdout)
    assert first["prompt_tokens"] == again["prompt_tokens"] == 90
    assert first["cached_tokens"] == 0
    assert again["cached_tokens"] == 3 * 28, "the same seed sends the same prompts"


def test_concurrency_is_a_limit(stub: Rig) -> None:
    stub.runner.delay = 0.002
    run("--url", stub.url, "--concurrency", "3", "--num-requests", "20", "--output-tokens", "5", "--json")
    assert max(len(plan) for plan in stub.runner.plans) <= 3


def test_the_table(stub: Rig) -> None:
    stub.runner.delay = 0.003
    result = run(
        "--url", stub.url, "--num-requests", "3", "--output-tokens", "9", "--slo-ttft", "10000", "--slo-tpot", "0.0001"
    )
    assert result.exit_code == 0
    for text in ("3 of 3 requests", "p99", "inter-token latency", "goodput 0.00 requests/s"):
        assert text in result.stdout
    assert "\x1b" not in result.stdout


def test_a_trace_gives_lengths_and_times(stub: Rig, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    assert azure_trace(path, 10) == [
        (0.0, 374, 44),
        (pytest.approx(4.314579), 396, 109),
        (pytest.approx(4.541877), 879, 55),
    ]
    limits = ("--max-prompt-tokens", "20", "--max-output-tokens", "5", "--speed", "100")
    report = json.loads(run("--url", stub.url, "--dataset", "azure", str(path), *limits, "--json").stdout)
    assert report["completed"] == 3
    assert report["prompt_tokens"] == 60
    assert report["output_tokens"] == 15
    assert report["duration_s"] >= 0.0454


def test_poisson_arrivals() -> None:
    times = poisson_times(20_000, 5.0, seed=1)
    gaps = np.diff(times)
    assert times[0] == 0
    assert np.mean(gaps) == pytest.approx(0.2, rel=0.03)
    assert np.std(gaps) == pytest.approx(0.2, rel=0.05), "exponential: as wide as its mean"
    assert poisson_times(3, math.inf, seed=1) == [0.0] * 3


def test_plans_are_reproducible_and_prompts_differ() -> None:
    def make(seed: int) -> list[Any]:
        return plan([0.0] * 5, [(50, 3)] * 5, form="ids", vocabulary=256, seed=seed)

    assert make(1) == make(1)
    assert make(1) != make(2)
    assert len({tuple(request.prompt) for request in make(1)}) == 5
    assert all(0 <= token < 256 for request in make(1) for token in request.prompt)


def test_numbers_of_known_samples() -> None:
    """Ten requests sent at 0, first token after 0.1 * (i + 1) s, then one every 10 ms; worked out by hand."""
    samples = [
        Sample(0.0, [0.1 * (i + 1) + 0.01 * k for k in range(5)], 2.0, 200, prompt_tokens=7, output_tokens=5)
        for i in range(10)
    ]
    samples.append(Sample(0.0, error="429: full", status=429, ended=0.1))
    report = summarise(samples, 2.0, LoadOptions(ttft_slo=0.55, tpot_slo=0.011))
    assert report["completed"] == 10
    assert report["errors"] == {"429: full": 1}
    assert report["output_tok_s"] == 25
    assert report["total_tok_s"] == 60
    assert report["token_events"] == 50
    assert report["ttft_ms"]["p50"] == pytest.approx(550)
    assert report["ttft_ms"]["mean"] == pytest.approx(550)
    assert report["ttft_ms"]["p90"] == pytest.approx(910)
    assert report["tpot_ms"]["p99"] == pytest.approx(10)
    assert report["itl_ms"]["p50"] == pytest.approx(10)
    assert report["e2e_ms"]["max"] == pytest.approx(1040)
    assert report["goodput_per_s"] == 2.5
    assert report["good_share"] == pytest.approx(5 / 11)
    assert percentiles([]) is None
    assert summarise([], 0.0, LoadOptions())["ttft_ms"] is None


@contextmanager
def rude_server() -> Iterator[str]:
    """Other servers: chunked transfer, events cut anywhere, comments, no usage, broken connections, errors."""
    turns = itertools.count()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            body = b'{"data": [{"id": "rude"}]}'
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            turn = next(turns) % 4
            if turn == 0:
                self.send_error(500)
                return
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            events = b": ping\r\n\r\n" + b'data: {"choices": [{"text": "a"}]}\r\n\r\n' * 3
            if turn == 1:
                events += b"data: [DONE]\r\n\r\n"
            if turn == 2:
                events += b'data: {"error": {"message": "out of luck"}}\n\ndata: [DONE]\n\n'
            for start in range(0, len(events), 7):
                part = events[start : start + 7]
                self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
            if turn != 3:
                self.wfile.write(b"0\r\n\r\n")
            self.close_connection = True

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_other_servers_and_their_failures() -> None:
    with rude_server() as url:
        planned = plan([0.0] * 4, [(5, 3)] * 4, form="ids", vocabulary=256, seed=0)
        report = asyncio.run(run_load(LoadClient(url), planned, LoadOptions(concurrency=1)))
    assert report["model"] == "rude"
    assert report["completed"] == 1
    assert report["output_tokens"] == 3, "without usage the events are counted"
    assert report["failed"] == 3
    errors = " ".join(report["errors"])
    assert "500" in errors
    assert "out of luck" in errors
    assert "RemoteProtocolError" in errors, "a stream that breaks off has failed"


def test_a_full_server_is_counted_as_failures(tokenizer_folder: Path) -> None:
    with stub_rig(tokenizer_folder, engine={"max_num_seqs": 1}, max_queued_requests=2) as rig:
        rig.runner.delay = 0.01
        report = json.loads(run("--url", rig.url, "--num-requests", "20", "--json").stdout)
        assert report["completed"] + report["failed"] == 20
        assert report["failed"] > 5
        assert any("429" in error for error in report["errors"])


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["--url", "http://127.0.0.1:9"], 1),
        (["--url", "ftp://x"], 2),
        (["--dataset", "azure"], 2),
        (["--dataset", "other"], 2),
        (["--dataset", "azure", "/no/such/file"], 2),
        (["--request-rate", "0"], 2),
        (["--request-rate", "-1"], 2),
        (["--slo-ttft", "-1"], 2),
        (["--slo-tpot", "0"], 2),
        (["--slo-tpot", "nan"], 2),
        (["--prompts", "haiku"], 2),
        (["--num-requests", "0"], 2),
    ],
)
def test_wrong_usage(arguments: list[str], status: int) -> None:
    result = run(*arguments)
    assert result.exit_code == status
    assert "Traceback" not in result.output


def test_a_server_that_is_not_there_is_named() -> None:
    with socket.socket() as taken:  # bound, but nobody listens: no other process can answer here
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        result = run("--url", url)
    assert result.exit_code == 1
    assert f"error: cannot connect to {url}: is the server running there?" in result.output
    assert "Traceback" not in result.output


def test_a_file_that_is_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "other.csv"
    path.write_text("a,b\n1,2\n")
    result = run("--dataset", "azure", str(path))
    assert result.exit_code == 2
    assert "TIMESTAMP" in result.output
