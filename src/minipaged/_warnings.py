"""Warnings that point at the line of the program that uses minipaged."""

from __future__ import annotations

import sys
import warnings


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """A warning at the innermost call from outside this package, however deep inside it is noticed."""
    frame, level = sys._getframe().f_back, 2
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "minipaged":
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
