"""Clients that go away, come all at once, read slowly or speak nonsense; engines that fail (C41, C48, C49)."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_rig import Rig, events, read_until, stub_rig, wait_until

from minipaged.server import lifecycle

BODY = {"prompt": "hi", "max_tokens": 400}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("moment", ["prefill", "decode", "queued"])
@pytest.mark.parametrize("way", ["close", "reset"])
def test_c41_a_client_that_goes_takes_its_request_along(
    tokenizer_folder: Path, stream: bool, moment: str, way: str
) -> None:
    """Aborted within two steps of the engine, blocks free, a queued one never starts."""
    with stub_rig(tokenizer_folder, engine={"max_num_seqs": 1, "max_num_batched_tokens": 4}) as rig:
        runner = rig.runner
        runner.gate.clear()
        other = (
            rig.send("/v1/completions", {**BODY, "prompt": "other", "max_tokens": 3}) if moment == "queued" else None
        )
        if other is not None:
            wait_until(lambda: len(rig.service.admission.live) == 1, "the other request is there")
            runner.in_step.wait(5)
        prompt = "a prompt of several chunks" if moment == "prefill" else "hi"
        victim = rig.send("/v1/completions", {**BODY, "prompt": prompt, "stream": stream})
        if moment == "decode":
            runner.close_at = 4  # not the test's thread: it could come too late, after the last token
            runner.gate.set()
            wait_until(lambda: runner.steps == 4, "it decodes")
        wait_until(lambda: len(rig.service.admission.live) == 1 + (other is not None), "it is submitted")
        assert runner.in_step.wait(5)
        if way == "reset":
            victim.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        victim.close()
        wait_until(lambda: len(rig.service.admission.live) == (other is not None), "the server has noticed")
        steps = runner.steps
        runner.gate.set()
        if other is not None:
            assert b'"completion_tokens":3' in read_until(other, b'"usage"')
            other.close()
            assert [len(prompt) for prompt in runner.prompts] == [len("other")], "the queued one never started"
        rig.wait_idle()
        assert runner.steps <= steps + (3 if other is not None else 2)
        assert rig.metric("num_requests_running") == rig.metric("num_requests_waiting") == 0


def test_c41_n_children_and_several_prompts_go_together(stub: Rig) -> None:
    stub.runner.gate.clear()
    victim = stub.send("/v1/completions", {**BODY, "prompt": ["a", "b", "c"], "n": 3, "stream": True})
    stub.runner.in_step.wait(5)
    wait_until(lambda: len(stub.service.admission.live) == 3, "three requests")
    victim.close()
    wait_until(lambda: not stub.service.admission.live, "the server has noticed")
    stub.runner.gate.set()
    stub.wait_idle()


CLIENT = """
import sys, urllib.request
body = b'{"prompt": "hi", "max_tokens": 900, "stream": true}'
answer = urllib.request.urlopen(urllib.request.Request(sys.argv[1] + "/v1/completions", body))
print(answer.readline().decode(), flush=True)
answer.read()
"""


def test_c41_kill_9_of_a_client_in_the_middle_of_a_stream(stub: Rig) -> None:
    stub.runner.delay = 0.005
    client = subprocess.Popen([sys.executable, "-c", CLIENT, stub.url], stdout=subprocess.PIPE, text=True)
    try:
        assert client.stdout is not None
        assert client.stdout.readline().startswith("data: ")
    finally:
        client.send_signal(signal.SIGKILL)
        client.wait()
        client.stdout.close()
    stub.wait_idle()
    assert stub.runner.steps < 900, "it did not go on to the end"


def test_c48_health_is_answered_while_a_step_runs(stub: Rig) -> None:
    """Compute is never on the event loop: every probe answers while the engine is held in a step."""
    stub.runner.gate.clear()
    sock = stub.send("/v1/completions", {**BODY, "max_tokens": 2})
    assert stub.runner.in_step.wait(5)
    for path in ("/health", "/ready", "/version", "/v1/models", "/metrics", "/"):
        assert stub.http.get(path).status_code == 200
    assert stub.http.post("/tokenize", json={"prompt": "x" * 10_000}).json()["count"] == 10_000
    assert stub.runner.in_step.is_set(), "it was the same step all the time"
    stub.runner.gate.set()
    read_until(sock, b'"usage"')
    sock.close()


def test_c48_tokens_are_sent_as_they_are_made(stub: Rig) -> None:
    """The first token arrives while the second one is being held back."""
    second = threading.Event()

    def script(sequence: Any) -> int:
        if sequence.num_generated == 1:
            assert second.wait(10)
        return ord("a") + sequence.num_generated

    stub.runner.script = script
    sock = stub.send("/v1/completions", {**BODY, "max_tokens": 2, "stream": True})
    data = read_until(sock, b'"text":"a"')
    assert b'"text":"b"' not in data
    second.set()
    read_until(sock, b"[DONE]")
    sock.close()


def test_c48_a_long_prompt_and_a_stream_share_the_steps(tokenizer_folder: Path) -> None:
    """Chunks of 64: while the prompt of 400 goes in, the stream gets a token in every step, and both advance."""
    with stub_rig(tokenizer_folder, engine={"max_num_batched_tokens": 64}) as rig:
        rig.runner.delay = 0.005
        stream = rig.send("/v1/completions", {**BODY, "max_tokens": 60, "stream": True})
        read_until(stream, b'"text"')
        answer = rig.http.post("/v1/completions", json={"prompt": [7] * 400, "max_tokens": 1})
        assert answer.json()["usage"]["completion_tokens"] == 1
        chunks = [plan for plan in rig.runner.plans if any(tokens > 1 and start > 0 for start, tokens in plan)]
        assert len(chunks) >= 6
        assert all(plan[0][1] == 1 for plan in chunks), "a decode in every step"
        assert all(sum(tokens for _, tokens in plan) <= 64 for plan in chunks)
        read_until(stream, b"[DONE]")
        stream.close()


def test_c49_two_hundred_clients_at_once(tokenizer_folder: Path) -> None:
    """Every one is answered or refused at once with Retry-After; nobody hangs; afterwards it works as before."""

    async def storm(url: str) -> list[httpx.Response]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as client:
            bodies = [{"prompt": f"client {i}", "max_tokens": 8, "stream": i % 2 == 0} for i in range(200)]
            return await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))

    with stub_rig(tokenizer_folder, engine={"max_num_seqs": 4}, max_queued_requests=50) as rig:
        rig.runner.delay = 0.002
        responses = asyncio.run(storm(rig.url))
        answered = [response for response in responses if response.status_code == 200]
        refused = [response for response in responses if response.status_code == 429]
        assert len(answered) + len(refused) == 200
        assert len(answered) >= 50
        assert refused
        for response in refused:
            assert 1 <= int(response.headers["retry-after"]) <= 60
            assert response.json()["error"]["code"] == "queue_full"
        for response in answered:
            if response.headers["content-type"].startswith("text/event-stream"):
                *chunks, last = events(response)
                assert last == "[DONE]"
                assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "abcdefgh"
            else:
                assert response.json()["choices"][0]["text"] == "abcdefgh"
        assert rig.metric("requests_rejected_total") == len(refused)
        for _ in range(5):
            assert rig.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2}).status_code == 200
        rig.wait_idle()


def test_c49_sequences_are_what_is_counted(tokenizer_folder: Path) -> None:
    """Limit 5, one running: n = 3 and two prompts fill it; six can never wait."""
    with stub_rig(tokenizer_folder, engine={"max_num_seqs": 4}, max_queued_requests=5) as rig:
        rig.runner.gate.clear()
        first = rig.send("/v1/completions", {"prompt": "x", "max_tokens": 1})
        rig.runner.in_step.wait(5)

        def post(**body: Any) -> httpx.Response:
            return rig.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1, **body})

        queued = [rig.send("/v1/completions", {"prompt": "x", "max_tokens": 1, "n": 3})]
        wait_until(lambda: rig.service.admission.queued == 3, "three are queued")
        assert post(n=3).status_code == 429
        queued.append(rig.send("/v1/completions", {"prompt": ["x", "y"], "max_tokens": 1}))
        wait_until(lambda: rig.service.admission.queued == 5, "five are queued")
        assert post().status_code == 429
        assert rig.http.get("/ready").status_code == 503
        assert rig.http.get("/health").status_code == 200
        assert post(prompt=["x"] * 6).status_code == 400
        assert post(n=6).status_code == 400
        rig.runner.gate.set()
        for sock in (first, *queued):
            read_until(sock, b'"usage"')
            sock.close()
        rig.wait_idle()
        assert post(n=3).status_code == 200
        assert rig.http.get("/ready").status_code == 200


def test_a_slow_reader_holds_up_nobody(tokenizer_folder: Path) -> None:
    """The engine finishes its request while it reads nothing; later it finds every token."""
    with stub_rig(tokenizer_folder, num_blocks=600) as rig:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.settimeout(20)
        sock.connect(rig.address)
        body = json.dumps({"prompt": "x", "max_tokens": 2000, "stream": True, "logprobs": 20}).encode()
        head = f"POST /v1/completions HTTP/1.0\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        sock.sendall(head + body)
        wait_until(lambda: rig.runner.steps > 100, "it runs")
        assert rig.client.completions.create(model="stub", prompt="y", max_tokens=5).choices[0].text == "abcde"
        wait_until(lambda: not rig.llm.engine.has_unfinished(), "the engine has finished")
        data = read_until(sock, b"[DONE]")
        sock.close()
        chunks = [json.loads(line[6:]) for line in data.decode().splitlines() if line.startswith("data: {")]
        text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
        assert text == ("abcdefghijklmnopqrstuvwxyz" * 77)[:2000]
        tokens = [token for chunk in chunks for token in chunk["choices"][0]["logprobs"]["tokens"]]
        assert "".join(tokens) == text
        rig.wait_idle()


def test_half_open_connections(tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections that send nothing, half a header or half a body do not keep others out, and are ended."""
    monkeypatch.setattr(lifecycle, "HEADER_TIMEOUT", 0.5)
    with stub_rig(tokenizer_folder, body_timeout=0.5) as rig:
        silent = [rig.connect() for _ in range(40)]
        half_a_header = [rig.connect() for _ in range(40)]
        for sock in half_a_header:
            sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost:")
        half_a_body = [rig.connect() for _ in range(20)]
        for sock in half_a_body:
            sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        assert rig.client.completions.create(model="stub", prompt="y", max_tokens=2).choices[0].text == "ab"
        for sock in (*silent, *half_a_header):
            assert sock.recv(1000) == b""
        for sock in half_a_body:
            data = b""
            while more := sock.recv(1000):
                data += more
            assert data.startswith(b"HTTP/1.1 408 ")
        for sock in (*silent, *half_a_header, *half_a_body):
            sock.close()
        wait_until(lambda: len(rig.server.server_state.connections) <= 2, "the connections are gone")


def test_a_client_that_shuts_its_sending_side(stub: Rig) -> None:
    """A half-closed connection counts as gone; nothing is left behind."""
    sock = stub.send("/v1/completions", BODY)
    sock.shutdown(socket.SHUT_WR)
    stub.wait_idle()
    sock.close()
