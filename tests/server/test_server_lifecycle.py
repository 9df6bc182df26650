"""Start and end: signals in every state of the server, the port, the command line."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from server_rig import wait_until

HERE = Path(__file__).parent
BODY = {"prompt": "hi", "max_tokens": 10_000, "stream": True}


class Process:
    """A server process; its clients use raw sockets, so that reading never outlasts a test."""

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self.process = process
        self.port = port
        self.url = f"http://127.0.0.1:{port}"

    def post(self, body: object) -> socket.socket:
        raw = json.dumps(body).encode()
        sock = socket.create_connection(("127.0.0.1", self.port), 20)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n"
        sock.sendall(head.encode() + raw)
        return sock

    def end(self) -> tuple[int, str]:
        output, _ = self.process.communicate(timeout=30)
        return self.process.returncode, output


@contextmanager
def started(command: list[str], **environment: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "COLUMNS": "200", **environment},
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@contextmanager
def stub_process(folder: Path, *, step: float = 0.01, timeout: float = 10.0) -> Iterator[Process]:
    command = [sys.executable, str(HERE / "stub_server.py"), str(folder), str(step), str(timeout)]
    with started(command) as process:
        assert process.stdout is not None
        server = Process(process, int(process.stdout.readline()))
        wait_until(lambda: healthy(server.url), "it serves")
        yield server


def healthy(url: str) -> bool:
    try:
        return httpx.get(url + "/health").status_code == 200
    except httpx.TransportError:
        return False


def read_all(sock: socket.socket) -> bytes:
    data = b""
    while more := sock.recv(65536):
        data += more
    sock.close()
    return data


def test_sigterm_when_idle(tokenizer_folder: Path) -> None:
    """Idle connections that are kept alive do not hold it up."""
    with stub_process(tokenizer_folder) as server, httpx.Client() as client:
        assert client.get(server.url + "/health").status_code == 200
        server.process.send_signal(signal.SIGTERM)
        code, output = server.end()
        assert code == 0
        assert "ended with 0 blocks in use" in output


def test_sigterm_while_streaming_lets_the_stream_end(tokenizer_folder: Path) -> None:
    """What is in flight goes on to its end; new requests are not taken, on new connections or old ones."""
    with stub_process(tokenizer_folder) as server, httpx.Client(base_url=server.url) as client:
        client.get("/health")
        stream = server.post({**BODY, "max_tokens": 100})
        assert stream.recv(10)
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: not healthy(server.url), "it no longer accepts connections")
        with pytest.raises(httpx.ConnectError, match="refused"):
            httpx.get(server.url + "/ready")
        data = read_all(stream)
        assert b'"finish_reason":"length"' in data
        assert data.rstrip().endswith(b"[DONE]\n\n\r\n0") or b"[DONE]" in data
        assert server.end()[0] == 0


def test_sigterm_ends_streams_that_take_too_long(tokenizer_folder: Path) -> None:
    """After the timeout they get a last event with the reason abort, and the process ends with status 0."""
    with stub_process(tokenizer_folder, timeout=1.0) as server:
        streams = [server.post(BODY) for _ in range(3)]
        for stream in streams:
            assert stream.recv(10)
        began = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        for stream in streams:
            data = read_all(stream)
            assert b'"finish_reason":"abort"' in data
            assert b"[DONE]" in data
        code, output = server.end()
        assert code == 0
        assert "ended with 0 blocks in use" in output
        assert time.monotonic() - began < 15


def test_sigterm_in_prefill(tokenizer_folder: Path) -> None:
    """Chunks of 16 tokens at 0.1 s: it is in the middle of a prompt, which then is aborted like anything else."""
    with stub_process(tokenizer_folder, step=0.1, timeout=0.5) as server:
        request = server.post({"prompt": [5] * 5000, "max_tokens": 5})
        wait_until(lambda: "minipaged:num_requests_running 1.0" in httpx.get(server.url + "/metrics").text, "it runs")
        server.process.send_signal(signal.SIGTERM)
        assert b'"finish_reason":"abort"' in read_all(request)
        code, output = server.end()
        assert code == 0
        assert "ended with 0 blocks in use" in output


def test_a_second_signal_ends_at_once(tokenizer_folder: Path) -> None:
    """Even in the middle of a step that takes for ever."""
    with stub_process(tokenizer_folder, step=1000, timeout=1000) as server:
        request = server.post(BODY)
        wait_until(lambda: "minipaged:num_requests_running 1.0" in httpx.get(server.url + "/metrics").text, "it runs")
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: not healthy(server.url), "it is shutting down")
        server.process.send_signal(signal.SIGTERM)
        assert server.end()[0] == 128 + signal.SIGTERM
        request.close()


def test_the_command(tmp_path: Path) -> None:
    """`minipaged serve`: demo model, a key from the environment, JSON logs without text of users, a clean end."""
    command = [sys.executable, "-m", "minipaged", "serve", "--port", "0", "--num-blocks", "20", "--log-level", "info"]
    with started(command, MINIPAGED_API_KEY="one, two") as process:
        lines = []
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if "serving 'minipaged-demo' on http://127.0.0.1:" in line:
                break
        url = lines.pop().split(" on ")[1].strip().removesuffix("/v1")
        (summary,) = [log["message"] for log in map(json.loads, lines) if "KV pool" in log["message"]]
        assert summary.count("num_blocks = 20 holds requests") == 1
        wait_until(lambda: healthy(url), "it serves")
        assert httpx.get(url + "/v1/models").status_code == 401
        headers = {"Authorization": "Bearer two", "X-Request-Id": "my-id"}
        body = {"prompt": "SECRET TEXT", "max_tokens": 4, "ignore_eos": True}
        answer = httpx.post(url + "/v1/completions", json=body, headers=headers, timeout=30)
        assert answer.status_code == 200
        assert answer.headers["x-request-id"] == "my-id"
        taken = socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])))
        second = [sys.executable, "-m", "minipaged", "serve", "--port", url.rpartition(":")[2]]
        refused = subprocess.run(second, capture_output=True, text=True, timeout=60, check=False)
        assert refused.returncode == 1
        assert "cannot listen on 127.0.0.1" in refused.stderr
        assert "Traceback" not in refused.stderr
        taken.close()
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=30)
        assert process.returncode == 0
        logs = [json.loads(line) for line in output.splitlines()]
        (entry,) = [log for log in logs if log.get("request_id") == "my-id"]
        assert entry["status"] == 200
        assert entry["path"] == "/v1/completions"
        assert entry["completion_tokens"] == 4
        assert entry["finish_reasons"] == ["length"]
        assert "SECRET" not in output
        assert answer.json()["choices"][0]["text"] not in output or not answer.json()["choices"][0]["text"].strip()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--max-queued-requests", "0"],
        ["--step-timeout", "0"],
        ["--port", "70000"],
        ["--api-key", ""],
        ["--served-model-name", ""],
        ["--no-such-flag"],
    ],
)
def test_wrong_usage_is_status_2(arguments: list[str]) -> None:
    from typer.testing import CliRunner

    from minipaged.cli.main import app

    result = CliRunner().invoke(app, ["serve", *arguments])
    assert result.exit_code == 2, result.output


@pytest.mark.parametrize("keys", [",", " , ", " ", ",,"])
def test_a_key_variable_without_a_key_does_not_open_the_server(keys: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from minipaged.cli.main import app

    def never(host: str, port: int) -> None:
        raise AssertionError("it would have served")

    monkeypatch.setattr("minipaged.server.lifecycle.listen", never)
    result = CliRunner().invoke(app, ["serve"], env={"MINIPAGED_API_KEY": keys, "COLUMNS": "200"})
    assert result.exit_code == 2, result.output
    assert "MINIPAGED_API_KEY" in result.output


def test_help_shows_an_example() -> None:
    from typer.testing import CliRunner

    from minipaged.cli.main import app

    result = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    assert "minipaged serve Qwen/Qwen3-0.6B" in result.output
    for flag in ("--host", "--port", "--served-model-name", "--api-key", "--max-queued-requests", "--shutdown-timeout"):
        assert flag in result.output
    assert "127.0.0.1" in result.output
