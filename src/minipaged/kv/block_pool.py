"""Who owns which physical block. Every block is in exactly one of three states:

        allocate                    free, never cached
    FREE -------> IN USE (ref_count >= 1) ---------> FREE
                   |    ^
           free,   |    | share (a prefix hit)
          cached   v    |
                  IDLE (cached, ref_count 0) -- evicted when the free queue is empty --> allocated

O(1) per block, plus what the policy takes to choose; rarely more, where a comment says so (`_expose_candidate`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from minipaged.kv.events import BlockEvent, EventKind, Listener
from minipaged.kv.eviction import EvictionPolicy
from minipaged.kv.prefix_index import Entry, PrefixIndex


class PendingCopies:
    """Copies that copy-on-write owes: whole blocks, to be run before the step's first write.

    (source, destination) pairs that mean the same in any order, or at once: no destination is a source or occurs twice.

    A copy of a block that is itself still waiting for its copy is taken from that copy's source. Nothing has been
    written to the block in between, because writes come after the copies.
    """

    def __init__(self) -> None:
        self.source_of: dict[int, int] = {}  # destination -> source, in the order of the appends
        self.sources: dict[int, int] = {}  # source -> in how many pairs

    def add(self, block: int, destination: int) -> int:
        """Owe `destination` the content of `block`; returns the source to copy from."""
        source = self.source_of.get(block, block)
        self.source_of[destination] = source
        self.sources[source] = self.sources.get(source, 0) + 1
        return source

    def drop(self, destination: int) -> None:
        """The destination lost its last owner: nothing is owed to it any more."""
        source = self.source_of.pop(destination, None)
        if source is not None:
            self.sources[source] -= 1
            if not self.sources[source]:
                del self.sources[source]

    def drain(self) -> list[tuple[int, int]]:
        """All pairs, in the order of the appends; afterwards nothing is owed."""
        pairs = [(source, destination) for destination, source in self.source_of.items()]
        self.source_of.clear()
        self.sources.clear()
        return pairs


class BlockPool:
    """Free queue, reference counts, idle cached blocks and pending copies of `len(order)` blocks."""

    def __init__(
        self, order: Sequence[int], block_size: int, policy: EvictionPolicy, listener: Listener | None
    ) -> None:
        self.block_size = block_size
        self.queue = list(reversed(order))  # free blocks; a stack: the front of the queue is the end of the list
        self.ref_count = [0] * len(order)
        self.references = 0  # sum of ref_count
        self.held: set[int] = set()  # by a caller, in no table
        self.shared = 0  # blocks with ref_count >= 2
        self.index = PrefixIndex()
        self.entry_of: list[Entry | None] = [None] * len(order)
        self.idle: OrderedDict[int, None] = OrderedDict()  # least recently released first
        self.candidates: set[int] = set()  # idle blocks without a cached child; what the policy holds
        self.policy = policy
        self.copies = PendingCopies()
        self.unreported: dict[int, None] = {}  # free blocks whose `free` event waits for the copies that read them
        self.listener = listener
        self._events: list[BlockEvent] = []  # of the operation that is running
        self._releases = 0

    def emit(self, kind: EventKind, block: int, *where: int | None) -> None:
        """Note an event, for `tell`. where: the other fields of `BlockEvent`, as far as there are any."""
        if self.listener is not None:
            self._events.append(BlockEvent(kind, block, *where))

    def tell(self) -> None:
        """The operation is over: the listener hears of all its events. The first exception comes out afterwards."""
        if self.listener is None or not self._events:
            return
        events, self._events = self._events, []
        failure: BaseException | None = None
        for event in events:
            try:
                self.listener(event)
            except BaseException as error:  # Ctrl-C too: a mirror of the tables must not miss an event
                failure = failure or error
        if failure is not None:
            raise failure

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can hand out: an idle block can always be evicted (`_expose_candidate`)."""
        return len(self.queue) + len(self.idle)

    def has_destinations(self, count: int) -> bool:
        """Can `allocate_destination` hand out `count` blocks? Each must be available and no pending copy's source."""
        if self.num_available - len(self.copies.sources) >= count:
            return True
        return self.num_available - sum(not self.ref_count[block] for block in self.copies.sources) >= count

    # --- FREE or IDLE -> IN USE ---

    def allocate(self) -> int:
        """The next block; the caller has checked `num_available`."""
        return self._own(self.queue.pop() if self.queue else self._evict())

    def allocate_destination(self) -> int:
        """The next block that may become the destination of a copy; the caller has checked `has_destinations`."""
        queue, sources = self.queue, self.copies.sources
        for place in range(len(queue) - 1, -1, -1):  # ends at once, unless a source was released before its copies ran
            if queue[place] not in sources:
                return self._own(queue.pop(place))
        block = self._evict()
        while block in sources:
            self._queue(block)
            block = self._evict()
        return self._own(block)

    def share(self, block: int) -> bool:
        """One more owner of a block with content. True if the block was idle."""
        count = self.ref_count[block]
        self.ref_count[block] = count + 1
        self.references += 1
        self.shared += count == 1
        if count:
            return False
        del self.idle[block]
        self._remove_candidate(block)
        return True

    def _own(self, block: int) -> int:
        self.ref_count[block] = 1
        self.references += 1
        if self.unreported:
            self.unreported.pop(block, None)
        return block

    # --- IN USE -> FREE or IDLE ---

    def free(self, block: int, sequence: int | None = None, index: int | None = None) -> bool:
        """One owner less. True if it was the last one."""
        count = self.ref_count[block] - 1
        self.ref_count[block] = count
        self.references -= 1
        self.shared -= count == 1
        if count:
            return False
        if self.copies.source_of:
            self.copies.drop(block)
        entry = self.entry_of[block]
        if entry is None:
            self._queue(block, sequence, index)
            return True
        self._releases += 1
        entry.released = self._releases
        self.idle[block] = None
        if not entry.children:
            self._add_candidate(entry)
        return True

    def _queue(self, block: int, sequence: int | None = None, index: int | None = None) -> None:
        self.queue.append(block)
        if block in self.copies.sources:
            self.unreported[block] = None
        else:
            self.emit("free", block, sequence, index)

    def drain_copies(self) -> list[tuple[int, int]]:
        """Pairs to run now. Those of the drain before have run: blocks that waited for them are reported free."""
        for block in [block for block in self.unreported if block not in self.copies.sources]:
            del self.unreported[block]
            self.emit("free", block)
        self.tell()  # before the pairs leave: if the listener raises, they are still here to be asked for again
        return self.copies.drain()

    # --- the prefix cache ---

    def cache(self, parent: Entry | None, salt: str | None, tokens: bytes, block: int) -> Entry:
        """Make a full block in use findable after `parent`'s history."""
        entry = self.index.insert(parent, salt, tokens, block)
        self.entry_of[block] = entry
        self.policy.insert(block)
        if parent is not None:
            self._remove_candidate(parent.block)
        return entry

    def clear_cache(self) -> None:
        """Forget every entry: idle blocks become free, the most recently released next."""
        for block in list(self.candidates):
            self._remove_candidate(block)
        self.index.clear()
        self.entry_of = [None] * len(self.entry_of)
        for block in self.idle:
            self.emit("evict", block)
            self._queue(block)
        self.idle.clear()

    def _add_candidate(self, entry: Entry) -> None:
        self.candidates.add(entry.block)
        self.policy.add(entry.block, entry.released)

    def _remove_candidate(self, block: int) -> None:
        if block in self.candidates:
            self.candidates.remove(block)
            self.policy.remove(block)

    def _evict(self) -> int:
        if not self.candidates:
            self._expose_candidate()
        block = self.policy.evict()
        entry = self.entry_of[block]
        assert entry is not None
        self.candidates.remove(block)
        del self.idle[block]
        self._forget(entry)
        self.emit("evict", block)
        return block

    def _forget(self, entry: Entry) -> None:
        """Remove a leaf from the index; its parent may become a candidate."""
        parent = entry.parent
        self.entry_of[entry.block] = None
        self.index.remove(entry)
        if parent is not None and not parent.children and not self.ref_count[parent.block]:
            self._add_candidate(parent)

    def _expose_candidate(self) -> None:
        """Idle blocks, and each has a cached child: turn one of them into a leaf.

        A sequence that computed a prefix by itself keeps private duplicates of blocks that are cached, and its own
        blocks are cached below those. When the cached originals are idle, only entries of blocks in use can be
        leaves below them: these lose their entries (their owners notice nothing) until an idle one is bare.
        """
        entry = self.entry_of[next(iter(self.idle))]
        while not self.candidates:
            assert entry is not None
            while entry.children:
                entry = next(reversed(entry.children.values()))
            parent = entry.parent
            self._forget(entry)
            entry = parent
