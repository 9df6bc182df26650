"""Single steps of a model, without a scheduler: the forward pass and sampling for a batch made by hand."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from minipaged.bench.limits import StepWork
from minipaged.engine.plan import ScheduledSequence, StepPlan
from minipaged.engine.request import Sequence
from minipaged.sampling_params import SamplingParams

if TYPE_CHECKING:
    from minipaged.engine.engine import Engine

FIRST_ID = 1 << 60  # far from the numbers that an engine gives out
LEAST_SECONDS = 0.2


@contextmanager
def step_plan(engine: Engine, *, sequences: int, context: int, queries: int = 1) -> Iterator[StepPlan]:
    """A plan whose rows compute the last `queries` of `context` tokens; earlier K/V is whatever the pool holds.

    It may be executed many times: it writes the same slots with the same values. OutOfBlocksError if the pool is too
    small.
    """
    manager, rows = engine.block_manager, []
    params = SamplingParams(temperature=0.0).resolve(None, 1)
    ids = range(FIRST_ID, FIRST_ID + sequences)
    try:
        for sequence_id in ids:
            manager.create_sequence(sequence_id)
            slots = manager.append_tokens(sequence_id, context)[context - queries :]
            sequence = Sequence(sequence_id, 0, [sequence_id % 7 + 1] * context, context, params, seed=0)
            rows.append(ScheduledSequence(sequence, context - queries, queries, slots, (sequence,), num_logits=1))
        yield StepPlan(rows, [], sequences * queries)
    finally:
        for sequence_id in ids:
            if sequence_id in manager.sequences:
                manager.release_sequence(sequence_id)
        release = getattr(engine.runner, "release", None)
        if release is not None:
            release(list(ids))


def work_of(plan: StepPlan) -> StepWork:
    """What the plan computes."""
    return StepWork.of(((row.start, row.num_tokens) for row in plan.rows), len(plan.rows))


def seconds_per_step(engine: Engine, plan: StepPlan, least: float = LEAST_SECONDS) -> float:
    """Mean over as many executions as fit into `least` seconds, one at least."""
    count, begin = 0, time.perf_counter()
    while True:
        engine.runner.execute(plan)
        count += 1
        passed = time.perf_counter() - begin
        if passed >= least:
            return passed / count
