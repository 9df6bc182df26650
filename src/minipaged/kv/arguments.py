"""Checks of what callers pass in."""

from __future__ import annotations

from operator import index
from typing import Any


def as_int(value: Any) -> int | None:
    """`value` as an int if it is an integer of any kind (numpy's too: whatever has `__index__`), None for anything
    else, bools included.
    """
    if isinstance(value, bool):
        return None
    try:
        return index(value)
    except TypeError:
        return None


def checked_int(name: str, value: Any, *, minimum: int | None = None) -> int:
    """`as_int`; TypeError or ValueError with the name for anything else, or less than `minimum`."""
    number = as_int(value)
    if number is None:
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if minimum is not None and number < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {number}")
    return number


def id_list(sequence_ids: Any) -> list[int]:
    """Sequence ids from any iterable; numpy arrays and tensors become plain integers first."""
    return list(sequence_ids.tolist() if hasattr(sequence_ids, "tolist") else sequence_ids)
