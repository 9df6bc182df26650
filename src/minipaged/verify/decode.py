"""Greedy decoding through the real engine, with a teacher in front of the runner.

The runner computes and samples as always; the teacher notes what it chose and from which logits, and then hands the
engine the scripted token. So every step is a real one (scheduler, block manager, input batch, sampler), all
requests run as one batch, and one near tie does not change what the following tokens are compared with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minipaged.engine.config import EngineConfig, EngineStats
from minipaged.engine.engine import Engine
from minipaged.engine.plan import Runner, SampledToken, StepPlan, StepResult
from minipaged.kv import KVBlockManager, PagedKVCache
from minipaged.kv.address import num_logical_blocks
from minipaged.runner.input_batch import InputBatch
from minipaged.runner.model_runner import ModelRunner
from minipaged.sampling.sampler import Sampler
from minipaged.sampling_params import SamplingParams
from minipaged.verify.observe import LogitsTap, observed

if TYPE_CHECKING:
    from minipaged.model.qwen3 import Qwen3Model

Prompt = tuple[int, ...]


NO_TOKEN = -1


class DecodeError(RuntimeError):
    """The engine did not bring a request to its end."""


@dataclass(frozen=True, slots=True)
class Taken:
    """One token of one request: what our sampler chose (NO_TOKEN if it could not), and the logits [V] it chose from
    (float32, CPU)."""

    token: int
    logits: Tensor


@dataclass(slots=True)
class Teacher:
    """A `Runner` around `inner`. scripts: prompt -> the tokens that follow it; a prompt without a script goes its
    own way.

    `taken[prompt]` fills up token by token; `steps[prompt]` counts the steps that computed any of it.
    """

    inner: Runner
    model: Qwen3Model
    scripts: Mapping[Prompt, Sequence[int]] = field(default_factory=dict)
    taken: dict[Prompt, list[Taken]] = field(default_factory=dict)
    steps: dict[Prompt, int] = field(default_factory=dict)

    def execute(self, plan: StepPlan) -> StepResult:
        """Pass on, look at the logits, and replace each drawn token by the one of Hugging Face."""
        tap = LogitsTap(self.model)
        with observed(self.model, tap):
            result = self.inner.execute(plan)
        logits = iter(() if tap.logits is None else tap.logits)
        for row, row_result in zip(plan.rows, result.rows, strict=True):
            sequence = row.sequence
            prompt = tuple(sequence.token_ids[: sequence.num_prompt_tokens])
            self.steps[prompt] = self.steps.get(prompt, 0) + 1
            if not row.sample_for:
                continue
            taken = self.taken.setdefault(prompt, [])
            sample, script = row_result.samples[0], self.scripts.get(prompt)
            taken.append(Taken(NO_TOKEN if sample.error is not None else sample.token_id, next(logits)))
            if script is not None:
                row_result.samples[0] = SampledToken(script[len(taken) - 1])
        if next(logits, None) is not None:
            raise DecodeError("the model computed more rows of logits than the step plan asks for")
        return result

    def release(self, sequence_ids: Sequence[int]) -> None:
        """Pass on."""
        self.inner.release(sequence_ids)


@dataclass(frozen=True, slots=True)
class Setting:
    """How an engine for one run is set up; the defaults are the plain case: big pool, whole prompts, no prefix
    cache."""

    block_size: int = 16
    num_blocks: int | None = None  # None = enough for everything at once
    max_num_batched_tokens: int = 8192
    prefix_caching: bool = False
    free_order: Sequence[int] | None = None  # the order in which physical blocks are handed out


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one run: what was drawn after each prompt, in how many steps, and the engine's counts at its end."""

    taken: dict[Prompt, list[Taken]]
    steps: dict[Prompt, int]
    stats: EngineStats


def run(
    model: Qwen3Model,
    prompts: Sequence[Prompt],
    num_tokens: int,
    *,
    setting: Setting = Setting(),
    scripts: Mapping[Prompt, Sequence[int]] | None = None,
    stagger: int = 0,
    repeat: int = 1,
) -> Outcome:
    """Decode `num_tokens` greedily after each prompt, all in one engine.

    stagger: steps between the arrivals of two requests, so that prefills meet decodes. repeat: run the whole set
    that many times in the same engine and report the last time (a prefix cache is warm then).
    """
    manager, runner = _pool_and_runner(model, prompts, num_tokens, setting)
    teacher = Teacher(runner, model, scripts or {})
    config = EngineConfig(
        max_num_seqs=len(prompts),
        max_num_batched_tokens=setting.max_num_batched_tokens,
        vocab_size=model.config.vocab_size,
        check_invariants=True,
    )
    engine = Engine(teacher, manager, config)
    greedy = SamplingParams(
        temperature=0.0, max_tokens=num_tokens, ignore_eos=True, repetition_penalty=1.0, detokenize=False
    )
    for _ in range(repeat):
        teacher.taken.clear()
        teacher.steps.clear()
        waiting = list(enumerate(prompts))
        pause = 0
        while waiting or engine.has_unfinished():
            if waiting and pause == 0:
                index, prompt = waiting.pop(0)
                engine.add_request(str(index), prompt, greedy)
                pause = stagger
                if not stagger and waiting:
                    continue
            pause = max(pause - 1, 0)
            for output in engine.step():
                if output.finished and output.outputs[0].finish_reason != "length":
                    raise DecodeError(f"request {output.request_id} ended early: {output.outputs[0].error}")
    return Outcome(dict(teacher.taken), dict(teacher.steps), engine.stats())


def _pool_and_runner(
    model: Qwen3Model, prompts: Sequence[Prompt], num_tokens: int, setting: Setting
) -> tuple[KVBlockManager, ModelRunner]:
    """A pool of the setting's geometry, full of NaN, and a runner on it."""
    size = setting.block_size
    longest = max(map(len, prompts)) + num_tokens
    blocks = setting.num_blocks or sum(num_logical_blocks(len(prompt) + num_tokens, size) for prompt in prompts) + 1
    input_batch = InputBatch(
        max_tokens=min(setting.max_num_batched_tokens, longest * len(prompts)),
        max_seqs=len(prompts),
        max_blocks=num_logical_blocks(longest, size),
        block_size=size,
        num_slots=blocks * size,
        device=model.device,
    )
    manager = KVBlockManager(
        blocks,
        size,
        enable_prefix_caching=setting.prefix_caching,
        free_order=setting.free_order,
        listener=input_batch.tables.on_event,
    )
    shape = blocks, model.config.num_key_value_heads, size, model.config.head_dim
    caches = [PagedKVCache(*shape, dtype=model.activation_dtype, device=model.device) for _ in model.layers]
    for cache in caches:
        cache.fill_(float("nan"))
    return manager, ModelRunner(model, model.backend, caches, Sampler(model.config.vocab_size), input_batch)


def logits_of(outcome: Outcome, prompt: Prompt) -> Tensor:
    """float32 [n, V]: the rows from which the tokens after `prompt` were chosen."""
    return torch.stack([taken.logits for taken in outcome.taken[prompt]])
