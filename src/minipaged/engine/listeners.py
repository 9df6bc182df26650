"""Listeners of block events that nobody depends on: a journal on disk, poison for tests."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from minipaged.kv import BlockEvent, PagedKVCache

logger = logging.getLogger(__name__)


class Journal:
    """Writes every event to a file, one JSON object per line, after a first line with the pool's size.

    {"num_blocks": N, "block_size": Bs} and then {"step", "kind", "block", "sequence", "logical_index", "source"}, with
    null where an event has no such thing. Sequence numbers are the engine's and never reused. OSError if the file
    cannot be created. If it cannot be written later on, generating goes on, and `close` raises the OSError.
    """

    def __init__(self, path: str | Path, num_blocks: int, block_size: int, step: Callable[[], int]) -> None:
        self._step = step
        self._path = str(path)
        self._error: OSError | None = None
        try:
            self._file: IO[str] = Path(path).open("w", encoding="utf-8")  # noqa: SIM115 - closed by `close`
        except OSError as error:
            raise type(error)(error.errno, f"kv_journal cannot be written: {error.strerror}", self._path) from error
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
        """Flush and close; events after that are dropped. OSError if not all of them could be written."""
        try:
            self._file.close()
        except OSError as error:
            self._error = self._error or error
        if self._error is not None:
            raise OSError(
                f"kv_journal = {self._path!r} could not be written, the journal is incomplete: {self._error}"
            ) from self._error

    def _write(self, record: dict[str, object]) -> None:
        if self._error is None and not self._file.closed:
            try:
                self._file.write(json.dumps(record, separators=(",", ":")) + "\n")
            except OSError as error:  # not from inside a change of the block manager: `close` raises it
                self._error = error
                logger.error("kv_journal = %r cannot be written: %s", self._path, error)


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
