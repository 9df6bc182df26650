"""One thing that was looked at: what it is, why, whether that is good, and what to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

State = Literal["ok", "note", "warning", "problem"]
"""note: worth knowing; warning: costs speed or will surprise; problem: something cannot work until it is changed."""
STATES: tuple[State, ...] = ("ok", "note", "warning", "problem")
UNKNOWN = "unknown here"
NOTHING = "nothing to do"
"""The advice of a finding that needs none; people are not shown it."""
GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """value, why and advice are one line of text each, without markup; facts: the same for programs, JSON types."""

    name: str
    value: str
    why: str
    advice: str
    state: State = "ok"
    facts: Mapping[str, Any] = field(default_factory=dict)


def unknown(name: str, why: str, advice: str) -> Finding:
    """For what this system does not tell."""
    return Finding(name=name, value=UNKNOWN, why=why, advice=advice, state="note")


def gib(nbytes: int) -> str:
    """ "1.50 GiB"; two digits, for figures are compared with each other."""
    return f"{nbytes / GIB:.2f} GiB"
