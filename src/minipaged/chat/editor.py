"""Where lines come from: a line editor on a terminal, the lines of stdin otherwise.

`read` gives the next line, which may hold newlines, and raises EOFError at the end. In both, a backslash at the end of
a line continues it on the next.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Protocol

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

PROMPT, CONTINUATION = ">>> ", "... "


class LineSource(Protocol):
    """What the loop reads from."""

    def read(self) -> str:
        """The next line; EOFError at the end, ValueError for what is no text."""


class PipeReader:
    """Lines of a stream of UTF-8, for stdin that is no terminal (or whose output is redirected)."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._prompts = stream.isatty()
        self._number = 0

    def read(self) -> str:
        """The next line. ValueError names the line that is not UTF-8; the one after it can still be read."""
        parts: list[str] = []
        while True:
            if self._prompts:
                typer.echo(CONTINUATION if parts else PROMPT, nl=False, err=True)
            line = self._next(at_end="" if parts else None)
            if not line.endswith("\\"):
                return "\n".join([*parts, line])
            parts.append(line[:-1])

    def _next(self, *, at_end: str | None) -> str:
        line = self._stream.readline()
        if not line:
            if at_end is None:
                raise EOFError
            return at_end
        self._number += 1
        try:
            return line.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise ValueError(f"line {self._number} of the input is not UTF-8: {error.reason}") from None


class Editor:
    """prompt_toolkit's editor: history and its search (Ctrl-R), pasting of several lines, Tab for commands.

    Ctrl-C clears the line. On an empty line it says how to leave; a second one leaves, as Ctrl-D does.
    """

    def __init__(self, words: Sequence[str], history: Path | None) -> None:
        """words: what Tab completes. history: file that keeps lines from one call of the program to the next."""
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import WordCompleter
        from prompt_toolkit.shortcuts import CompleteStyle

        self._session: PromptSession[str] = PromptSession(
            history=_history(history),
            multiline=True,  # Enter is bound below; a pasted newline stays one
            prompt_continuation=lambda *_: CONTINUATION,
            key_bindings=_key_bindings(),
            completer=WordCompleter(list(words), sentence=True),
            complete_while_typing=False,
            complete_style=CompleteStyle.READLINE_LIKE,
        )

    def read(self) -> str:
        """The next line or lines."""
        try:
            return self._session.prompt(PROMPT)
        except KeyboardInterrupt:
            typer.echo("(Ctrl-C again or Ctrl-D leaves)", err=True)
        try:
            return self._session.prompt(PROMPT)
        except KeyboardInterrupt:
            raise EOFError from None


def _key_bindings() -> KeyBindings:
    from prompt_toolkit.key_binding import KeyBindings

    bindings = KeyBindings()

    @bindings.add("enter")
    def _submit(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.is_cursor_at_the_end and buffer.text.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.newline(copy_margin=False)
        else:
            buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    def _newline(event: KeyPressEvent) -> None:
        event.current_buffer.newline(copy_margin=False)

    @bindings.add("c-c")
    @bindings.add("<sigint>")
    def _interrupt(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt)

    return bindings


def _history(path: Path | None) -> History:
    """History in a file that only its owner may read; in memory, with a line that says so, where none can be kept."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    if path is None:
        return InMemoryHistory()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_APPEND | os.O_RDWR, 0o600))
    except OSError as error:
        typer.echo(f"warning: no history is kept: {path}: {error.strerror}", err=True)
        return InMemoryHistory()
    return FileHistory(path)


def line_source(words: Sequence[str], history: Path | None) -> LineSource:
    """The editor if a person sits at both ends, else the lines of stdin."""
    if sys.stdin.isatty() and sys.stdout.isatty():
        return Editor(words, history)
    return PipeReader(sys.stdin.buffer)
