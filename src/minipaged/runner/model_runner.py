"""From a plan to drawn tokens: block copies, one forward pass, sampling. Decides nothing about blocks."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from minipaged.engine.plan import RowResult, StepPlan, StepResult
from minipaged.engine.request import Sequence
from minipaged.ops.transfer import upload
from minipaged.runner.input_batch import Batch, BatchMetadata
from minipaged.sampling.logprobs import prompt_logprobs
from minipaged.sampling.sampler import Sampler

if TYPE_CHECKING:
    from minipaged.kv import PagedKVCache
    from minipaged.ops.backend import AttentionPlan, Backend


class Model(Protocol):
    """What the runner needs of a model: `Qwen3Model` is one."""

    def forward(
        self, token_ids: Tensor, plan: AttentionPlan, caches: Seq[PagedKVCache], logits_rows: Tensor | None = None
    ) -> Tensor:
        """Write the step's K/V and return logits float32 [R, V] for rows `logits_rows`, valid until the next call."""


class ModelRunner:
    """`Runner` over a model, its back end and its caches (one per layer). Register `metadata.tables.on_event` with the
    block manager.
    """

    def __init__(
        self, model: Model, backend: Backend, caches: Seq[PagedKVCache], sampler: Sampler, metadata: BatchMetadata
    ) -> None:
        self.model = model
        self.backend = backend
        self.caches = caches
        self.sampler = sampler
        self.metadata = metadata

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step. Copies come first: a block that is copied from may already belong to somebody who writes to it
        below.
        """
        batch = self.metadata.fill(plan)  # checks the slots before anything is written
        self._copy_blocks(plan)
        return self._sample(plan, self._logits(batch))

    def release(self, sequence_ids: Seq[int]) -> None:
        """Drop what is kept per sequence: its block-table row and its token counts."""
        self.metadata.tables.release(sequence_ids)
        self.sampler.release(sequence_ids)

    def _copy_blocks(self, plan: StepPlan) -> None:
        if plan.block_copies:
            self.backend.copy_blocks(self.caches, plan.block_copies)

    def _logits(self, batch: Batch) -> Tensor:
        plan = self.backend.plan(batch.attention)
        return self.model.forward(batch.token_ids, plan, self.caches, batch.logits_rows)

    def _sample(self, plan: StepPlan, logits: Tensor) -> StepResult:
        results: list[RowResult] = []
        sequences: list[Sequence] = []
        sources: list[int] = []  # row of `logits` that each of `sequences` draws from
        used = 0
        for row in plan.rows:
            result = RowResult()
            results.append(result)
            if row.prompt_logprobs:
                prompt_end = row.sequence.num_prompt_tokens
                targets = row.sequence.token_ids[row.start + 1 : min(row.start + row.num_tokens + 1, prompt_end)]
                asked = row.sequence.params.prompt_logprobs or 0
                result.prompt_logprobs = prompt_logprobs(logits[used : used + len(targets)], targets, asked)
                used += row.num_tokens
            elif row.sample_for:
                used += 1
            if row.sample_for:
                sequences += row.sample_for
                sources += [used - 1] * len(row.sample_for)
        if sequences:
            in_place = sources == list(range(len(logits)))  # the common case, decodes only: nothing to gather
            chosen = logits if in_place else logits.index_select(0, upload(sources, logits.device))
            samples = iter(self.sampler.sample(chosen, sequences))
            for row, result in zip(plan.rows, results, strict=True):
                result.samples = [next(samples) for _ in row.sample_for]
        return StepResult(results)
