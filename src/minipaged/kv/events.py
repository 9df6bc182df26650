"""What the block manager tells its listener: all that happens to a block's place in a table or to its content."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

logger = logging.getLogger(__name__)

EventKind: TypeAlias = Literal["allocate", "share", "copy", "commit", "evict", "free"]


@dataclass(frozen=True, slots=True)
class BlockEvent:
    """One change of one block. `sequence` and `logical_index` say in whose table and where, if it is in one.

    allocate  an empty block was appended to the table, or handed to a caller (sequence None)
    share     a block that holds tokens was appended to the table (fork, or a prefix hit)
    copy      copy-on-write: `block` replaced the table's last entry, `source` will be copied into it
    commit    the block became findable in the prefix cache
    evict     an idle block lost its cache entry and its content; comes before the event of who takes it
    free      the block lost its content and is in the free queue (after `reset`: every block, also those that were)

    allocate, share and copy give every live sequence's table: cut it to `logical_index` entries, then append `block`.

    A block may be overwritten on evict and free without touching live data. That is why a block released
    while it is the source of a copy that has not run is reported free late (at the first `take_block_copies`
    without it), or not at all if it gets a new owner before. There is no event for a block in use that loses one of
    its references or its cache entry.
    """

    kind: EventKind
    block: int
    sequence: int | None = None
    logical_index: int | None = None
    source: int | None = None


Listener: TypeAlias = Callable[[BlockEvent], None]
"""Called in order with all events of an operation, when the operation is complete: it may read the manager.

It must not call the manager's mutating methods, and should not raise. If it does, it still gets the operation's other
events, and the first exception comes out of the operation instead of its result, with the change made: `sequences`,
`slot_of` and `ref_count` tell what the result would have told. Only `take_block_copies` hands nothing out then, so that
no copy is lost: call it again.
"""


class FanOut:
    """One listener made of several: `required`, whose exceptions pass, and `listeners`, to which any may be appended.

    Kernels read what `required` keeps, so an operation whose event it did not take has failed. One of `listeners` that
    raises is logged and left out from then on: nobody's result depends on it.
    """

    def __init__(self, required: Listener, *listeners: Listener) -> None:
        self.required = required
        self.listeners = list(listeners)

    def __call__(self, event: BlockEvent) -> None:
        self.required(event)
        for listener in self.listeners[:]:
            try:
                listener(event)
            except Exception:
                logger.exception("a listener of block events failed, and gets no more of them: %r", listener)
                self.listeners.remove(listener)
