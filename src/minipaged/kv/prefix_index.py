"""The exact index of the prefix cache: which full block holds the K/V of which tokens *after which history*.

An entry's key is (number of the parent entry, the block's token bytes); the parent of a first block is the salt.
Numbers are never reused, so a key names one whole token history: nothing is hashed to something shorter, nothing
can collide.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minipaged.kv.block_manager import SequenceState
    from minipaged.kv.block_pool import BlockPool

_ITEMSIZE = 8  # bytes per token id in a key: any 64-bit integer is a legal id


def token_array(token_ids: Iterable[int]) -> array[int]:
    """Token ids (list, tuple, numpy array, ...) as packed 64-bit integers. TypeError for what is not an integer."""
    if isinstance(token_ids, str):
        raise TypeError(f"token_ids must be integers, got the string {token_ids[:20]!r}; tokenise it first")
    # list() first, because array() would take bytes as raw memory
    return array("q", token_ids if isinstance(token_ids, (list, tuple, array)) else list(token_ids))


def check_salt(salt: str | None) -> str | None:
    """The salt itself. TypeError unless it is a string or None (a number could be mistaken for an entry's)."""
    if salt is not None and not isinstance(salt, str):
        raise TypeError(f"salt must be a string or None, got {salt!r}")
    return salt


class Entry:
    """One cached block. `block` is -1 once the entry is gone, so that whoever still points at it can tell."""

    __slots__ = ("block", "children", "key", "number", "parent", "released")

    def __init__(self, number: int, parent: Entry | None, key: tuple[int | str | None, bytes], block: int) -> None:
        self.number = number
        self.parent = parent
        self.key = key
        self.block = block
        self.children: dict[int, Entry] = {}  # by number
        self.released = 0  # when it last became idle, in the pool's count of such events

    @property
    def alive(self) -> bool:
        """Whether a block still holds its tokens; False once it was evicted."""
        return self.block >= 0


class PrefixKeys:
    """A waiting request's tokens as index keys, computed once and extended as tokens come. Made by
    `KVBlockManager.prefix_keys`.

    `match_prefix` and `create_sequence_from_prefix` take it in place of token ids. It remembers how far it matched
    the last time, so asking again at every step costs O(blocks gained or lost since), not O(prompt).
    """

    def __init__(self, index: PrefixIndex, block_size: int, token_ids: Iterable[int], salt: str | None) -> None:
        self.block_size = block_size
        self.salt = check_salt(salt)
        self.num_tokens = 0
        self.blocks: list[bytes] = []  # token bytes of each full block
        self.fingerprints: list[int] = []
        """Per full block a 64-bit hash of salt and all tokens up to its end: equal prefixes have equal ones. A hint
        for the scheduler ("is a running request computing my next block?"), never what decides a hit.
        """
        self._index = index
        self._tail = array("q")  # tokens after the last full block
        self._matched: Entry | None = None
        self._depth = 0  # blocks from the root to `_matched`
        self.extend(token_ids)

    def __len__(self) -> int:
        return self.num_tokens

    def extend(self, token_ids: Iterable[int]) -> None:
        """Append tokens (generated ones, say)."""
        tokens = token_array(token_ids)
        self.num_tokens += len(tokens)
        tokens = self._tail + tokens
        data, width = tokens.tobytes(), self.block_size * _ITEMSIZE
        full = len(tokens) // self.block_size
        fingerprint = self.fingerprints[-1] if self.fingerprints else hash((self.salt,))
        for start in range(0, full * width, width):
            block = data[start : start + width]
            fingerprint = hash((fingerprint, block))
            self.blocks.append(block)
            self.fingerprints.append(fingerprint)
        self._tail = tokens[full * self.block_size :]


class PrefixIndex:
    """All live entries. Only leaves are ever removed, so an entry that is alive has a living path to the root."""

    def __init__(self) -> None:
        self._entries: dict[tuple[int | str | None, bytes], Entry] = {}
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, parent: Entry | None, salt: str | None, tokens: bytes) -> Entry | None:
        """The entry of a block with these tokens after `parent`'s history (None: a first block under `salt`)."""
        return self._entries.get((salt if parent is None else parent.number, tokens))

    def insert(self, parent: Entry | None, salt: str | None, tokens: bytes, block: int) -> Entry:
        """A new entry; the key must be absent and the parent alive."""
        entry = Entry(next(self._numbers), parent, (salt if parent is None else parent.number, tokens), block)
        self._entries[entry.key] = entry
        if parent is not None:
            parent.children[entry.number] = entry
        return entry

    def remove(self, entry: Entry) -> None:
        """Forget a leaf."""
        del self._entries[entry.key]
        entry.block = -1
        if entry.parent is not None:
            del entry.parent.children[entry.number]

    def clear(self) -> None:
        """Forget everything."""
        for entry in self._entries.values():
            entry.block = -1
            entry.parent = None
            entry.children.clear()
        self._entries.clear()

    def match(self, keys: PrefixKeys) -> tuple[Entry | None, int]:
        """Last entry and length in blocks of the longest cached prefix that leaves at least one token to compute."""
        if keys._index is not self:
            raise ValueError("these prefix keys are of another block manager, or of before a reset: make new ones")
        entry, depth = keys._matched, keys._depth
        while entry is not None and not entry.alive:
            entry, depth = entry.parent, depth - 1
        if entry is None:
            depth = 0
        while depth < len(keys.blocks):
            child = self.find(entry, keys.salt, keys.blocks[depth])
            if child is None:
                break
            entry, depth = child, depth + 1
        keys._matched, keys._depth = entry, depth
        if entry is not None and depth * keys.block_size >= keys.num_tokens:
            return entry.parent, depth - 1  # all of it is cached: compute the last block again
        return entry, depth


@dataclass(slots=True)
class CommitState:
    """How far a sequence's tokens are known to the prefix cache, and where in the index its next block goes.

    committed           0      4      8   10       block_size 4, 10 tokens committed
    tokens              |......|......|..|
    parent                     the entry of this content, `pending` the two tokens after it
    """

    salt: str | None = None
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
