"""From a plan to sampled tokens: block copies, one forward pass, sampling. Decides nothing about blocks."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from minipaged.engine.plan import RowResult, StepPlan, StepResult
from minipaged.engine.request import Sequence
from minipaged.ops.transfer import upload
from minipaged.runner.input_batch import InputBatch, ModelInput
from minipaged.sampling.logprobs import token_logprobs
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
    """`Runner` over a model, its back end and its caches (one per layer).

    The block manager's events must reach `input_batch.tables.on_event`.
    """

    def __init__(
        self, model: Model, backend: Backend, caches: Seq[PagedKVCache], sampler: Sampler, input_batch: InputBatch
    ) -> None:
        self.model = model
        self.backend = backend
        self.caches = caches
        self.sampler = sampler
        self.input_batch = input_batch

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step. Copies come first: a block that is copied from may already belong to somebody who writes to it
        below.
        """
        inputs = self.input_batch.fill(plan)  # checks the slots before anything is written
        self._copy_blocks(plan)
        return self._sample(plan, self._logits(inputs))

    def release(self, sequence_ids: Seq[int]) -> None:
        """Drop what is kept per sequence: its block-table row and its token counts."""
        self.input_batch.tables.release(sequence_ids)
        self.sampler.release(sequence_ids)

    def _copy_blocks(self, plan: StepPlan) -> None:
        if plan.block_copies:
            self.backend.copy_blocks(self.caches, plan.block_copies)

    def _logits(self, inputs: ModelInput) -> Tensor:
        plan = self.backend.plan(inputs.attention)
        return self.model.forward(inputs.token_ids, plan, self.caches, inputs.logits_rows)

    def _sample(self, plan: StepPlan, logits: Tensor) -> StepResult:
        results: list[RowResult] = []
        sequences: list[Sequence] = []
        sources: list[int] = []  # row of `logits` that each of `sequences` samples from
        used = 0
        for row in plan.rows:
            result = RowResult()
            results.append(result)
            if row.prompt_logprobs:
                sequence, last = row.sequence, row.start + row.num_tokens
                targets = sequence.token_ids[row.start + 1 : min(last + 1, sequence.num_prompt_tokens)]
                asked = sequence.params.prompt_logprobs or 0
                result.prompt_logprobs = token_logprobs(logits[used : used + len(targets)], targets, asked)
            used += row.num_logits
            sequences += row.sample_for
            sources += [used - 1] * len(row.sample_for)
        if sequences:
            in_place = sources == list(range(len(logits)))  # the common case, decodes only: nothing to gather
            chosen = logits if in_place else logits.index_select(0, upload(sources, logits.device))
            samples = iter(self.sampler.sample(chosen, sequences))
            for row, result in zip(plan.rows, results, strict=True):
                result.samples = [next(samples) for _ in row.sample_for]
        return StepResult(results)
