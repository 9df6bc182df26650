"""What hangs on the block manager's events: several listeners at once, a journal on disk, poison for tests."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from minipaged.kv import BlockEvent, PagedKVCache

Listener = Callable[["BlockEvent"], None]


class FanOut:
    """One listener that calls each of `listeners` in order; more may be appended while it is in use."""

    def __init__(self, *listeners: Listener) -> None:
        self.listeners = list(listeners)

    def __call__(self, event: BlockEvent) -> None:
        for listener in self.listeners:
            listener(event)


class Journal:
    """Writes every event to a file, one JSON object per line, after a first line with the pool's size.

    {"num_blocks": N, "block_size": Bs} and then {"step", "kind", "block", "sequence", "logical_index", "source"}, with
    null where an event has no such thing. Sequence numbers are the engine's and never reused. OSError if the file
    cannot be written.
    """

    def __init__(self, path: str | Path, num_blocks: int, block_size: int, step: Callable[[], int]) -> None:
        self._step = step
        self._file: IO[str] = Path(path).open("w", encoding="utf-8")  # noqa: SIM115 - closed by `close`
        self._write({"num_blocks": num_blocks, "block_size": block_size})

    def __call__(self, event: BlockEvent) -> None:
        self._write(
            {
                "step": self._step(),
                "kind": event.kind,
                "block": event.block,
                "sequence": event.sequence,
                "logical_index": event.logical_index,
                "source": event.source,
            }
        )

    def close(self) -> None:
        """Flush and close; events after that are dropped."""
        self._file.close()

    def _write(self, record: dict[str, object]) -> None:
        if not self._file.closed:
            self._file.write(json.dumps(record, separators=(",", ":")) + "\n")


class Poison:
    """Test mode: fills a block with NaN when it loses its content (`free`, `evict`), and all of them at the start.

    Whatever reads a slot that nobody has written since then turns its logits into NaN instead of reading something
    plausible.
    """

    def __init__(self, caches: Sequence[PagedKVCache]) -> None:
        self._caches = caches
        for cache in caches:
            cache.fill_(float("nan"))

    def __call__(self, event: BlockEvent) -> None:
        if event.kind in ("free", "evict"):
            for cache in self._caches:
                cache.key_cache[event.block].fill_(float("nan"))
                cache.value_cache[event.block].fill_(float("nan"))
