"""Ctrl-C at a chosen place: the n-th time that a Python function is called or returns.

Generators do not count: what is raised while one is being closed is lost, whoever raises it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from inspect import CO_GENERATOR
from types import FrameType
from typing import Any


def counts(frame: FrameType, event: str) -> bool:
    code = frame.f_code
    return event in ("call", "return") and "minipaged" in code.co_filename and not code.co_flags & CO_GENERATOR


def interrupted(work: Callable[[], Any], at: int) -> bool:
    """Run it with a KeyboardInterrupt at the `at`th call or return in the package; False if it has fewer."""
    left = at

    def hook(frame: FrameType, event: str, arg: object) -> None:
        nonlocal left
        if counts(frame, event):
            left -= 1
            if left == 0:
                sys.setprofile(None)
                raise KeyboardInterrupt

    sys.setprofile(hook)
    try:
        work()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
    return False


def places(work: Callable[[], Any]) -> int:
    """How many there are."""
    count = 0

    def hook(frame: FrameType, event: str, arg: object) -> None:
        nonlocal count
        count += counts(frame, event)

    sys.setprofile(hook)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count
