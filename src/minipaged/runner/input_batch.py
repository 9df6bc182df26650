"""The arrays that tell the model what a step computes, kept in persistent buffers that are filled in place.

Nothing here grows with the length of a sequence: block-table rows are extended by the block manager's events, one
number per new block, and a step writes one number per computed token.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from minipaged.engine.plan import StepPlan
from minipaged.kv.address import num_logical_blocks
from minipaged.ops.backend import AttentionBatch
from minipaged.ops.transfer import pin

if TYPE_CHECKING:
    from minipaged.kv import BlockEvent

Array = np.ndarray[Any, Any]


class BlockTables:
    """A mirror of the block manager's tables, int32 [rows, width]: one row per sequence that holds blocks.

    `on_event` is the manager's listener; `release` gives rows back (a sequence that shares all its blocks leaves no
    event behind). Both dimensions grow on demand: whatever the manager does has a place here.
    """

    def __init__(self, num_rows: int, width: int) -> None:
        self.table: Array = np.zeros((num_rows, width), dtype=np.int32)
        self._row_of: dict[int, int] = {}

    def on_event(self, event: BlockEvent) -> None:
        """Follow one change of a table; other events are nothing to a table."""
        if event.kind in ("allocate", "share", "copy") and event.sequence is not None:
            row = self._row_of.get(event.sequence)
            if row is None:
                used = set(self._row_of.values())
                row = self._row_of[event.sequence] = next(row for row in count() if row not in used)
            index = event.logical_index or 0
            num_rows, width = self.table.shape
            if row >= num_rows or index >= width:
                more = (row + 1 if row >= num_rows else 0, index + 1 if index >= width else 0)
                self.table = np.pad(self.table, ((0, more[0]), (0, more[1])))
            self.table[row, index] = event.block

    def rows(self, sequence_ids: Iterable[int]) -> list[int]:
        """Row number of each sequence. KeyError for one that holds no block."""
        return [self._row_of[sequence_id] for sequence_id in sequence_ids]

    def release(self, sequence_ids: Iterable[int]) -> None:
        """These sequences hold no block any more; unknown ones are ignored."""
        for sequence_id in sequence_ids:
            self._row_of.pop(sequence_id, None)


class Staging:
    """Host arrays whose contents go to a device without the host waiting. Before refilling them, `wait` until the last
    copy has left them; then `send`.

    On the CPU nothing is pinned, `wait` does nothing, and `send` returns the array's own memory.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._on_gpu = device.type != "cpu"
        self._left: torch.cuda.Event | None = None

    def array(self, size: int, dtype: torch.dtype) -> Array:
        """Zeros [size] that the device can read directly."""
        zeros = torch.zeros(size, dtype=dtype)
        array: Array = (pin(zeros) if self._on_gpu else zeros).numpy()
        return array

    def wait(self) -> None:
        """Until the arrays may be changed again."""
        if self._left is not None:
            self._left.synchronize()

    def send(self, array: Array, target: Tensor | None = None) -> Tensor:
        """The array's content on the device, in `target` if given. Part of the current stream: whoever reads it there
        is later."""
        tensor = torch.from_numpy(array)
        if target is not None:
            return target.copy_(tensor, non_blocking=True)
        return tensor.to(self.device, non_blocking=True)

    def sent(self) -> None:
        """All copies of this step are on their way."""
        if self._on_gpu:
            if self._left is None:
                self._left = torch.cuda.Event()  # type: ignore[no-untyped-call]
            # On this device's stream: another device may be the current one.
            self._left.record(torch.cuda.current_stream(self.device))


@dataclass(slots=True)
class ModelInput:
    """One step for the model: token_ids int64 [T], and `logits_rows` int64 [R], the rows of T whose logits are wanted:
    any number per sequence (`ScheduledSequence.num_logits`).
    """

    token_ids: Tensor
    attention: AttentionBatch
    logits_rows: Tensor


class InputBatch:
    """Builds a `ModelInput` from a `StepPlan`. Its tensors are views, valid until the next call.

    max_tokens, max_seqs: sizes to start with (they grow if a plan is larger); max_blocks: longest block table;
    num_slots: slots of the pool, for the one check per step that no row writes outside it.
    """

    def __init__(
        self,
        *,
        max_tokens: int,
        max_seqs: int,
        max_blocks: int,
        block_size: int,
        num_slots: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self.block_size, self.num_slots = block_size, num_slots
        self.device = torch.device(device)
        # One row more: an admission that fails holds one for a moment.
        self.tables = BlockTables(max_seqs + 1, max_blocks)
        self._staging = Staging(self.device)
        sizes = {"seq_lens": max_seqs, "query_start_loc": max_seqs + 1, "block_tables": max_seqs * max_blocks}
        self._buffers = {name: self._staging.array(size, torch.int32) for name, size in sizes.items()}
        for name in ("token_ids", "positions", "slots", "logits_rows"):
            self._buffers[name] = self._staging.array(max_tokens, torch.int64)

    def fill(self, plan: StepPlan) -> ModelInput:
        """The arrays of one step. IndexError as `check_slots`: nothing has been written to the cache then."""
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        seq_lens: list[int] = []
        logits_rows: list[int] = []
        starts = [0]
        counts = [row.num_tokens for row in plan.rows]
        for row, num_tokens in zip(plan.rows, counts, strict=True):
            end = row.start + num_tokens
            token_ids += row.sequence.token_ids[row.start : end]
            positions += range(row.start, end)
            slots += row.slots
            seq_lens.append(end)
            starts.append(starts[-1] + num_tokens)
            logits_rows += range(starts[-1] - row.num_logits, starts[-1])
        self.check_slots(slots)

        self._staging.wait()
        max_seq_len = max(seq_lens, default=0)
        width = num_logical_blocks(max_seq_len, self.block_size)
        rows = self.tables.rows(row.sequence.sequence_id for row in plan.rows)
        tables = self._array("block_tables", len(rows) * width).reshape(len(rows), width)
        tables[:] = self.tables.table[rows, :width]
        filled = ModelInput(
            self._fill("token_ids", token_ids),
            AttentionBatch(
                positions=self._fill("positions", positions),
                slot_mapping=self._fill("slots", slots),
                block_tables=self._staging.send(tables),
                seq_lens=self._fill("seq_lens", seq_lens),
                query_start_loc=self._fill("query_start_loc", starts),
                max_query_len=max(counts, default=0),
                max_seq_len=max_seq_len,
                num_decode_rows=next((i for i, n in enumerate(counts) if n != 1), len(counts)),
            ),
            self._fill("logits_rows", logits_rows),
        )
        self._staging.sent()
        return filled

    def check_slots(self, slots: Seq[int]) -> None:
        """IndexError if one lies outside the pool: the step's only look at them, kernels write where they are told."""
        if slots and (min(slots) < 0 or max(slots) >= self.num_slots):
            raise IndexError(f"slots {min(slots)} to {max(slots)} do not all lie in the pool of {self.num_slots}")

    def _array(self, name: str, size: int) -> Array:
        buffer = self._buffers[name]
        if size > len(buffer):
            dtype = torch.int64 if buffer.dtype == np.int64 else torch.int32
            buffer = self._buffers[name] = self._staging.array(max(size, 2 * len(buffer)), dtype)
        return buffer[:size]

    def _fill(self, name: str, values: list[int]) -> Tensor:
        array = self._array(name, len(values))
        array[:] = values
        return self._staging.send(array)
