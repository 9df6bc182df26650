"""Decode steps as CUDA graphs: the hundreds of kernels of a step are started by one call.

A graph replays fixed kernels on fixed addresses, so a decode step is written into persistent buffers, padded to the
next of a few batch sizes, and lengths are read on the device. Any other step (prefill, prompt log-probabilities) runs
eagerly, as do all steps if a graph cannot be captured.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from minipaged.engine.plan import ScheduledSequence, StepPlan, StepResult
from minipaged.kv.address import num_logical_blocks
from minipaged.ops.backend import AttentionBatch
from minipaged.runner.input_batch import InputBatch, Staging
from minipaged.runner.model_runner import Model, ModelRunner
from minipaged.sampling.sampler import Sampler

if TYPE_CHECKING:
    from minipaged.kv import PagedKVCache
    from minipaged.ops.backend import Backend

logger = logging.getLogger(__name__)

Replay: TypeAlias = Callable[[], Tensor]
Capture: TypeAlias = Callable[[Callable[[], Tensor]], Replay]
"""From a computation on persistent buffers to something that repeats it and returns the same result tensor."""


def bucket_sizes(maximum: int) -> list[int]:
    """Batch sizes for which graphs are captured, ascending; `maximum` is always one of them."""
    sizes = {1, 2, 4, *range(8, 129, 8), *range(160, maximum, 32)}
    return sorted(size for size in sizes | {maximum} if size <= maximum)


class DecodeBuffers:
    """The inputs of decode steps of up to `max_seqs` sequences at fixed addresses.

    Rows after the last sequence are padding: their K/V is written nowhere (slot -1) and their length is 0.
    """

    def __init__(self, max_seqs: int, max_blocks: int, device: torch.device) -> None:
        self._staging = Staging(device)
        self._host_tokens = self._staging.array(3 * max_seqs, torch.int64).reshape(3, max_seqs)
        self._host_lens = self._staging.array(max_seqs, torch.int32)
        self._host_tables = self._staging.array(max_seqs * max_blocks, torch.int32)
        self._tokens = torch.zeros(3, max_seqs, dtype=torch.int64, device=device)  # ids, positions, slots
        self._lens = torch.zeros(max_seqs, dtype=torch.int32, device=device)
        self._tables = torch.zeros(max_seqs, max_blocks, dtype=torch.int32, device=device)
        self._starts = torch.arange(max_seqs + 1, dtype=torch.int32, device=device)

    def fill(self, rows: Seq[ScheduledSequence], inputs: InputBatch) -> None:
        """One token of each sequence; without rows, nothing but padding. IndexError as `InputBatch.check_slots`."""
        count = len(rows)
        slots = [row.slots[0] for row in rows]
        inputs.check_slots(slots)
        self._staging.wait()
        ids, positions, all_slots = self._host_tokens
        ids[:count] = [row.sequence.token_ids[row.start] for row in rows]
        positions[:count] = [row.start for row in rows]
        all_slots[:count] = slots
        ids[count:], positions[count:], all_slots[count:] = 0, 0, -1
        self._host_lens[:count] = positions[:count] + 1
        self._host_lens[count:] = 0
        width = num_logical_blocks(int(self._host_lens.max()), inputs.block_size)
        tables = self._host_tables[: count * width].reshape(count, width)
        tables[:] = inputs.tables.table[inputs.tables.rows(row.sequence.sequence_id for row in rows), :width]
        self._staging.send(self._host_tokens, self._tokens)
        self._staging.send(self._host_lens, self._lens)
        self._tables[:count, :width].copy_(self._staging.send(tables))
        self._staging.sent()

    def views(self, size: int, max_seq_len: int) -> tuple[Tensor, AttentionBatch]:
        """Token ids and batch of the first `size` rows, whatever `fill` writes there."""
        ids, positions, slots = self._tokens[:, :size]
        starts = self._starts[: size + 1]
        batch = AttentionBatch(
            positions, slots, self._tables[:size], self._lens[:size], starts, 1, max_seq_len, num_decode_rows=size
        )
        return ids, batch


class GraphRunner(ModelRunner):
    """A `ModelRunner` that replays decode steps. The back end's `plan` must not look at the device (`capturable`).

    max_seqs: largest batch that is captured; the model's buffers must be sized for it already. max_model_len: longest
    sequence. capture: how; tests on the CPU bring their own.
    """

    def __init__(
        self,
        model: Model,
        backend: Backend,
        caches: Seq[PagedKVCache],
        sampler: Sampler,
        input_batch: InputBatch,
        *,
        max_seqs: int,
        max_model_len: int,
        capture: Capture | None = None,
    ) -> None:
        super().__init__(model, backend, caches, sampler, input_batch)
        self.sizes = bucket_sizes(max_seqs)
        self.num_replays = 0
        self.failure: str | None = None
        """Why steps are not captured any more."""
        self._max_model_len = max_model_len
        max_blocks = num_logical_blocks(max_model_len, input_batch.block_size)
        self._buffers = DecodeBuffers(max_seqs, max_blocks, input_batch.device)
        self._capture = capture or CudaCapture(input_batch.device)
        self._graphs: dict[int, Replay] = {}

    @property
    def captured_sizes(self) -> list[int]:
        """Batch sizes whose graph exists: each is captured when it first occurs."""
        return sorted(self._graphs)

    @torch.inference_mode()
    def capture_all(self) -> None:
        """Capture every size now instead of when it first occurs, the largest first. Between steps only: the graphs are
        run on padding, which is written nowhere.
        """
        self._buffers.fill([], self.input_batch)
        for size in reversed(self.sizes):
            if self.failure is None:
                self._graph(size)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        if not self._fits(plan):
            return super().execute(plan)
        self._buffers.fill(plan.rows, self.input_batch)
        self._copy_blocks(plan)  # once: what was copied from may be written to by the first run of a capture
        replay = self._graph(self.sizes[bisect_left(self.sizes, len(plan.rows))])
        if replay is None:
            return self._sample(plan, self._logits(self.input_batch.fill(plan)))
        self.num_replays += 1
        return self._sample(plan, replay()[: len(plan.rows)])

    def _fits(self, plan: StepPlan) -> bool:
        return (
            self.failure is None
            and 0 < len(plan.rows) <= self.sizes[-1]
            and all(row.num_tokens == 1 and row.sample_for and not row.prompt_logprobs for row in plan.rows)
        )

    def _graph(self, size: int) -> Replay | None:
        if size not in self._graphs:
            token_ids, batch = self._buffers.views(size, self._max_model_len)

            def compute() -> Tensor:
                return self.model.forward(token_ids, self.backend.plan(batch), self.caches)

            try:
                self._graphs[size] = self._capture(compute)
            except RuntimeError as error:
                self.failure = f"a decode step of {size} sequences cannot be captured: {error}"
                logger.warning("%s; decoding without CUDA graphs", self.failure)
                return None
        return self._graphs[size]


class CudaCapture:
    """Captures computations into CUDA graphs that share one memory pool: only one runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None

    def __call__(self, compute: Callable[[], Tensor]) -> Replay:
        with torch.cuda.device(self._device):
            # Once in the ordinary way, beside the current stream: kernels are compiled, libraries set up, scratch
            # grown. It computes the very step that is replayed next, so what it writes is what belongs there.
            aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(aside):
                compute()
            torch.cuda.current_stream().wait_stream(aside)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                result = compute()
            self._pool = graph.pool()

        def replay() -> Tensor:
            graph.replay()
            return result  # keeps its memory alive, whatever the model allocates later

        return replay
