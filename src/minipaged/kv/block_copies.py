"""Copies that copy-on-write owes: whole blocks, to be run before the step's first write."""

from __future__ import annotations


class PendingCopies:
    """(source, destination) pairs that mean the same in any order, or at once: no destination is a source or occurs
    twice.

    A copy of a block that is itself still waiting for its copy is taken from that copy's source. Nothing has been
    written to the block in between, because writes come after the copies.
    """

    def __init__(self) -> None:
        self.source_of: dict[int, int] = {}  # destination -> source, in the order of the appends
        self._uses: dict[int, int] = {}  # source -> number of pairs

    def __len__(self) -> int:
        return len(self.source_of)

    @property
    def sources(self) -> dict[int, int]:
        """Source -> in how many pairs."""
        return self._uses

    def add(self, block: int, destination: int) -> int:
        """Owe `destination` the content of `block`; returns the source to copy from."""
        source = self.source_of.get(block, block)
        self.source_of[destination] = source
        self._uses[source] = self._uses.get(source, 0) + 1
        return source

    def drop(self, destination: int) -> None:
        """The destination lost its last owner: nothing is owed to it any more."""
        source = self.source_of.pop(destination, None)
        if source is not None:
            self._uses[source] -= 1
            if not self._uses[source]:
                del self._uses[source]

    def drain(self) -> list[tuple[int, int]]:
        """All pairs, in the order of the appends; afterwards nothing is owed."""
        pairs = [(source, destination) for destination, source in self.source_of.items()]
        self.source_of.clear()
        self._uses.clear()
        return pairs
