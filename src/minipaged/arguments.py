"""Checks of what callers pass in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from functools import wraps
from inspect import signature
from operator import index
from typing import Any, TypeVar

C = TypeVar("C", bound=type)


def check_keywords(caller: str, given: Iterable[str], known: Sequence[str], listed: str) -> None:
    """TypeError, as in any call, for a keyword that is not known; it names similar ones, or else where the list is."""
    for name in given:
        if name not in known:
            close = get_close_matches(name, known)
            hint = f"did you mean {' or '.join(close)}?" if close else f"the list is in {listed}"
            raise TypeError(f"{caller}() got an unexpected keyword argument {name!r}: {hint}")


def hinting(cls: C) -> C:
    """A class whose constructor says which keyword may have been meant instead of an unknown one."""
    create = vars(cls)["__init__"]
    known = [name for name in signature(create).parameters if name != "self"]

    @wraps(create)
    def checked(self: Any, *args: Any, **keywords: Any) -> None:
        if not keywords.keys() <= set(known):
            check_keywords(cls.__name__, keywords, known, f"help({cls.__name__})")
        create(self, *args, **keywords)

    type.__setattr__(cls, "__init__", checked)
    return cls


def as_int(value: Any) -> int | None:
    """`value` as an int if it is an integer of any kind (numpy's too: whatever has `__index__`), None for anything
    else, bools and what raises when it is asked included.
    """
    try:
        return None if isinstance(value, bool) else index(value)
    except Exception:
        return None


def checked_int(name: str, value: Any, *, minimum: int | None = None) -> int:
    """`as_int`; TypeError or ValueError with the name for anything else, or less than `minimum`."""
    number = as_int(value)
    if number is None:
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if minimum is not None and number < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {number}")
    return number


def checked_order(free_order: Sequence[int] | None, num_blocks: int) -> list[int]:
    """The order as a list of ints, ascending for None. ValueError unless it names each block once."""
    if free_order is None:
        return list(range(num_blocks))
    order = [checked_int("free_order", block, minimum=0) for block in free_order]
    if sorted(order) != list(range(num_blocks)):
        raise ValueError(
            f"free_order must name each block 0..{num_blocks - 1} once, "
            f"got {len(order)} entries, {len(set(order))} different"
        )
    return order


def id_list(sequence_ids: Any) -> list[int]:
    """Sequence ids from any iterable; numpy arrays and tensors become plain integers first."""
    return list(sequence_ids.tolist() if hasattr(sequence_ids, "tolist") else sequence_ids)
