"""Stop strings in a text that comes in pieces, whatever the pieces: Aho and Corasick's automaton (CACM 18(6), 1975)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class StopMatcher:
    """Finds the stop string that is complete first, the longest of those that end there, and holds back what may become
    one.

    The automaton's state is the longest end of the text that begins a stop string: exactly what must not be given out
    yet.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        """stops: non-empty strings."""
        self._next: list[dict[str, int]] = [{}]  # a trie of the stop strings; node 0 is the empty string
        self._depth = [0]
        self._match: list[str | None] = [None]  # the longest stop string that ends the node's string
        for stop in stops:
            node = 0
            for character in stop:
                if character not in self._next[node]:
                    self._next[node][character] = len(self._next)
                    self._next.append({})
                    self._depth.append(self._depth[node] + 1)
                    self._match.append(None)
                node = self._next[node][character]
            self._match[node] = stop
        self._fail = [0] * len(self._next)  # the longest proper end of the node's string that is a node too
        queue = deque(self._next[0].values())
        while queue:
            node = queue.popleft()
            for character, child in self._next[node].items():
                self._fail[child] = self._step(self._fail[node], character)
                self._match[child] = self._match[child] or self._match[self._fail[child]]
                queue.append(child)
        self._node = 0
        self._held = ""

    def feed(self, text: str, *, may_match: bool = True) -> tuple[str, str | None]:
        """The text that is certain now, and the stop string that ends it, itself left out (None: no match).

        may_match False: stop strings that are completed by this piece do not count, now or later.
        """
        pending = self._held + text
        for end, character in enumerate(text, start=len(self._held) + 1):
            self._node = self._step(self._node, character)
            stop = self._match[self._node]
            if stop is not None:
                if may_match:
                    self._held = ""
                    return pending[: end - len(stop)], stop
                while self._node and not self._next[self._node]:  # complete and passed over: it cannot become longer
                    self._node = self._fail[self._node]
        certain = len(pending) - self._depth[self._node]
        self._held = pending[certain:]
        return pending[:certain], None

    def flush(self) -> str:
        """What was held back, when the text ends without a match."""
        held, self._held, self._node = self._held, "", 0
        return held

    def _step(self, node: int, character: str) -> int:
        while character not in self._next[node]:
            if node == 0:
                return 0
            node = self._fail[node]
        return self._next[node][character]
