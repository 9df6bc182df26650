"""Who may use the server: keys, browsers, sizes, and what an answer gives away."""

from __future__ import annotations

import gzip
from pathlib import Path

import httpx
import pytest
from server_rig import Rig, refusal, stub_rig

from minipaged.cli.serve import origins_from
from minipaged.server import ServerSettings
from minipaged.server.middleware import OPEN_PATHS

CLOSED = [
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/stub"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/no/such/path"),
    ("GET", "//health"),
    ("GET", "/health/../v1/models"),
]


def test_several_keys(tokenizer_folder: Path) -> None:
    with stub_rig(tokenizer_folder, api_keys=("first-key", "second key")) as rig:
        for method, path in CLOSED:
            for value in (
                None,
                "Bearer",
                "Bearer wrong",
                "Bearer first-key2",
                "Bearer first-ke",
                "Basic first-key",
                "first-key",
                "Bearer \xff\xfe",
            ):
                headers = {} if value is None else {"Authorization": value.encode("latin-1")}
                answer = httpx.request(method, rig.url + path, headers=headers, json={})
                assert answer.status_code == 401, (method, path, value)
                assert answer.headers["www-authenticate"] == "Bearer"
                assert answer.json()["error"]["code"] == "invalid_api_key"
        for path in sorted(OPEN_PATHS):
            assert httpx.get(rig.url + path).status_code == 200
        for value in ("Bearer first-key", "bearer first-key", "Bearer second key"):
            headers = {"Authorization": value.encode()}
            assert httpx.get(rig.url + "/v1/models", headers=headers).status_code == 200
        assert rig.client.completions.create(model="stub", prompt="x", max_tokens=1).choices[0].text == "a"


def test_a_key_costs_nothing_of_the_engine(tokenizer_folder: Path) -> None:
    with stub_rig(tokenizer_folder, api_keys=("k",)) as rig:
        httpx.post(rig.url + "/v1/completions", json={"prompt": "x"})
        assert rig.runner.steps == 0


@pytest.mark.parametrize("key", ["", " ", "Schlüssel", "new\nline", " blank-before"])
def test_keys_that_no_client_can_send_are_refused(key: str) -> None:
    with pytest.raises(ValueError, match=r"api_key must .*number 2") as caught:
        ServerSettings(api_keys=("good", key))
    assert not key.strip() or key not in str(caught.value), "a key is a secret"


@pytest.mark.parametrize("names", [{"api_keys": ("",)}, {"served_model_names": ()}, {"max_body_bytes": 0}])
def test_settings_are_checked(names: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(names)).rstrip("s")):
        ServerSettings(**names)  # type: ignore[arg-type]


def test_cross_origin_requests_are_off(stub: Rig) -> None:
    """A page in a browser gets no permission, and what it may send without asking is refused."""
    stub.runner.says("ok")
    origin = {"Origin": "http://evil.example"}
    preflight = stub.http.options("/v1/completions", headers={**origin, "Access-Control-Request-Method": "POST"})
    assert preflight.status_code == 405
    body = b'{"prompt": "x"}'
    for kind in ("text/plain", "application/x-www-form-urlencoded", None, "multipart/form-data; boundary=x"):
        headers = {**origin, **({"Content-Type": kind} if kind else {})}
        answer = stub.http.post("/v1/completions", content=body, headers=headers)
        assert answer.status_code == 400
        assert "Origin" in answer.json()["error"]["message"]
    assert stub.runner.steps == 0
    for kind in ("application/json", "application/json; charset=utf-8"):
        headers = {**origin, "Content-Type": kind}
        assert stub.http.post("/v1/completions", content=body, headers=headers).status_code == 200
    for response in (preflight, answer, stub.http.get("/v1/models", headers=origin)):
        assert not [name for name in response.headers if name.startswith("access-control")]
    assert stub.http.post("/v1/completions", content=body).status_code == 200, "a program without a Content-Type"


PREFLIGHT = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization, content-type"}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/models"])
def test_an_allowed_origin_may_ask_and_read(tokenizer_folder: Path, path: str) -> None:
    """The browser's question is answered without a key; the key is still needed, and its lack can be read."""
    good, bad = "http://localhost:3000", "http://localhost:3001"
    with stub_rig(tokenizer_folder, api_keys=("k",), allowed_origins=("https://a.example", good)) as rig:
        asked = httpx.options(rig.url + path, headers={"Origin": good, **PREFLIGHT})
        assert asked.status_code == 200
        assert asked.headers["access-control-allow-origin"] == good
        assert "POST" in asked.headers["access-control-allow-methods"]
        assert "authorization" in asked.headers["access-control-allow-headers"]
        for origin in (bad, good + "/", "null", "http://localhost:3000.evil.example"):
            answer = httpx.options(rig.url + path, headers={"Origin": origin, **PREFLIGHT})
            assert answer.status_code == 400
            assert "access-control-allow-origin" not in answer.headers
            assert "access-control-allow-origin" not in rig.http.get("/v1/models", headers={"Origin": origin}).headers
        for headers, status in (({}, 401), ({"Authorization": "Bearer k"}, 200)):
            answer = httpx.get(rig.url + "/v1/models", headers={"Origin": good, **headers})
            assert answer.status_code == status
            assert answer.headers["access-control-allow-origin"] == good
            assert "x-request-id" in answer.headers["access-control-expose-headers"].lower()
        assert rig.http.get("/v1/models").status_code == 200, "a program sends no Origin"
        assert rig.runner.steps == 0


@pytest.mark.parametrize("stream", [False, True])
def test_all_origins_may_be_allowed(tokenizer_folder: Path, stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with stub_rig(tokenizer_folder, allowed_origins=("*",)) as rig:
        rig.runner.says("ok")
        headers = {"Origin": "http://anywhere.example"}
        for body, status in (({"prompt": "x", "stream": stream}, 200), ({"prompt": ""}, 400)):
            answer = rig.http.post("/v1/completions", json=body, headers=headers)
            assert answer.status_code == status
            assert answer.headers["access-control-allow-origin"] == "*"
        monkeypatch.setattr(rig.service, "check_model", lambda name: 1 / 0)
        answer = rig.http.post("/v1/completions", json={"prompt": "x"}, headers=headers)
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (500, "*")


@pytest.mark.parametrize("origin", ["", "localhost:3000", "https://a.example/", "https://a.example/x", "HTTP://A"])
def test_what_is_no_origin_is_refused(origin: str) -> None:
    with pytest.raises(ValueError, match="allowed_origins must"):
        ServerSettings(allowed_origins=("https://a.example", origin))


def test_origins_of_the_command_line() -> None:
    assert origins_from(["http://a", '["http://b", "*"]']) == ["http://a", "http://b", "*"]
    with pytest.raises(ValueError, match="allowed_origins must"):
        origins_from(["[1]"])


def test_bodies_have_a_limit(tokenizer_folder: Path) -> None:
    with stub_rig(tokenizer_folder, max_body_bytes=1000) as rig:
        good = b'{"prompt": "x", "user": "%s"}' % (b"y" * 900)
        bad = b'{"prompt": "x", "user": "%s"}' % (b"y" * 1000)
        for path in ("/v1/completions", "/tokenize"):
            assert rig.http.post(path, content=good).status_code == 200
            assert rig.http.post(path, content=bad).status_code == 413
            chunked = rig.http.post(path, content=iter([bad[:500], bad[500:]]))
            assert chunked.status_code == 413
            assert "1000" in chunked.json()["error"]["message"]
        sock = rig.connect()
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n")
        assert sock.recv(100).startswith(b"HTTP/1.1 413")
        sock.close()
        assert rig.http.post("/v1/completions", content=good).status_code == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_a_compressed_body_is_a_415_that_names_the_coding(stub: Rig, path: str) -> None:
    for coding in ("gzip", "br", "identity, gzip"):
        body = gzip.compress(b'{"prompt": "x"}')
        answer = stub.http.post(path, content=body, headers={"Content-Encoding": coding})
        assert f"Content-Encoding '{coding}'" in refusal(answer, 415)["message"]
        assert answer.headers["accept-encoding"] == "identity"
    assert stub.runner.steps == 0


def test_a_body_that_says_it_is_not_compressed_is_read(stub: Rig) -> None:
    for coding in ("identity", "Identity", ""):
        headers = {"Content-Encoding": coding}
        assert stub.http.post("/tokenize", json={"prompt": "x"}, headers=headers).status_code == 200


def test_head_is_answered_like_get_but_for_the_body(stub: Rig) -> None:
    for path in ("/health", "/ready", "/version", "/metrics", "/", "/v1/models", "/v1/models/stub"):
        answer = stub.http.head(path)
        assert answer.status_code == 200, path
        assert answer.headers["content-type"] == stub.http.get(path).headers["content-type"]
        sock = stub.connect()
        sock.sendall(f"HEAD {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        received = b"".join(iter(lambda sock=sock: sock.recv(65536), b""))  # type: ignore[misc]
        assert received.endswith(b"\r\n\r\n"), "headers, and nothing after them"
        sock.close()
    assert stub.http.head("/v1/models/unknown").status_code == 404
    assert stub.http.head("/v1/completions").status_code == 405


def test_an_unexpected_fault_is_a_500_without_a_traceback(stub: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str | None) -> str:
        raise ZeroDivisionError("internal detail")

    monkeypatch.setattr(stub.service, "check_model", broken)
    for stream in (False, True):
        answer = stub.http.post("/v1/completions", json={"prompt": "x", "stream": stream})
        assert answer.status_code == 500
        assert answer.json()["error"]["type"] == "server_error"
        assert "Traceback" not in answer.text
        assert "internal detail" not in answer.text


def test_request_ids(stub: Rig) -> None:
    assert stub.http.get("/health", headers={"X-Request-Id": "abc-1"}).headers["x-request-id"] == "abc-1"
    for odd in ("", "with space", "x" * 200, "new\tline"):
        given = stub.http.get("/health", headers={"X-Request-Id": odd}).headers["x-request-id"]
        assert given != odd
        assert len(given) == 32


def test_while_shutting_down_no_new_requests_are_taken(tokenizer_folder: Path) -> None:
    with stub_rig(tokenizer_folder) as rig:
        assert rig.http.get("/ready").status_code == 200
        rig.service.admission.draining = True
        answer = rig.http.post("/v1/completions", json={"prompt": "x"})
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "shutting_down"
        assert "retry-after" in answer.headers
        assert rig.http.get("/ready").status_code == 503
        assert rig.http.get("/health").status_code == 200
