"""Ctrl-C at a chosen place: the n-th time that a Python function is called or returns."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

PACKAGE = "minipaged"


def interrupted(work: Callable[[], Any], at: int) -> bool:
    """Run it with a KeyboardInterrupt at the `at`th call or return in the package; False if it has fewer."""
    left = at

    def hook(frame: FrameType, event: str, arg: object) -> None:
        nonlocal left
        if event in ("call", "return") and PACKAGE in frame.f_code.co_filename:
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
        count += event in ("call", "return") and PACKAGE in frame.f_code.co_filename

    sys.setprofile(hook)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count
