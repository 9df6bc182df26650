"""Finds where a JSON object ends in a text that comes in pieces, or that it is none: one look at each character."""

from __future__ import annotations

import re

_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")
_LITERALS = ("true", "false", "null")
_IN_WORDS = frozenset("+-.0123456789aeflnrstuE")
_BLANK = frozenset(" \t\n\r")


class ObjectScanner:
    """Takes one object's characters, the opening brace first (RFC 8259; strings may hold line breaks, as models write).

    members: for each key of the object itself, as it is written between its quotes, where its value begins and ends,
    counted from the brace; of a repeated key the last one.
    """

    def __init__(self) -> None:
        self.members: dict[str, tuple[int, int]] = {}
        self.length = 0
        """Characters taken."""
        self._closers: list[str] = []  # of what is open, innermost last
        self._next = "{"  # what may come: {, key, first key, :, value, first value, or , (or the closer)
        self._string = False
        self._escaped = False
        self._word = ""
        self._start = 0  # of the key or value that is read
        self._key = ""
        self._text = ""

    @property
    def done(self) -> bool:
        """Whether the object is complete."""
        return self.length > 0 and not self._closers

    def feed(self, text: str, start: int) -> int | None:
        """Take `text[start:]`, until the object ends.

        The index after its closing brace; -1 if this is no object, whatever follows; None if more has to come.
        """
        for index in range(start, len(text)):
            if not self._take(text[index]):
                return -1
            if not self._closers:
                return index + 1
        return None

    def _take(self, character: str) -> bool:
        position, self.length = self.length, self.length + 1
        if self._string:
            if len(self._closers) == 1 and self._next == ":":
                self._text += character
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self._string = False
                if self._next == ":":
                    self._key = self._text[:-1] if len(self._closers) == 1 else self._key
                else:
                    self._value_ends(position + 1)
            return True
        if self._word:
            if character in _IN_WORDS:
                self._word += character
                return _may_become_a_word(self._word)
            if self._word not in _LITERALS and not _NUMBER.fullmatch(self._word):
                return False
            self._word = ""
            self._value_ends(position)
        return (character in _BLANK and position > 0) or self._punctuation(character, position)

    def _punctuation(self, character: str, position: int) -> bool:
        """A character that is neither inside a string or word nor blank: is it one that may stand here?"""
        expected = self._next
        if self._closers and character == self._closers[-1] and expected in (",", "first key", "first value"):
            self._closers.pop()
            self._value_ends(position + 1)
            return True
        if expected in (",", ":"):
            if character != expected:
                return False
            inside_object = bool(self._closers) and self._closers[-1] == "}"
            self._next = "value" if expected == ":" or not inside_object else "key"
            return True
        if expected in ("key", "first key"):
            self._string, self._next, self._text = character == '"', ":", ""
            return self._string
        return self._value_begins(character, position)

    def _value_begins(self, character: str, position: int) -> bool:
        if character == "{" or (character == "[" and self._closers):
            if len(self._closers) == 1:
                self._start = position
            self._closers.append("}" if character == "{" else "]")
            self._next = "first key" if character == "{" else "first value"
            return True
        if not self._closers:
            return False
        if len(self._closers) == 1:
            self._start = position
        if character == '"':
            self._string, self._next = True, ","
            return True
        self._word, self._next = character, ","
        return character in _IN_WORDS and _may_become_a_word(character)

    def _value_ends(self, end: int) -> None:
        self._next = ","
        if len(self._closers) == 1:
            self.members[self._key] = (self._start, end)


def _may_become_a_word(word: str) -> bool:
    if any(literal.startswith(word) for literal in _LITERALS):
        return True
    return _NUMBER.fullmatch(word) is not None or _NUMBER.fullmatch(word + "0") is not None
