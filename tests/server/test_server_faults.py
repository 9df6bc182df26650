"""Clients that speak nonsense and engines that fail: the server answers, and goes on or says that it cannot."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from server_rig import Rig, events, read_until, stub_rig, wait_until

from minipaged.engine.plan import SampledToken

BODY = {"prompt": "hi", "max_tokens": 400}


@pytest.mark.parametrize(
    "raw",
    [
        b"\x00\xff\xfe\x00garbage\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: abc\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n12345",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"".join(b"X-%d: y\r\n" % i for i in range(20_000)) + b"\r\n",
        b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nbad header\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
)
def test_malformed_http_is_refused_and_forgotten(stub: Rig, raw: bytes) -> None:
    sock = stub.connect()
    answer = b""
    try:
        with suppress(ConnectionError):  # refused before we had said everything
            sock.sendall(raw)
            while more := sock.recv(65536):
                answer += more
                if answer.startswith(b"HTTP/1.1 2"):
                    break
    finally:
        sock.close()
    assert not answer or answer.startswith(b"HTTP/1.1 4"), answer[:100]
    assert b"Traceback" not in answer
    stub.runner.says("ok")
    assert stub.client.completions.create(model="stub", prompt="hi").choices[0].text == "ok"


@pytest.mark.parametrize("where", ["runner", "scheduler"])
def test_an_engine_that_fails_answers_500_and_goes_on(stub: Rig, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one piece: 500. In a stream: an error event, then [DONE]. Others and later ones are well."""

    def fail() -> None:
        if where == "runner":
            stub.runner.errors = [RuntimeError("injected")]
            return
        scheduler = stub.llm.engine.scheduler
        real = scheduler.schedule

        def broken() -> Any:
            monkeypatch.setattr(scheduler, "schedule", real)
            raise RuntimeError("injected")

        monkeypatch.setattr(scheduler, "schedule", broken)

    for path, body in (
        ("/v1/completions", {"prompt": ["a", "b"]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ):
        fail()
        answer = stub.http.post(path, json=body)
        assert answer.status_code == 500
        assert "injected" in answer.json()["error"]["message"]
        assert answer.json()["error"]["type"] == "server_error"
        assert "Traceback" not in answer.text
        fail()
        stream = stub.http.post(path, json={**body, "stream": True})
        assert stream.status_code == 200
        error, done = events(stream)
        assert "injected" in error["error"]["message"]
        assert done == "[DONE]"
        assert stub.http.get("/health").status_code == 200
        stub.wait_idle()
        assert stub.http.post(path, json={**body, "max_tokens": 2}).status_code == 200


@pytest.mark.parametrize("where", ["forward pass", "sampler"])
def test_a_failed_request_is_one_error_line_without_its_text(
    stub: Rig, where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether the whole step fails or one sample, and however many texts were asked for."""
    if where == "sampler":
        broken = SampledToken(-1, error="ZeroDivisionError: injected")
        monkeypatch.setattr(stub.runner, "_sample", lambda sequence: broken)
    else:
        stub.runner.errors = [ZeroDivisionError("injected")]
    caplog.set_level("WARNING")
    answer = stub.http.post("/v1/completions", json={"prompt": "SECRET", "n": 3, "max_tokens": 5})
    assert answer.status_code == 500
    lines = [record for record in caplog.records if record.getMessage().startswith("request ")]
    assert [record.levelname for record in lines] == ["ERROR"]
    assert re.fullmatch(r"request '[^']+' failed: ZeroDivisionError: injected", lines[0].getMessage())
    assert "SECRET" not in caplog.text


def test_a_dead_engine_is_reported_and_nobody_hangs(tokenizer_folder: Path) -> None:
    class Fatal(BaseException):
        pass

    with stub_rig(tokenizer_folder) as rig:
        rig.runner.errors = [Fatal("out of luck")]
        answer = rig.http.post("/v1/completions", json=BODY)
        assert answer.status_code == 500
        assert answer.json()["error"]["code"] == "engine_dead"
        health = rig.http.get("/health")
        assert health.status_code == 503
        assert "Fatal" in health.json()["error"]["message"]
        assert rig.http.get("/ready").status_code == 503
        assert rig.http.post("/v1/completions", json=BODY).status_code == 503
        assert rig.http.get("/metrics").status_code == 200
        assert rig.http.get("/").status_code == 200


def test_an_engine_that_always_fails_is_dead_after_a_while(
    tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with stub_rig(tokenizer_folder) as rig:

        def broken() -> Any:
            raise RuntimeError("for ever")

        monkeypatch.setattr(rig.llm.engine.scheduler, "schedule", broken)
        codes = [rig.http.post("/v1/completions", json=BODY).status_code for _ in range(4)]
        assert codes == [500, 500, 500, 503]
        assert rig.http.get("/health").status_code == 503


def test_a_step_that_takes_too_long_makes_health_fail(tokenizer_folder: Path) -> None:
    with stub_rig(tokenizer_folder, step_timeout=0.05) as rig:
        rig.runner.gate.clear()
        sock = rig.send("/v1/completions", {**BODY, "max_tokens": 1})
        wait_until(lambda: rig.http.get("/health").status_code == 503, "health has noticed")
        assert rig.http.get("/health").json()["error"]["code"] == "step_timeout"
        rig.runner.gate.set()
        read_until(sock, b'"usage"')
        sock.close()
        assert rig.http.get("/health").status_code == 200


def test_failure_for_ever_shows_on_the_probes_and_one_failure_does_not(
    stub: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"prompt": "hi", "max_tokens": 2}
    execute, failing = stub.runner.execute, True

    def sometimes(plan: Any) -> Any:
        if failing:
            raise LookupError("the kernel is gone")
        return execute(plan)

    monkeypatch.setattr(stub.runner, "execute", sometimes)
    for count in range(1, 6):
        assert stub.http.post("/v1/completions", json=body).status_code == 500
        for path in ("/health", "/ready"):
            answer = stub.http.get(path)
            assert answer.status_code == (200 if count < 3 else 503), (count, path)
            if count >= 3:
                said = answer.json()["error"]["message"]
                assert (
                    said
                    == f"{count} forward passes in a row have failed, the last one with LookupError: the kernel is gone"
                )
    failing = False
    assert stub.http.post("/v1/completions", json=body).status_code == 200
    assert stub.http.get("/health").status_code == stub.http.get("/ready").status_code == 200
    failing = True
    assert stub.http.post("/v1/completions", json=body).status_code == 500
    assert stub.http.get("/ready").status_code == 200
    failing = False
    assert stub.http.post("/v1/completions", json=body).status_code == 200


def test_small_answers_on_a_reused_connection_are_not_delayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An accepted connection has TCP_NODELAY, which asyncio sets where the listening socket names its protocol."""
    import asyncio
    import socket

    from minipaged.server.lifecycle import listen

    async def accepted() -> int:
        options: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        async def look(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            options.set_result(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        sock = listen("127.0.0.1", 0)
        async with await asyncio.start_server(look, sock=sock):
            _, writer = await asyncio.open_connection(*sock.getsockname())
            found = await options
            writer.close()
            return found

    assert asyncio.run(accepted()) != 0


def test_an_empty_host_does_not_listen_everywhere() -> None:
    from minipaged.server.lifecycle import listen

    with pytest.raises(OSError, match="--host must name an address"):
        listen("", 0)
