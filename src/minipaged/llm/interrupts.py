"""Ctrl-C between steps: the first one waits until nothing is half done, a second one does not."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any


class Interrupts:
    """In its `with` block SIGINT waits for `deliver` or for the end. A second one before that does at once what it
    would do outside.

    Nothing happens outside the main thread, where Python runs no signal handlers, or if SIGINT has no Python handler.
    """

    _handler: Callable[[int, FrameType | None], Any] | None = None
    _pending = False

    def __enter__(self) -> Interrupts:
        handler = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is threading.main_thread() and callable(handler):
            self._handler = handler
            signal.signal(signal.SIGINT, self._hold)
        return self

    def __exit__(self, *_: object) -> None:
        if self._handler is not None and signal.getsignal(signal.SIGINT) == self._hold:
            signal.signal(signal.SIGINT, self._handler)
        self.deliver()

    def deliver(self) -> None:
        """What a SIGINT does that has come meanwhile: KeyboardInterrupt, if nobody has changed that."""
        if self._pending and self._handler is not None:
            self._pending = False
            self._handler(signal.SIGINT, None)

    def _hold(self, signum: int, frame: FrameType | None) -> None:
        if self._pending:
            self.deliver()
        self._pending = True
