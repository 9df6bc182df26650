"""What the server is told at its start."""

from __future__ import annotations

import re
from dataclasses import dataclass

# As browsers write them: lower case, the scheme, the host, and the port unless it is the scheme's own.
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\sA-Z]+")


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Limits and identity of one server. Times are in seconds.

    served_model_names: what clients may call the model; the first one is reported.
    api_keys: who may use the API; empty = everybody who reaches the socket. Printable ASCII, which is
        what clients can send in a header.
    allowed_origins: pages of which origins may use the API from a browser: "https://host:port", or "*" for all;
        empty = none.
    max_queued_requests: sequences (a request with n = 3 counts 3) that may wait for their first step; more get a 429.
    max_body_bytes, body_timeout: of a request's body; beyond them 413 and 408.
    step_timeout: /health is 503 while one step of the engine runs for longer.
    shutdown_timeout: how long requests in flight may go on after SIGTERM.
    max_logprobs: most alternatives per token that a request may ask for.
    """

    served_model_names: tuple[str, ...] = ("minipaged",)
    api_keys: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    max_queued_requests: int = 512
    max_body_bytes: int = 4 << 20
    body_timeout: float = 30.0
    step_timeout: float = 300.0
    shutdown_timeout: float = 30.0
    max_logprobs: int = 20

    def __post_init__(self) -> None:
        if not self.served_model_names or not all(self.served_model_names):
            raise ValueError(
                f"served_model_name must be one or more non-empty names, got {list(self.served_model_names)}"
            )
        for position, key in enumerate(self.api_keys, 1):
            if not key.strip():
                raise ValueError(f"api_key must not be empty, which number {position} is")
            if not (key.isascii() and key.isprintable()) or key != key.strip():  # a key itself belongs in no log
                raise ValueError(
                    f"api_key must be printable ASCII without blanks around it, which number {position} is not: "
                    "clients could not send it"
                )
        for origin in self.allowed_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ValueError(
                    "allowed_origins must be origins such as https://example.org or http://localhost:3000 (no path, no "
                    f"slash at the end), or *, got {origin!r}"
                )
        for name in ("max_queued_requests", "max_body_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("body_timeout", "step_timeout", "shutdown_timeout"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0 seconds, got {getattr(self, name)}")
