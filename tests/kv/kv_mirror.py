"""The naive model's picture of a block manager, drawn from events alone: tables, free queue, cache, pending copies.

Block tables are rebuilt from events, reference counts are recounted, the prefix cache is a dictionary of whole token
histories, and the K/V memory is a dictionary from slot to the token history that was written there.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from minipaged.kv import BlockEvent, KVBlockManager, PrefixKeys
from minipaged.kv.prefix_index import Entry

POISON = ("poison",)
DROP = "drop"
"""An event that the harness adds: a block in use lost its cache entry."""


@dataclass
class ModelSequence:
    salt: str | None
    tokens: list[int] = field(default_factory=list)
    table: list[int] = field(default_factory=list)  # from events alone
    written: int = 0  # leading tokens whose K/V is in memory
    committed: int = 0
    parent_generation: int | None = None  # of the cache entry that its next block would go below
    attached: bool = True
    lost: set[int] = field(
        default_factory=set
    )  # copied before they were written: the caller's doing, content undefined


@dataclass
class CachedBlock:
    salt: str | None
    history: tuple[int, ...]  # all tokens up to the block's end
    generation: int
    released: int = 0
    hits: int = 0


class Mirror:
    def __init__(self, num_blocks: int, block_size: int, policy: str = "lru", caching: bool = True) -> None:
        self.bs = block_size
        self.policy = policy
        self.caching = caching
        self.seqs: dict[int, ModelSequence] = {}
        self.held: list[int] = []
        self.free = list(range(num_blocks))  # front first
        self.cached: dict[int, CachedBlock] = {}  # by block
        self.memory = dict.fromkeys(range(num_blocks * block_size), POISON)
        self.unwritten: dict[int, tuple[int, ...]] = {}  # slot -> content, to be written at the next flush
        self.pairs: dict[int, int] = {}  # destination -> source
        self.waiting: dict[tuple[tuple[int, ...], str | None], PrefixKeys] = {}
        self.next_id = self.clock = self.generations = 0
        self.evictions = self.hits = self.copies = 0
        self.manager = KVBlockManager(
            num_blocks, block_size, enable_prefix_caching=caching, eviction_policy=policy, listener=self.on_event
        )
        self.watch_silent_drops()

    # --- events: mirror of tables, free queue and cache; poison ---

    def owners(self, block: int) -> int:
        return sum(seq.table.count(block) for seq in self.seqs.values()) + self.held.count(block)

    def children(self, block: int) -> list[int]:
        me = self.cached[block]
        size = len(me.history) + self.bs
        return [
            b
            for b, c in self.cached.items()
            if c.salt == me.salt and len(c.history) == size and c.history[: -self.bs] == me.history
        ]

    def expected_victim(self) -> int | None:
        leaves = [b for b in self.cached if not self.owners(b) and not self.children(b)]

        def rank(block: int) -> tuple[int, int]:
            return (self.cached[block].hits if self.policy == "lfu" else 0, self.cached[block].released)

        return min(leaves, key=rank, default=None)

    def on_event(self, event: BlockEvent) -> None:
        block = event.block
        if event.kind in ("allocate", "copy"):
            if block in self.free:
                usable = [b for b in self.free if event.kind == "allocate" or b not in self.pairs.values()]
                assert block == usable[0], "the next block of the free queue"
                self.free.remove(block)
            assert self.owners(block) == 0, f"block {block} is handed out while somebody owns it"
            assert block not in self.cached
        if event.kind == "copy":
            seq = self.seqs[event.sequence]
            assert event.logical_index == len(seq.table) - 1
            old = seq.table[-1]
            for pos in range(event.logical_index * self.bs, len(seq.tokens)):
                if old * self.bs + pos % self.bs in self.unwritten:
                    seq.lost.add(pos)
            assert event.source == self.pairs.get(old, old)
            self.pairs[block] = event.source
            self.copies += 1
            seq.table[-1] = block
        elif event.kind in ("allocate", "share") and event.sequence is not None:
            seq = self.seqs[event.sequence]
            del seq.table[event.logical_index :]
            seq.table.append(block)
        elif event.kind == "commit":
            pass  # `commit` compares
        elif event.kind == DROP:
            assert self.owners(block)
            assert self.expected_victim() is None, "dropped the entry of a block in use though an idle leaf existed"
            del self.cached[block]
        elif event.kind == "evict":
            victim = self.expected_victim()
            assert block == victim, f"evicted {block}, the policy {self.policy} says {victim}"
            del self.cached[block]
            self.evictions += 1
            self.poison(block)
        elif event.kind == "free":
            assert self.owners(block) == 0
            assert block not in self.pairs.values(), "still to be copied from"
            self.poison(block)

    def watch_silent_drops(self) -> None:
        """Entries of blocks in use may go without an event; here they get one, in its place among the others."""
        pool, forget = self.manager._pool, self.manager._pool._forget

        def noting(entry: Entry) -> None:
            if pool.ref_count[entry.block]:
                pool.emit(DROP, entry.block)  # type: ignore[arg-type]
            forget(entry)

        pool._forget = noting  # type: ignore[method-assign]

    def poison(self, block: int) -> None:
        for slot in range(block * self.bs, (block + 1) * self.bs):
            self.memory[slot] = POISON
