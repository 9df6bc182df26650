"""What the engine asks of a runner, and what it gets back: the seam between scheduling and computing.

The plan is computed once per step and passed on; a runner (model + sampler, or a stub in tests) never decides
anything about blocks, and the engine knows nothing of model, device or sampler.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from minipaged.engine.request import Sequence
    from minipaged.outputs import Logprob


@dataclass(slots=True)
class ScheduledSequence:
    """One row of the batch: tokens `start : start + num_tokens` of `sequence.token_ids` are computed in this step."""

    sequence: Sequence
    start: int  # position of the first token to compute; everything before it is in the cache
    num_tokens: int
    slots: list[int]  # flat slot of each of these tokens
    sample_for: tuple[Sequence, ...] = ()
    """Who draws a token from the logits of the last position: nobody (a prefill chunk that is not the last), the
    sequence itself, or the n siblings that share one prefill. Their token histories are equal; seed and child index
    differ."""
    prompt_logprobs: bool = False
    """Also wants the log-probabilities of prompt tokens start + 1 : start + num_tokens + 1."""

    num_logits: int = 0
    """Logits are wanted of so many of its last tokens: one to sample from, all for prompt log-probabilities."""


@dataclass(slots=True)
class StepPlan:
    """One forward pass over a mixed batch, rows in stable order: decodes first, then chunks of prefill."""

    rows: list[ScheduledSequence]
    block_copies: list[tuple[int, int]]  # (source, destination), to be run before any write
    num_tokens: int


@dataclass(slots=True)
class SampledToken:
    """One drawn token, or the reason why none could be drawn (`error`, which fails this request only)."""

    token_id: int
    logprob: float | None = None  # of the raw distribution, only when asked for
    logprobs: dict[int, Logprob] | None = None
    error: str | None = None


@dataclass(slots=True)
class RowResult:
    """`samples` matches `ScheduledSequence.sample_for`; `prompt_logprobs` has one dict per prompt token asked for."""

    samples: list[SampledToken] = field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob]] = field(default_factory=list)


@dataclass(slots=True)
class StepResult:
    """One `RowResult` per row of the plan, in the same order."""

    rows: list[RowResult]


class Runner(Protocol):
    """Forward pass + sampling. May raise: the engine then fails this step's requests and goes on."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Run the block copies, then one forward pass, then sampling; one `RowResult` per row, in the plan's order."""
        ...

    def release(self, sequence_ids: Seq[int]) -> None:
        """These sequences are gone or preempted: drop what is kept per sequence."""
