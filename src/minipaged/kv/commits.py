"""From tokens whose K/V is in memory to blocks that the prefix cache can find, per sequence and incrementally."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from minipaged.kv.block_pool import BlockPool
from minipaged.kv.prefix_index import Entry

if TYPE_CHECKING:
    from minipaged.kv.block_manager import SequenceState


@dataclass(slots=True)
class CommitState:
    """How far a sequence's tokens are known to the prefix cache, and where in the index its next block goes.

    committed           0      4      8   10       block_size 4, 10 tokens committed
    tokens              |......|......|..|
    parent                     the entry of this content, `pending` the two tokens after it
    """

    salt: str | None
    committed: int = 0  # tokens whose K/V is in memory
    parent: Entry | None = None  # of the last full committed block's content, which may be another block's entry
    pending: array[int] = field(default_factory=lambda: array("q"))  # committed tokens after the last full block
    detached: bool = False  # its history has left the index: what follows could not be found, so it is not added

    def fork(self) -> CommitState:
        """The same history for a child."""
        return replace(self, pending=self.pending[:])

    def detach(self) -> None:
        """Add nothing to the index any more."""
        self.detached, self.parent, self.pending = True, None, array("q")

    def add(self, pool: BlockPool, state: SequenceState, tokens: array[int]) -> None:
        """Make blocks findable that `tokens`, the next ones of `state`, fill. The caller counts `committed`."""
        if self.parent is not None and not self.parent.alive:
            self.detach()
        if self.detached:
            return
        size = pool.block_size
        if len(self.pending) + len(tokens) < size:
            self.pending.extend(tokens)
            return
        tokens = self.pending + tokens
        self._cache(pool, state, self.committed // size, tokens)
        self.pending = tokens[len(tokens) - len(tokens) % size :]

    def _cache(self, pool: BlockPool, state: SequenceState, first: int, tokens: array[int]) -> None:
        """`tokens` start logical block `first`; make the full blocks among them findable."""
        size = pool.block_size
        blocks = state.block_table[first : first + len(tokens) // size]
        contents = [tokens[start : start + size].tobytes() for start in range(0, len(blocks) * size, size)]
        found: list[Entry] = []  # content that is cached already; below the first miss nothing can be
        for content in contents:
            entry = pool.index.find(found[-1] if found else self.parent, self.salt, content)
            if entry is None:
                break
            found.append(entry)
        for place, block in enumerate(blocks):
            cached = pool.entry_of[block]
            if cached is not None and (place >= len(found) or cached is not found[place]):
                raise ValueError(
                    f"block {block} of sequence {state.sequence_id} was committed with other tokens by its sharer"
                )
        if found:
            self.parent = found[-1]
        for place in range(len(found), len(blocks)):
            self.parent = pool.cache(self.parent, self.salt, contents[place], blocks[place])
            pool.emit("commit", blocks[place], state.sequence_id, first + place)
