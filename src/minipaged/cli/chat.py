"""`minipaged chat`: a conversation in the terminal."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from minipaged.cli.options import (
    LLM_FLAGS,
    SAMPLING_FLAGS,
    UsageError,
    show_summary,
    summarised,
    usage_errors,
    with_flags,
)

EXAMPLE = 'Example:  minipaged chat Qwen/Qwen3-0.6B --system "Answer in one sentence." --no-think'

ONE_ANSWER = tuple(flag for flag in SAMPLING_FLAGS if flag.name != "n")


@with_flags(llm=LLM_FLAGS, sampling=ONE_ANSWER)
def chat(
    llm: dict[str, Any],
    sampling: dict[str, Any],
    model: Annotated[
        str | None, typer.Argument(help="Folder or Hub id; the bundled demo model if not given.", metavar="[MODEL]")
    ] = None,
    system: Annotated[str, typer.Option(help="System prompt.", show_default=False)] = "",
    think: Annotated[
        bool | None,
        typer.Option("--think/--no-think", help="Let the model think first; its chat template decides by default."),
    ] = None,
    history: Annotated[
        bool, typer.Option("--history/--no-history", help="Keep the lines you type for the next time.")
    ] = True,
) -> None:
    """Talk with a Qwen3 model; /help lists the commands, Ctrl-C stops an answer.

    Lines from a pipe are answered one after the other, without escape codes.
    """
    if sys.stdin is None or sys.stdout is None:  # Python's way to say that they were closed before it started
        closed = "standard input" if sys.stdin is None else "standard output"
        raise UsageError(f"{closed} is closed: chat reads lines from the one and writes answers to the other")
    from minipaged import LLM, SamplingParams
    from minipaged.chat.commands import COMMANDS
    from minipaged.chat.editor import Editor, line_source
    from minipaged.chat.loop import Loop
    from minipaged.chat.screen import Screen
    from minipaged.chat.session import ChatSession

    with usage_errors():
        params = SamplingParams(**{k: v for k, v in sampling.items() if v is not None})
        with summarised():
            engine_owner = LLM(model, **llm)
    with engine_owner:
        with usage_errors():
            session = ChatSession(engine_owner, params, system=system)
            session.thinking = think
        show_summary(engine_owner.summary())
        lines = line_source(list(COMMANDS), _history_file() if history else None)
        interactive = isinstance(lines, Editor)
        if interactive:
            typer.echo("Write a message; /help lists the commands, Ctrl-D leaves.\n", err=True)
        loop = Loop(session, Screen(), lines, interactive=interactive)
        loop.run()
    if loop.failures and not interactive:
        raise typer.Exit(1)


def _history_file() -> Path:
    from platformdirs import user_state_path

    return user_state_path("minipaged", appauthor=False) / "chat_history"
