"""`KVBlockManager`: sequences, their block tables, and every way a block gets into or out of one.

(Article, sections 4 to 10.)

A sequence of L tokens owns ceil(L / block_size) physical blocks, anywhere in the pool. Blocks come one at a time,
when a token enters a new logical block, and go back when the sequence is released. Two ways of sharing:
`fork_sequence` and the prefix cache. A block table only grows, or has its last entry replaced by a private copy
(copy-on-write).

Not thread-safe: one thread (the engine's) calls it. Nothing here touches K/V memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from minipaged.arguments import as_int, checked_int, checked_order, id_list
from minipaged.errors import InvariantError, OutOfBlocksError, UnknownSequenceError
from minipaged.kv.address import num_logical_blocks, slot
from minipaged.kv.block_pool import BlockPool
from minipaged.kv.events import Listener
from minipaged.kv.eviction import EvictionPolicy, claim, describe, make_policy, renewed
from minipaged.kv.invariants import check
from minipaged.kv.prefix_index import CommitState, Entry, PrefixKeys, check_salt, token_array

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class SequenceState:
    """A live sequence. Read it freely; only the manager changes it.

    sequence_length: tokens with a slot, which is also the position of the next one.
    block_table: physical block of each logical block, ceil(sequence_length / block_size) of them.
    commit: how far its tokens are known to the prefix cache.
    """

    sequence_id: int
    sequence_length: int = 0
    block_table: list[int] = field(default_factory=list)
    commit: CommitState = field(default_factory=CommitState, repr=False, compare=False)


class KVBlockManager:
    """Hands out the blocks of a paged KV cache.

    num_physical_blocks: blocks in the pool, numbered from 0.
    block_size: tokens per block.
    enable_prefix_caching: keep the blocks that `commit_tokens` made findable after their owners are gone, until the
        space is needed.
    free_order: initial order of the free queue, a permutation of the block numbers; None = ascending.
    eviction_policy: "lru", "lfu" or an `EvictionPolicy` object of its own (ValueError if another manager has it). If
        such an object fails, that is logged and "lru" serves from then on.
    listener: called with a `BlockEvent` for each change, when the operation that caused it is complete.

    Every operation takes O(1) per block concerned, plus what the eviction policy takes to choose, and is all or
    nothing: if it raises, nothing has changed (unless it is the listener: then the operation is complete). Unknown
    sequence ids raise UnknownSequenceError, a KeyError with the id.
    """

    def __init__(
        self,
        num_physical_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = False,
        free_order: Sequence[int] | None = None,
        eviction_policy: str | EvictionPolicy = "lru",
        listener: Listener | None = None,
    ) -> None:
        self.num_physical_blocks = checked_int("num_physical_blocks", num_physical_blocks, minimum=1)
        self.block_size = checked_int("block_size", block_size, minimum=1)
        self.enable_prefix_caching = bool(enable_prefix_caching)
        if listener is not None and not callable(listener):
            raise TypeError(f"listener must be callable, got {listener!r}")
        self._free_order = checked_order(free_order, self.num_physical_blocks)
        self.sequences: dict[int, SequenceState] = {}
        self._num_tokens = 0  # slots with a token in blocks in use, a shared block once
        self._pool = BlockPool(self._free_order, self.block_size, make_policy(eviction_policy), listener)
        claim(eviction_policy, self)

    # --- how full the pool is ---

    @property
    def free_blocks(self) -> tuple[int, ...]:
        """Blocks that hold nothing, the next one first. O(num_physical_blocks): for people and tests."""
        return tuple(reversed(self._pool.queue))

    @property
    def eviction_policy(self) -> str:
        """Name of the policy that serves; "lru (NAME failed: ...)" once one of the caller's own has failed."""
        return describe(self._pool.policy)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that hold nothing."""
        return len(self._pool.queue)

    @property
    def num_idle_blocks(self) -> int:
        """Cached blocks that nobody owns: findable, and evicted when the free queue is empty."""
        return len(self._pool.idle)

    @property
    def num_available_blocks(self) -> int:
        """Free + idle: what can be allocated."""
        return self._pool.num_available

    @property
    def num_blocks_in_use(self) -> int:
        """Blocks in at least one live table, or held by a caller."""
        return self.num_physical_blocks - self._pool.num_available

    @property
    def num_shared_blocks(self) -> int:
        """Blocks in use by more than one owner."""
        return self._pool.shared

    @property
    def num_saved_blocks(self) -> int:
        """Blocks that would be needed in addition if nothing were shared."""
        return self._pool.references - self.num_blocks_in_use

    def ref_count(self, block_id: int) -> int:
        """Number of live tables that hold the block (+ 1 if a caller holds it); 0 for free and idle ones."""
        return self._pool.ref_count[self._block(block_id)]

    def internal_fragmentation_tokens(self) -> int:
        """Slots in use without a token, O(1). A shared block counts once.

        These are the empty ends of last blocks, and all of a block that a caller holds.
        """
        return self.num_blocks_in_use * self.block_size - self._num_tokens

    # --- life of a sequence ---

    def create_sequence(self, sequence_id: int, *, salt: str | None = None) -> SequenceState:
        """A new sequence without tokens; allocates nothing. `salt` separates what it commits, as in `match_prefix`.

        ValueError if the id lives.
        """
        sequence_id = self._new_id(sequence_id)
        state = self.sequences[sequence_id] = SequenceState(sequence_id, commit=CommitState(check_salt(salt)))
        return state

    def blocks_needed(self, sequence_id: int, num_tokens: int) -> int:
        """Blocks that `append_tokens` would take now, copy-on-write included.

        It succeeds exactly if `num_available_blocks` is at least this.

        (In one rare case the answer is more than would be taken: a copy is due, and each available block is the
        source of another copy that `take_block_copies` has not handed out yet, hence cannot be a destination.)
        """
        return self._blocks_needed(self._state(sequence_id), checked_int("num_tokens", num_tokens, minimum=0))

    def append_token(self, sequence_id: int) -> int:
        """Make room for one token; returns its flat slot, physical block * block_size + offset.

        OutOfBlocksError if it needs a block and none is left.
        """
        new = self._append_one(self._state(sequence_id))
        self._pool.tell()
        return new

    def append_tokens(self, sequence_id: int, num_tokens: int) -> list[int]:
        """Make room for `num_tokens` tokens, all or nothing; returns their flat slots.

        OutOfBlocksError if blocks are missing.
        """
        state = self._state(sequence_id)
        num_tokens = checked_int("num_tokens", num_tokens, minimum=0)
        self._reserve(state, num_tokens)
        start, end, size = state.sequence_length, state.sequence_length + num_tokens, self.block_size
        state.sequence_length = end
        self._num_tokens += num_tokens
        slots: list[int] = []
        for logical in range(start // size, len(state.block_table)):
            first = state.block_table[logical] * size
            slots.extend(range(first + max(start - logical * size, 0), first + min(end - logical * size, size)))
        self._pool.tell()
        return slots

    def slot_mapping_for_append(self, sequence_ids: Iterable[int]) -> Tensor:
        """One token for each of B distinct sequences, all or nothing: their flat slots, int64 [B]."""
        import torch

        states = [self._state(sequence_id) for sequence_id in id_list(sequence_ids)]
        for sequence_id, times in Counter([state.sequence_id for state in states]).items():
            if times > 1:
                raise ValueError(
                    f"sequence {sequence_id} occurs twice in the batch; append_tokens takes several tokens"
                )
        self._check_room_for_one_each(states)
        slots = [self._append_one(state) for state in states]
        self._pool.tell()
        return torch.tensor(slots, dtype=torch.int64)

    def slot_of(self, sequence_id: int, token_pos: int) -> int:
        """Flat slot of the token at `token_pos`: the article's address translation.

        IndexError if no such token has a slot.
        """
        state = self._state(sequence_id)
        token_pos = checked_int("token_pos", token_pos)
        if not 0 <= token_pos < state.sequence_length:
            raise IndexError(f"sequence {sequence_id} has {state.sequence_length} tokens, none at position {token_pos}")
        logical, offset = divmod(token_pos, self.block_size)
        return slot(state.block_table[logical], offset, self.block_size)

    def fork_sequence(self, parent_id: int, child_id: int) -> SequenceState:
        """A child with the parent's tokens, which shares all its blocks.

        A partial last block is copied by each owner that appends, except the last one left: it writes in place.
        ValueError if `child_id` lives.
        """
        parent = self._state(parent_id)
        child_id = self._new_id(child_id)
        for logical, block in enumerate(parent.block_table):
            self._pool.share(block)
            self._pool.emit("share", block, child_id, logical)
        child = SequenceState(child_id, parent.sequence_length, list(parent.block_table), parent.commit.fork())
        self.sequences[child_id] = child
        self._pool.tell()
        return child

    def take_block_copies(self) -> list[tuple[int, int]]:
        """(source, destination) blocks to copy, all layers, before the next write; drained by the call.

        Simultaneous: no destination is a source or occurs twice, so any order is right.
        """
        return self._pool.drain_copies()

    def release_sequence(self, sequence_id: int) -> None:
        """Forget the sequence. Blocks without another owner become idle if they are cached, else free.

        They go back tail first, so that table[0] is the next one handed out, and the end of a cached chain the
        first one evicted. Pending copies into blocks that lose their last owner are dropped.
        """
        state = self._state(sequence_id)
        del self.sequences[state.sequence_id]
        tokens = state.sequence_length - (len(state.block_table) - 1) * self.block_size  # in the last block
        for logical in range(len(state.block_table) - 1, -1, -1):
            if self._pool.free(state.block_table[logical], state.sequence_id, logical):
                self._num_tokens -= tokens
            tokens = self.block_size
        self._pool.tell()

    # --- single blocks ---

    def allocate_block(self) -> int:
        """A block for the caller's own use (ref_count 1) until `free_block`. OutOfBlocksError if none is available."""
        self._check_room(1, "allocate_block")
        block = self._pool.allocate()
        self._pool.held.add(block)
        self._pool.emit("allocate", block)
        self._pool.tell()
        return block

    def free_block(self, block_id: int) -> None:
        """Give back a block of `allocate_block`.

        ValueError if the caller does not hold it (a sequence's block, or freed before).
        """
        block = self._block(block_id)
        if block not in self._pool.held:
            raise ValueError(
                f"block {block} is not held by a caller: it was not allocated with allocate_block, or freed already"
            )
        self._pool.held.remove(block)
        self._pool.free(block)
        self._pool.tell()

    # --- tensors for the kernels ---

    def get_block_table_tensor(self, sequence_ids: Iterable[int], *, pad: int = -1) -> Tensor:
        """Block tables as int32 [B, longest], padded with `pad`."""
        import torch

        tables = [self._state(sequence_id).block_table for sequence_id in id_list(sequence_ids)]
        rows = np.full((len(tables), max(map(len, tables), default=0)), pad, dtype=np.int32)
        for row, table in zip(rows, tables, strict=True):
            row[: len(table)] = table
        return torch.from_numpy(rows)

    def get_seq_lens_tensor(self, sequence_ids: Iterable[int]) -> Tensor:
        """Sequence lengths in tokens, int32 [B]."""
        import torch

        lengths = [self._state(sequence_id).sequence_length for sequence_id in id_list(sequence_ids)]
        return torch.tensor(lengths, dtype=torch.int32)

    # --- prefix cache ---

    def prefix_keys(self, token_ids: Iterable[int], *, salt: str | None = None) -> PrefixKeys:
        """Tokens prepared for `match_prefix` and `create_sequence_from_prefix`, for who asks again at every step."""
        return PrefixKeys(self._pool.index, self.block_size, token_ids, salt)

    def match_prefix(self, token_ids: Iterable[int] | PrefixKeys, *, salt: str | None = None) -> int:
        """How many leading tokens are cached under `salt`: a multiple of block_size, at most len(token_ids) - 1."""
        return self._match(token_ids, salt)[1] * self.block_size

    def create_sequence_from_prefix(
        self, sequence_id: int, token_ids: Iterable[int] | PrefixKeys, *, salt: str | None = None
    ) -> SequenceState:
        """A new sequence that shares the cached prefix of `token_ids`.

        Its length is `match_prefix`, and its tokens count as committed. Allocates nothing; the blocks found cannot be
        evicted while it lives. ValueError if the id lives.
        """
        sequence_id = self._new_id(sequence_id)
        keys, depth, entry = self._match(token_ids, salt)
        commit = CommitState(keys.salt, depth * self.block_size, entry)
        table: list[int] = []
        while entry is not None:
            table.append(entry.block)
            entry = entry.parent
        table.reverse()
        for logical, block in enumerate(table):
            if self._pool.share(block):
                self._num_tokens += self.block_size
            self._pool.policy.hit(block)
            self._pool.emit("share", block, sequence_id, logical)
        state = self.sequences[sequence_id] = SequenceState(sequence_id, commit.committed, table, commit)
        self._pool.tell()
        return state

    def commit_tokens(self, sequence_id: int, token_ids: Iterable[int]) -> None:
        """The tokens that follow those already committed; their K/V is in memory NOW.

        Blocks that they fill become findable. A block whose content is cached already stays private, but what follows
        is found below the cached one. Once a sequence's history has been evicted under it, or forgotten by
        `reset_prefix_cache`, its later blocks are not cached.

        ValueError beyond sequence_length, or if a shared block was committed with other tokens.
        """
        state = self._state(sequence_id)
        commit = state.commit
        tokens = token_array(token_ids)
        end = commit.committed + len(tokens)
        if end > state.sequence_length:
            raise ValueError(
                f"sequence {sequence_id} has {state.sequence_length} tokens with a slot, {commit.committed} of them "
                f"committed: {len(tokens)} more cannot be; append them first"
            )
        if self.enable_prefix_caching:
            commit.add(self._pool, state, tokens)
        commit.committed = end
        self._pool.tell()

    def reset_prefix_cache(self) -> None:
        """Forget every entry; idle blocks become free, blocks in use stay with their owners.

        Of the sequences that live now, only those without a committed token will add to the cache again: the others'
        K/V may be outdated (after new weights, say).
        """
        self._pool.clear_cache()
        for state in self.sequences.values():
            if state.commit.committed:
                state.commit.detach()
        self._pool.tell()

    def reset(self) -> None:
        """Forget every sequence, caller's block and cache entry, also out of the middle of an operation that never came
        to its end. Listeners are told that each block is free; `prefix_keys` of before are refused.
        """
        self.sequences.clear()
        self._num_tokens = 0
        old = self._pool
        self._pool = BlockPool(self._free_order, self.block_size, renewed(old.policy), old.listener)
        for block in self._free_order:
            self._pool.emit("free", block)
        self._pool.tell()

    # --- checks ---

    def check_invariants(self) -> None:
        """InvariantError that names block and rule if the bookkeeping contradicts itself; never, at any time.

        O(pool + blocks in all tables).
        """
        check(self)

    def invariants_ok(self) -> bool:
        """`check_invariants` as a bool."""
        try:
            self.check_invariants()
        except InvariantError:
            return False
        return True

    # --- inside ---

    def _state(self, sequence_id: int) -> SequenceState:
        state = self.sequences.get(sequence_id)
        if state is None and (number := as_int(sequence_id)) is not None:
            state = self.sequences.get(number)  # what stands for an integer without being equal to it: a tensor, say
        if state is None:
            raise UnknownSequenceError(sequence_id)
        return state

    def _new_id(self, sequence_id: int) -> int:
        sequence_id = checked_int("sequence_id", sequence_id)
        if sequence_id in self.sequences:
            raise ValueError(f"sequence {sequence_id} lives already; release it first or choose another id")
        return sequence_id

    def _block(self, block_id: int) -> int:
        block = checked_int("block_id", block_id)
        if not 0 <= block < self.num_physical_blocks:
            raise ValueError(f"block {block} is outside the pool of {self.num_physical_blocks} blocks")
        return block

    def _check_room(self, needed: int, what: str) -> None:
        if needed > self._pool.num_available:
            raise OutOfBlocksError(
                f"{what} needs {needed} block{'s' * (needed != 1)}, but {self.num_free_blocks} are free and "
                f"{self.num_idle_blocks} idle of {self.num_physical_blocks}; "
                f"release sequences, or give the pool more (num_blocks, kv_cache_memory)"
            )

    def _copy_due(self, state: SequenceState) -> bool:
        """Would the next token go into a partial block that others read too?"""
        return state.sequence_length % self.block_size != 0 and self._pool.ref_count[state.block_table[-1]] > 1

    def _blocks_needed(self, state: SequenceState, num_tokens: int) -> int:
        needed = num_logical_blocks(state.sequence_length + num_tokens, self.block_size) - len(state.block_table)
        if num_tokens and self._copy_due(state):
            needed += 1
            if not self._pool.has_destinations(1):
                needed = max(needed, self._pool.num_available + 1)
        return needed

    def _append_one(self, state: SequenceState) -> int:
        """`append_token`, before the listener hears of it."""
        table = state.block_table
        offset = state.sequence_length % self.block_size
        if offset == 0 or self._pool.ref_count[table[-1]] > 1:
            self._reserve(state, 1)
        state.sequence_length += 1
        self._num_tokens += 1
        return table[-1] * self.block_size + offset

    def _reserve(self, state: SequenceState, num_tokens: int) -> None:
        """Take the blocks for `num_tokens` more tokens: first the copy of a shared partial block, then new ones."""
        needed = self._blocks_needed(state, num_tokens)
        if not needed:
            return
        self._check_room(
            needed, f"appending {num_tokens} token{'s' * (num_tokens != 1)} to sequence {state.sequence_id}"
        )
        pool, table = self._pool, state.block_table
        if self._copy_due(state):
            needed -= 1
            shared, last = table[-1], len(table) - 1
            table[-1] = pool.allocate_destination()
            source = pool.copies.add(shared, table[-1])
            pool.free(shared)
            self._num_tokens += state.sequence_length % self.block_size
            pool.emit("copy", table[-1], state.sequence_id, last, source)
        for _ in range(needed):
            block = pool.allocate()
            table.append(block)
            pool.emit("allocate", block, state.sequence_id, len(table) - 1)

    def _check_room_for_one_each(self, states: list[SequenceState]) -> None:
        """`_blocks_needed` for a batch: of k sharers of a partial block, all k in the batch, only k - 1 copy."""
        partial = Counter([state.block_table[-1] for state in states if state.sequence_length % self.block_size])
        copies = sum(min(times, self._pool.ref_count[block] - 1) for block, times in partial.items())
        needed = len(states) - partial.total() + copies
        if copies and not self._pool.has_destinations(needed):
            needed = max(needed, self._pool.num_available + 1)
        self._check_room(needed, f"appending one token to each of {len(states)} sequences")

    def _match(self, token_ids: Iterable[int] | PrefixKeys, salt: str | None) -> tuple[PrefixKeys, int, Entry | None]:
        if isinstance(token_ids, PrefixKeys):
            if salt is not None and salt != token_ids.salt:
                raise ValueError(f"salt {salt!r} contradicts the salt {token_ids.salt!r} of these prefix keys")
            keys = token_ids
        else:
            keys = self.prefix_keys(token_ids, salt=salt)
        entry, depth = self._pool.index.match(keys)
        return keys, depth, entry
