"""One streamed completion over HTTP, timed at the socket: the client of `bench serve`, the same for every server."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import h11


@dataclass
class Sample:
    """What one request gave. Times are seconds of one clock; `times` has one per event that brought tokens.

    error: why it did not end well, None if it did; `status` is 0 without an answer.
    """

    sent: float
    times: list[float] = field(default_factory=list)
    ended: float = 0.0
    status: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    error: str | None = None

    @property
    def ttft(self) -> float:
        """Time to the first token."""
        return self.times[0] - self.sent

    @property
    def tpot(self) -> float | None:
        """Mean time per token after the first; None for a single one."""
        return (self.times[-1] - self.times[0]) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    @property
    def e2e(self) -> float:
        """From sending to the last token."""
        return self.times[-1] - self.sent

    @property
    def gaps(self) -> list[float]:
        """Between one event with tokens and the next: what somebody who reads along waits for."""
        return [b - a for a, b in zip(self.times, self.times[1:], strict=False)]


class LoadClient:
    """Talks to one server. url: up to and without `/v1`."""

    def __init__(self, url: str, *, api_key: str | None = None, timeout: float = 600.0) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url must be like http://127.0.0.1:8000, got {url!r}")
        self.url = url
        self._host = parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._base = parts.path.rstrip("/").removesuffix("/v1")
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._key = api_key
        self._timeout = timeout

    async def get(self, path: str) -> Any:
        """The JSON behind a path. OSError if the server cannot be reached or refuses."""
        status, chunks = 0, []
        async for event in self._exchange("GET", path, b""):
            if isinstance(event, h11.Response):
                status = event.status_code
            elif isinstance(event, h11.Data):
                chunks.append(bytes(event.data))
        if status != 200:
            raise OSError(f"{self.url}{path} answered {status}: {b''.join(chunks)[:200]!r}")
        return json.loads(b"".join(chunks))

    async def complete(self, path: str, body: dict[str, Any]) -> Sample:
        """POST a body with `stream` true and read the events to the end. Never raises but for cancellation."""
        sample = Sample(time.perf_counter())
        try:
            await asyncio.wait_for(self._complete(path, body, sample), self._timeout)
        except (OSError, h11.ProtocolError, ValueError, asyncio.IncompleteReadError, asyncio.TimeoutError) as error:
            sample.error = f"{type(error).__name__}: {error}"
        sample.ended = time.perf_counter()
        if sample.error is None and not sample.times:
            sample.error = "no token came"
        return sample

    async def _complete(self, path: str, body: dict[str, Any], sample: Sample) -> None:
        rest = b""
        refusal = b""
        async for event in self._exchange("POST", path, json.dumps(body).encode()):
            if isinstance(event, h11.Response):
                sample.status = event.status_code
            elif isinstance(event, h11.Data):
                if sample.status != 200:
                    refusal += bytes(event.data)
                    continue
                now = time.perf_counter()
                *lines, rest = (rest + bytes(event.data)).split(b"\n")
                for line in lines:
                    if line.startswith(b"data:"):
                        _take(line[5:].strip(), now, sample)
        if sample.status != 200:
            sample.error = f"{sample.status}: {refusal[:200].decode(errors='replace')}"

    async def _exchange(self, method: str, path: str, body: bytes) -> AsyncIterator[h11.Event]:
        try:
            reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._tls)
        except OSError as error:
            raise type(error)(f"cannot connect to {self.url}: is the server running there? ({error})") from error
        try:
            connection = h11.Connection(h11.CLIENT)
            headers = [
                ("Host", f"{self._host}:{self._port}"),
                ("Content-Length", str(len(body))),
                ("Connection", "close"),
            ]
            if body:
                headers.append(("Content-Type", "application/json"))
            if self._key is not None:
                headers.append(("Authorization", f"Bearer {self._key}"))
            request = h11.Request(method=method, target=self._base + path, headers=headers)
            parts = [connection.send(event) for event in (request, h11.Data(data=body), h11.EndOfMessage())]
            writer.write(b"".join(part or b"" for part in parts))
            await writer.drain()
            while True:
                event = connection.next_event()
                if event is h11.NEED_DATA:
                    connection.receive_data(await reader.read(1 << 16))
                elif isinstance(event, h11.EndOfMessage | h11.ConnectionClosed):
                    return
                else:
                    yield event  # type: ignore[misc]
        finally:
            writer.close()


def _take(data: bytes, now: float, sample: Sample) -> None:
    """One server-sent event."""
    if data == b"[DONE]":
        return
    chunk = json.loads(data)
    if "error" in chunk:
        sample.error = str(chunk["error"])[:200]
        return
    if any(_brings_tokens(choice) for choice in chunk.get("choices") or ()):
        sample.times.append(now)
        sample.output_tokens += 1  # until the usage says it better
    usage = chunk.get("usage")
    if usage:
        sample.prompt_tokens = usage.get("prompt_tokens", 0)
        sample.output_tokens = usage.get("completion_tokens", sample.output_tokens)
        sample.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def _brings_tokens(choice: dict[str, Any]) -> bool:
    """A completion's event always does; a chat's does unless it only gives the role."""
    delta = choice.get("delta")
    return delta is None or bool(delta.get("content") or delta.get("reasoning_content") or choice.get("finish_reason"))
