"""Checks of what callers pass in."""

from __future__ import annotations

from operator import index
from typing import Any


def checked_int(name: str, value: Any, *, minimum: int | None = None) -> int:
    """`value` as an int (numpy integers too, but no bool). TypeError or ValueError with the name otherwise."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    number = index(value)
    if minimum is not None and number < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {number}")
    return number


def id_list(sequence_ids: Any) -> list[int]:
    """Sequence ids from any iterable; numpy arrays and tensors become plain integers first."""
    return list(sequence_ids.tolist() if hasattr(sequence_ids, "tolist") else sequence_ids)
