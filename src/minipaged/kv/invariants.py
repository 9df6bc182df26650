"""What must be true of a `KVBlockManager` at all times, rule by rule, recomputed from the block tables."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from minipaged.errors import InvariantError
from minipaged.kv.address import num_logical_blocks
from minipaged.kv.prefix_index import Entry

if TYPE_CHECKING:
    from minipaged.kv.block_manager import KVBlockManager


def check(manager: KVBlockManager) -> None:
    """Raise InvariantError for the first broken rule. O(pool + blocks in all tables)."""
    _check_tables(manager)
    _check_references(manager)
    _check_partition(manager)
    _check_shared_fill(manager)
    _check_index(manager)
    _check_candidates(manager)
    _check_commits(manager)
    _check_copies(manager)


def _fail(rule: str) -> None:
    raise InvariantError(rule)


def _check_tables(m: KVBlockManager) -> None:
    for sequence_id, state in m.sequences.items():
        name, table = f"sequence {sequence_id}", state.block_table
        if state.sequence_id != sequence_id:
            _fail(f"{name} is filed under another id than its own, {state.sequence_id}")
        needed = num_logical_blocks(max(state.sequence_length, 0), m.block_size)
        if state.sequence_length < 0 or len(table) != needed:
            _fail(
                f"{name} has {state.sequence_length} tokens and {len(table)} blocks {table}; "
                f"rule: ceil(length / {m.block_size}) = {needed} blocks"
            )
        for block in table:
            if not 0 <= block < m.num_physical_blocks:
                _fail(f"block {block} in the table of {name} is outside the pool of {m.num_physical_blocks}")
        for block, times in Counter(table).items():
            if times > 1:
                _fail(f"block {block} occurs {times} times in the table of {name}; rule: once per table")


def _check_references(m: KVBlockManager) -> None:
    owners = Counter(m._pool.held)
    for state in m.sequences.values():
        owners.update(state.block_table)
    for block, count in enumerate(m._pool.ref_count):
        if count != owners[block]:
            _fail(f"block {block} has ref_count {count}, but {owners[block]} owners (tables and callers); rule: equal")
    if m._pool.references != sum(owners.values()):
        _fail(f"{m._pool.references} references are counted, {sum(owners.values())} exist; rule: equal")
    shared = sum(count > 1 for count in owners.values())
    if m._pool.shared != shared:
        _fail(f"{m._pool.shared} shared blocks are counted, {shared} exist; rule: equal")


def _check_partition(m: KVBlockManager) -> None:
    free = Counter(m._pool.queue)
    for block, times in free.items():
        if times > 1:
            _fail(f"block {block} is {times} times in the free queue; rule: once")
    for block in range(m.num_physical_blocks):
        states = [
            name
            for name, holds in (
                ("free", block in free),
                ("idle", block in m._pool.idle),
                ("in use", m._pool.ref_count[block] > 0),
            )
            if holds
        ]
        if len(states) != 1:
            _fail(f"block {block} is {' and '.join(states) or 'in no state'}; rule: exactly one of free, idle, in use")
        cached = m._pool.entry_of[block] is not None
        if states == ["free"] and cached:
            _fail(f"block {block} is free and has a cache entry; rule: a free block holds nothing")
        if states == ["idle"] and not cached:
            _fail(f"block {block} is idle and has no cache entry; rule: idle blocks are cached")
    outside = [block for block in (*free, *m._pool.idle) if not 0 <= block < m.num_physical_blocks]
    if outside:
        _fail(f"block {outside[0]} is free or idle and outside the pool of {m.num_physical_blocks}")


def _check_shared_fill(m: KVBlockManager) -> None:
    """Owners of a block agree on where and how full it is, so its next slot has one writer or needs a copy."""
    place_of: dict[int, tuple[int, int]] = {}  # block -> logical index, tokens in it
    for state in m.sequences.values():
        for logical, block in enumerate(state.block_table):
            place = (logical, min(state.sequence_length - logical * m.block_size, m.block_size))
            if place_of.setdefault(block, place) != place:
                _fail(
                    f"block {block} is logical block {place[0]} with {place[1]} tokens in sequence "
                    f"{state.sequence_id}, but logical block "
                    f"{place_of[block][0]} with {place_of[block][1]} in another; rule: sharers agree"
                )
            if block in m._pool.held:
                _fail(f"block {block} is held by a caller and in the table of sequence {state.sequence_id}; rule: one")
    for block, (_, tokens) in place_of.items():
        if m._pool.entry_of[block] is not None and tokens != m.block_size:
            _fail(f"block {block} is cached with {tokens} of {m.block_size} tokens; rule: only full blocks are cached")
    total = sum(tokens for _, tokens in place_of.values())
    if m._num_tokens != total:
        _fail(f"{m._num_tokens} tokens are counted in blocks in use, {total} exist; rule: equal")


def _check_index(m: KVBlockManager) -> None:
    pool = m._pool
    cached = 0
    depth: dict[int, int] = {}  # entry number -> logical index; parents have smaller numbers
    entries = [(block, entry) for block, entry in enumerate(pool.entry_of) if entry is not None]
    for block, entry in sorted(entries, key=lambda item: item[1].number):
        cached += 1
        if entry.block != block:
            _fail(
                f"block {block} has the cache entry of block {entry.block}; rule: entry and block point at each other"
            )
        parent = entry.parent
        if pool.index._entries.get(entry.key) is not entry:
            _fail(f"block {block} has a cache entry that the index does not find; rule: each entry is in the index")
        if parent is not None and (not parent.alive or parent.children.get(entry.number) is not entry):
            _fail(f"block {block} is cached below an entry that is gone; rule: the parent of an entry is cached")
        if parent is not None and entry.key[0] != parent.number:
            _fail(
                f"block {block} is cached under the number {entry.key[0]}, its parent's is {parent.number}; rule: equal"
            )
        depth[entry.number] = 0 if parent is None else depth.get(parent.number, -1) + 1
        for child in entry.children.values():
            if not child.alive or child.parent is not entry:
                _fail(f"block {block} has a cached child that is gone; rule: children are cached")
    if len(pool.index) != cached:
        _fail(f"the index has {len(pool.index)} entries, {cached} blocks are cached; rule: equal")
    for state in m.sequences.values():
        for logical, block in enumerate(state.block_table):
            of = pool.entry_of[block]
            if of is not None and depth[of.number] != logical:
                _fail(
                    f"block {block} is logical block {logical} of sequence {state.sequence_id}, but cached as number "
                    f"{depth[of.number]} of a prefix; rule: equal"
                )


def _check_candidates(m: KVBlockManager) -> None:
    pool = m._pool
    for block in set(pool.idle) ^ pool.candidates:
        entry: Entry | None = pool.entry_of[block] if block in pool.idle else None
        if entry is None or not entry.children:
            _fail(
                f"block {block} is {'idle, no candidate' if entry else 'a candidate, not idle'}; "
                f"rule: candidates are the idle blocks without a cached child"
            )
    for block in pool.candidates & set(pool.idle):
        entry = pool.entry_of[block]
        if entry is not None and entry.children:
            _fail(f"block {block} is a candidate for eviction and has a cached child; rule: never")


def _check_commits(m: KVBlockManager) -> None:
    for sequence_id, state in m.sequences.items():
        commit, length = state.commit, state.sequence_length
        if not 0 <= commit.committed <= length:
            _fail(
                f"sequence {sequence_id} has {commit.committed} committed tokens of {length}; rule: at most its length"
            )
        pending = commit.committed % m.block_size if m.enable_prefix_caching and not commit.detached else 0
        if len(commit.pending) != pending:
            _fail(
                f"sequence {sequence_id} remembers {len(commit.pending)} tokens of its partial block; rule: {pending}"
            )


def _check_copies(m: KVBlockManager) -> None:
    copies = m._pool.copies
    if Counter(copies.source_of.values()) != Counter(copies.sources):
        _fail(f"pending copies {copies.source_of} do not match their sources {copies.sources}; rule: equal")
    for destination, source in copies.source_of.items():
        if not m._pool.ref_count[destination]:
            _fail(f"block {destination} is the destination of a pending copy and not in use; rule: dropped by then")
        if destination in copies.sources:
            _fail(
                f"block {destination} is destination and source (of block {source}) in pending copies; rule: never both"
            )
    for block in m._pool.unreported:
        if m._pool.ref_count[block] or block not in m._pool.queue:
            _fail(f"block {block} waits to be reported free and is not free; rule: only free blocks wait")
