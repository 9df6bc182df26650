"""`minipaged serve`: the OpenAI-compatible server."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from minipaged.cli.options import LLM_FLAGS, PANELS, Flag, show_summary, summarised, usage_errors, with_flags

logger = logging.getLogger(__name__)

EXAMPLE = "Example:  minipaged serve Qwen/Qwen3-0.6B --port 8000 --api-key secret"
KEYS_VARIABLE = "MINIPAGED_API_KEY"

SERVER_FLAGS = (
    Flag("max_queued_requests", int, 512, "Sequences that may wait (n = 3 counts 3); more are answered with 429."),
    Flag("max_body_bytes", int, 4 << 20, "Largest body of a request."),
    Flag("step_timeout", float, 300.0, "Seconds after which a running step makes /health answer 503."),
    Flag("shutdown_timeout", float, 30.0, "Seconds that requests in flight get after SIGTERM."),
)
PANELS.setdefault("server", "Limits of the server")


@with_flags(llm=LLM_FLAGS, server=SERVER_FLAGS)
def serve(
    llm: dict[str, Any],
    server: dict[str, Any],
    model: Annotated[
        str | None, typer.Argument(help="Folder or Hub id; the bundled demo model if not given.", metavar="[MODEL]")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 = every network.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 = any free one.", min=0, max=65535)] = 8000,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="What clients call the model; may be repeated.")
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(help=f"Key that clients must send; may be repeated. Or {KEYS_VARIABLE}, comma-separated."),
    ] = None,
    allowed_origins: Annotated[
        list[str] | None,
        typer.Option(
            help='Origin whose pages may use the API from a browser, as http://localhost:3000; "*" = all. May be '
            "repeated, or a JSON list."
        ),
    ] = None,
) -> None:
    """Serve a Qwen3 model over HTTP, compatible with OpenAI's API."""
    from minipaged.llm.async_llm import AsyncLLM
    from minipaged.server import ServerSettings, create_app
    from minipaged.server.lifecycle import listen, run
    from minipaged.server.logs import use_json

    with usage_errors():
        settings = ServerSettings(
            served_model_names=tuple(served_model_name or [model_name(model)]),
            api_keys=tuple(api_key or keys_from(os.environ.get(KEYS_VARIABLE, ""))),
            allowed_origins=tuple(origins_from(allowed_origins or [])),
            **server,
        )
    sock = listen(host, port)  # before the model is loaded: a port in use is known at once
    use_json()  # before the model is loaded: what that logs is JSON too
    try:
        with usage_errors(), summarised():
            engine = AsyncLLM(model, **llm)
    except BaseException:
        sock.close()
        raise
    show_summary(engine.loaded.summary())
    address, bound_port = sock.getsockname()[:2]
    shown = f"[{address}]" if ":" in address else address
    typer.echo(f"serving {settings.served_model_names[0]!r} on http://{shown}:{bound_port}/v1", err=True)
    if not settings.api_keys and address not in ("127.0.0.1", "::1"):
        logger.warning("everybody on this network may use it; see --api-key")
    run(create_app(engine, settings), sock)


def model_name(model: str | None) -> str:
    """What clients call the model if nobody says: the Hub id, or a folder's name."""
    if model is None:
        return "minipaged-demo"
    return Path(model).resolve().name if Path(model).is_dir() else model


def origins_from(values: list[str]) -> list[str]:
    """The origins in the values of --allowed-origins, each one of them or, as vLLM takes them, a JSON list of them.

    ValueError for a list that is none.
    """
    origins: list[str] = []
    for value in values:
        listed: Any = [value]
        if value.lstrip().startswith("["):
            with contextlib.suppress(ValueError):
                listed = json.loads(value)
            if not isinstance(listed, list) or not all(isinstance(origin, str) for origin in listed):
                raise ValueError(f"allowed_origins must be an origin or a JSON list of them, got {value!r}")
        origins += listed
    return origins


def keys_from(variable: str) -> list[str]:
    """Keys in an environment variable, separated by commas; none if it is unset or empty.

    ValueError for one that holds no key all the same: whoever set it wanted keys, and an open server is not that.
    """
    keys = [key.strip() for key in variable.split(",") if key.strip()]
    if variable and not keys:
        raise ValueError(f"{KEYS_VARIABLE} must hold keys separated by commas, got {variable!r}: give one, or unset it")
    return keys
