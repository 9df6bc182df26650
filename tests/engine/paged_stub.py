"""A runner without a model whose output depends on every token that it reads through the paged memory.

The next token is a hash of the whole history, and the history is read slot by slot through the block table, not from
the request. A wrong slot, table, copy, a block that is shared with the wrong content or re-used too early: each changes
the output, and what was never written (or was freed: the memory is poisoned by the block manager's events) is an error
at once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from minipaged.engine.plan import RowResult, SampledToken, ScheduledSequence, StepPlan, StepResult
from minipaged.kv import BlockEvent, KVBlockManager
from minipaged.sampling_params import SamplingParams

VOCAB = 320
POISON = -1


class CorruptionError(BaseException):
    """Not an `Exception`: the engine must not be able to turn it into a failed request."""


def next_token(history: Sequence[int], params: SamplingParams, seed: int, index: int) -> int:
    """Greedy requests depend on the history alone, others on seed and child as well."""
    key = repr(list(history)) if params.greedy else repr((list(history), seed, index))
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=4).digest(), "little") % VOCAB


@dataclass
class PagedMemory:
    """slot -> token, written by the runner, poisoned by events."""

    num_blocks: int
    block_size: int
    slots: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.slots = [POISON] * (self.num_blocks * self.block_size)

    def on_event(self, event: BlockEvent) -> None:
        if event.kind in ("free", "evict"):
            self.slots[event.block * self.block_size : (event.block + 1) * self.block_size] = [POISON] * self.block_size


class PagedStubRunner:
    """`fail(step)`: raise in that step, after half of the writes; `bad_row(step, sequence)`: that row's logits are
    NaN.
    """

    def __init__(
        self,
        memory: PagedMemory,
        manager: KVBlockManager,
        *,
        fail: Callable[[int], bool] = lambda step: False,
        bad_row: Callable[[int, int], bool] = lambda step, sequence_id: False,
    ) -> None:
        self.memory, self.manager = memory, manager
        self.fail, self.bad_row = fail, bad_row
        self.steps = 0
        self.tokens_computed = 0
        self.copies = 0
        self.plans: list[StepPlan] = []
        self.keep_plans = False
        self.released: list[int] = []
        self.on_execute: Callable[[StepPlan], None] | None = None

    def execute(self, plan: StepPlan) -> StepResult:
        step, self.steps = self.steps, self.steps + 1
        self.tokens_computed += plan.num_tokens
        self.copies += len(plan.block_copies)
        if self.keep_plans:
            self.plans.append(plan)
        if self.on_execute is not None:
            self.on_execute(plan)
        block_size, slots = self.memory.block_size, self.memory.slots
        check_plan(plan, self.manager)
        contents = [slots[source * block_size : (source + 1) * block_size] for source, _ in plan.block_copies]
        for (_, target), content in zip(plan.block_copies, contents, strict=True):
            slots[target * block_size : (target + 1) * block_size] = content
        failing = self.fail(step)
        for number, row in enumerate(plan.rows):
            if failing and number >= len(plan.rows) // 2:
                raise RuntimeError("injected")
            for slot, token in zip(row.slots, row.sequence.token_ids[row.start :], strict=False):
                slots[slot] = (token + 1) % VOCAB if failing else token  # a pass that fails leaves rubbish behind
        return StepResult([self._row(step, row) for row in plan.rows])

    def _row(self, step: int, row: ScheduledSequence) -> RowResult:
        length = row.start + row.num_tokens
        history = self.read(row.sequence.sequence_id, length)
        if history != row.sequence.token_ids[:length]:
            raise CorruptionError(f"step {step}, {row.sequence}: read {history}")
        if self.bad_row(step, row.sequence.sequence_id):
            return RowResult([SampledToken(-1, error="injected NaN") for _ in row.sample_for])
        result = RowResult([SampledToken(next_token(history, s.params, s.seed, s.index)) for s in row.sample_for])
        if row.prompt_logprobs:
            end = min(length + 1, row.sequence.num_prompt_tokens)
            result.prompt_logprobs = [{token: None} for token in row.sequence.token_ids[row.start + 1 : end]]
        return result

    def read(self, sequence_id: int, length: int) -> list[int]:
        table, block_size = self.manager.sequences[sequence_id].block_table, self.memory.block_size
        return [self.memory.slots[table[p // block_size] * block_size + p % block_size] for p in range(length)]

    def release(self, sequence_ids: Sequence[int]) -> None:
        self.released.extend(sequence_ids)


def check_plan(plan: StepPlan, manager: KVBlockManager) -> None:
    """What every plan must be: contiguous with what is in memory, slots distinct and those of the table, tokens
    counted.
    """
    seen: set[int] = set()
    for row in plan.rows:
        sequence, end = row.sequence, row.start + row.num_tokens
        if row.start != sequence.num_computed or row.num_tokens < 1 or end > len(sequence.token_ids):
            raise CorruptionError(
                f"row {row.start}+{row.num_tokens} of {sequence.num_computed}/{len(sequence.token_ids)}"
            )
        if row.slots != [manager.slot_of(sequence.sequence_id, p) for p in range(row.start, end)]:
            raise CorruptionError(f"slots {row.slots} are not those of the table")
        if bool(row.sample_for) != (end == len(sequence.token_ids)):
            raise CorruptionError("a row samples exactly when its last known token is computed")
        if seen & set(row.slots):
            raise CorruptionError("one slot is written twice")
        seen |= set(row.slots)
    if plan.num_tokens != sum(row.num_tokens for row in plan.rows):
        raise CorruptionError("num_tokens")
    sizes = [row.num_tokens > 1 for row in plan.rows]
    if sizes != sorted(sizes):
        raise CorruptionError("one-token rows come first")
    targets = [target for _, target in plan.block_copies]
    if len(set(targets)) != len(targets) or set(targets) & {source for source, _ in plan.block_copies}:
        raise CorruptionError(f"copies {plan.block_copies} are not simultaneous")


def oracle(prompt: list[int], params: SamplingParams, seed: int, index: int) -> list[int]:
    """The same request alone: the same function, no engine, no memory."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < params.max_tokens:
        tokens.append(next_token(tokens, params, seed, index))
        if tokens[-1] in params.stop_token_ids and len(tokens) - len(prompt) >= params.min_tokens:
            break
    return tokens[len(prompt) :]
