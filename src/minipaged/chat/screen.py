"""Where text goes: answers and replies to stdout, remarks and errors to stderr; styles on a terminal only."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from minipaged.chat.session import Piece

# A model may write any character. On a terminal, control characters would move the cursor or worse.
_VISIBLE = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)], "\ufffd")


class Screen:
    """Writes one conversation.

    Reasoning is dimmed. Where there are no styles (a pipe, NO_COLOR, a dumb terminal) it stands between <think> and
    </think> instead.
    """

    def __init__(self) -> None:
        self.terminal = sys.stdout.isatty()
        self.styled = self.terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        self._in_reasoning = False
        self._at_line_start = True

    def piece(self, piece: Piece) -> None:
        """The next part of an answer."""
        if piece.reasoning:
            if not self._in_reasoning and not self.styled:
                self._write("<think>\n")
            self._in_reasoning = True
            self._write(piece.reasoning, dim=True)
        if piece.content:
            self._end_reasoning(follows=True)
            self._write(piece.content)

    def end_answer(self) -> None:
        """After the last part, whatever it was."""
        self._end_reasoning(follows=False)
        if not self._at_line_start:
            self._write("\n")

    def _end_reasoning(self, *, follows: bool) -> None:
        if self._in_reasoning:
            self._in_reasoning = False
            self._write(("" if self.styled else "\n</think>") + ("\n\n" if follows else ""))

    def say(self, text: str) -> None:
        """A command's reply."""
        typer.echo(text)

    def note(self, text: str) -> None:
        """A remark about what happened."""
        typer.echo(typer.style(text, dim=True) if self.styled else text, err=True)

    def error(self, text: str) -> None:
        """What went wrong."""
        typer.echo(typer.style(f"error: {text}", fg="red") if self.styled else f"error: {text}", err=True)

    def gap(self) -> None:
        """An empty line between turns, on a terminal."""
        if self.terminal:
            typer.echo()

    def _write(self, text: str, *, dim: bool = False) -> None:
        if not text:
            return
        self._at_line_start = text.endswith("\n")
        if self.terminal:
            text = text.translate(_VISIBLE)
        typer.echo(typer.style(text, dim=True) if dim and self.styled else text, nl=False)
