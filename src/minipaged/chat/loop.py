"""The loop: a line in, an answer or a command's reply out."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from minipaged.chat import commands

if TYPE_CHECKING:
    from minipaged.chat.editor import LineSource
    from minipaged.chat.screen import Screen
    from minipaged.chat.session import Answer, ChatSession


class Loop:
    """One user at one session.

    interactive: Ctrl-C ends the answer and not the program. Otherwise (lines from a pipe) it ends both.
    """

    def __init__(self, session: ChatSession, screen: Screen, lines: LineSource, *, interactive: bool) -> None:
        self.session = session
        self.screen = screen
        self.lines = lines
        self.interactive = interactive
        self.failures = 0
        """Lines that could not be answered or carried out."""

    def run(self) -> None:
        """Until the lines end or one says so. KeyboardInterrupt passes through unless `interactive`."""
        while True:
            try:
                self._respond(self.lines.read())
            except EOFError:
                return
            except ValueError as error:
                self._fail(str(error))
            except KeyboardInterrupt:
                if not self.interactive:
                    raise

    def _respond(self, line: str) -> None:
        if not line.strip():
            return
        reply = commands.run(line, self.session) if line.startswith("/") else self.session.ask(line.strip())
        if isinstance(reply, str):
            self.screen.say(reply)
        else:
            self._show(reply)
        self.screen.gap()

    def _show(self, answer: Answer) -> None:
        try:
            with stopping(answer), closing(answer.pieces()) as pieces:
                for piece in pieces:
                    self.screen.piece(piece)
        finally:
            self.screen.end_answer()
            self._remark(answer)
        if answer.finish_reason == "abort" and not self.interactive:
            raise KeyboardInterrupt

    def _remark(self, answer: Answer) -> None:
        """Say how the answer ended, unless it came to its end."""
        reason = answer.finish_reason
        if reason == "error":
            self._fail(f"{answer.error} (the conversation is as before)")
        elif reason == "abort" and answer.kept:
            self.screen.note("[stopped; what is there stays in the conversation: /undo forgets it, /retry repeats it]")
        elif reason == "abort":
            self.screen.note("[stopped before there was any of the answer: the conversation is as before]")
        elif answer.filled_context:
            self.screen.note(
                f"[the context of {self.session.context_limit} tokens is full: "
                "/drop forgets the oldest turn, /reset all of them]"
            )
        elif reason == "length":
            self.screen.note(f"[cut at max_tokens = {self.session.params.max_tokens}: /set max_tokens changes it]")
        if answer.kept and answer.reasoning and not answer.content:
            self.screen.note("[there was only thinking and no answer: /think off turns it off]")

    def _fail(self, text: str) -> None:
        self.failures += 1
        self.screen.error(text)


@contextmanager
def stopping(answer: Answer) -> Iterator[None]:
    """The first Ctrl-C asks the answer to stop after the running step, which leaves everything in order. A further one
    during that step (of a large model it takes a while) is a KeyboardInterrupt; none interrupts the tidying up.
    """

    def interrupt(signum: int, frame: FrameType | None) -> None:
        if answer.stopped and answer.computing:
            raise KeyboardInterrupt
        answer.stop()

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
