"""A request and its sequences: everything the engine keeps beside the K/V."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from minipaged.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from minipaged.text.detokenizer import ChatText, Detokenizer, name_tokens

if TYPE_CHECKING:
    from minipaged.engine.plan import RowResult, SampledToken, ScheduledSequence
    from minipaged.kv import PrefixKeys
    from minipaged.outputs import FinishReason
    from minipaged.sampling_params import SamplingParams
    from minipaged.text.tokenizer import Tokenizer


class Status(Enum):
    """WAITING holds no block, RUNNING does, FINISHED is in no queue. NEW is not in one yet, as a sibling whose leader
    still computes the prompt.
    """

    NEW = 0
    WAITING = 1
    RUNNING = 2
    FINISHED = 3


@dataclass(slots=True, eq=False)
class Sequence:
    """One token stream of a request: prompt tokens, then generated ones. The block manager knows it by `sequence_id`.

    The first six fields are all that a runner or a sampler needs; the rest is the scheduler's, and what `Request` gives
    to its own sequences.
    """

    sequence_id: int  # unique in the manager while it holds blocks, never reused by the engine
    index: int  # which of the n
    token_ids: list[int]  # prompt, then generated tokens; only ever appended to
    num_prompt_tokens: int
    params: SamplingParams  # resolved: no field that means "the model's default" is left None
    seed: int  # of the request; the sampler mixes in `index` and the position
    order: tuple[int, int, int] = (0, 0, 0)
    """Place in the scheduler's total order: (virtual arrival, serial of the request, index)."""
    status: Status = Status.NEW
    samples_with: tuple[Sequence, ...] = ()
    """Who draws from this sequence's logits: itself, or, for the leader of n siblings until the prompt is computed, all
    n. Nobody, as long as it is one of the others.
    """
    num_computed: int = 0  # tokens whose K/V is in the cache (0 again after a preemption)
    computed_before: int = 0  # tokens computed before the last preemption: computing them again is waste, and counted
    # (running sequence, number of computed tokens at which its prefix can be shared)
    waits_for: tuple[Sequence, int] | None = None
    blocks_wanted: int = 0  # what an admission attempt that failed would have needed
    keys: PrefixKeys | None = None  # its tokens as keys of the prefix index, from the first time it waits
    last_turn: int = 0  # when it last had its turn, if there are more running sequences than tokens per step
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    request: Request = field(init=False, repr=False)
    detokenizer: Detokenizer = field(init=False, repr=False)  # its text, and the check of everything that ends it

    @property
    def num_generated(self) -> int:
        """Tokens after the prompt."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def edits_logits(self) -> bool:
        """Whether its next token is drawn from changed logits."""
        return self.params.edits_logits or self.num_generated < self.params.min_tokens

    @property
    def seats(self) -> int:
        """How many of `max_num_seqs` it takes: the siblings that will be forked from it count from the start."""
        return len(self.samples_with)

    @property
    def is_prefill(self) -> bool:
        """Part of the prompt, or more than one token, is left to compute: everything else is a decode."""
        computed = self.num_computed
        return computed < self.num_prompt_tokens or len(self.token_ids) - computed > 1

    @property
    def lookup_keys(self) -> PrefixKeys | None:
        """`keys` if a cached prefix may replace computing."""
        return None if self.wants_prompt_logprobs else self.keys

    @property
    def wants_prompt_logprobs(self) -> bool:
        """They are asked for and not complete: every position of the prompt has to go through the model."""
        collected = self.request.prompt_logprobs
        return collected is not None and self.index == 0 and len(collected) < self.num_prompt_tokens

    def forget_computed(self) -> None:
        """Its blocks are gone: start again at the first token, whatever the prefix cache still holds then."""
        self.computed_before = max(self.computed_before, self.num_computed)
        self.num_computed = self.blocks_wanted = 0
        if self.wants_prompt_logprobs:
            self.request.prompt_logprobs = [None]

    def append(self, sample: SampledToken) -> None:
        """Take a drawn token, and see whether it ends the text."""
        self.token_ids.append(sample.token_id)
        if self.logprobs is not None:
            self.logprobs.append(self.request.with_text(sample.logprobs or {}))
            self.cumulative_logprob = (self.cumulative_logprob or 0.0) + (sample.logprob or 0.0)
        _, self.finish_reason, self.stop_reason = self.detokenizer.append(sample.token_id)
        if self.finish_reason is not None:
            self.request.num_unfinished -= 1

    def finish(self, reason: FinishReason, error: str | None) -> None:
        """The text ends for a reason that is not in its tokens.

        What was held back of it (half a character, the beginning of a stop string) is let go on an abort. After an
        error it is not: the tokenizer may be what failed.
        """
        self.finish_reason, self.error = reason, error
        self.request.num_unfinished -= 1
        if reason != "error":
            self.detokenizer.finish()

    def output(self) -> CompletionOutput:
        """A snapshot, cumulative. Lists are copied, one memcpy each: what a caller holds never changes."""
        return CompletionOutput(
            index=self.index,
            text=self.detokenizer.text,
            token_ids=self.token_ids[self.num_prompt_tokens :],
            cumulative_logprob=self.cumulative_logprob,
            logprobs=None if self.logprobs is None else self.logprobs[:],
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            error=self.error,
        )


@dataclass(slots=True, eq=False)
class Request:
    """A prompt and its n sequences, one for each of `sequence_ids`, of which the first computes the prompt for all.

    prompt: its text, None if it came as token ids. order: (virtual arrival, serial number).
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    sequence_ids: Iterable[int]
    order: tuple[int, int]
    tokenizer: Tokenizer | None
    cache_salt: str | None
    metrics: RequestMetrics
    chat: ChatText | None = None
    sequences: tuple[Sequence, ...] = field(init=False)
    num_unfinished: int = field(init=False)
    prompt_logprobs: list[dict[int, Logprob] | None] | None = field(init=False)
    num_cached_tokens: int | None = None
    aborted: bool = False  # it is to be ended

    def __post_init__(self) -> None:
        params, prompt = self.params, self.prompt_token_ids
        self.num_unfinished = params.n
        self.prompt_logprobs = None if params.prompt_logprobs is None else [None]
        self.sequences = tuple(
            Sequence(sequence_id, index, list(prompt), len(prompt), params, self.seed, (*self.order, index))
            for index, sequence_id in enumerate(self.sequence_ids)
        )
        for sequence in self.sequences:
            sequence.request = self
            sequence.detokenizer = self.new_text()
            sequence.logprobs = None if params.logprobs is None else []
        self.sequences[0].samples_with = self.sequences

    @property
    def finished(self) -> bool:
        """Whether every sequence is over."""
        return self.num_unfinished == 0

    def advance(self, row: ScheduledSequence, result: RowResult) -> list[tuple[Sequence, Sequence]]:
        """Give each sequence in `row.sample_for` its token; returns who is to be forked from whom, (parent, child),
        before anybody leaves.

        The one place where the shape of a group changes: n siblings leave the nest when their prompt is computed.
        """
        leader, siblings = row.sequence, row.sample_for
        for sequence, sample in zip(siblings, result.samples, strict=True):
            sequence.append(sample)
        if len(siblings) == 1:
            return []
        for sequence in siblings:
            sequence.samples_with = (sequence,)
        return [(leader, child) for child in siblings if child is not leader and child.finish_reason is None]

    def add_prompt_logprobs(self, entries: list[dict[int, Logprob]]) -> None:
        """Append what a chunk of prefill gave; the first prompt token has none."""
        if self.prompt_logprobs is not None:
            self.prompt_logprobs += [self.with_text(entry) for entry in entries]

    def new_text(self) -> Detokenizer:
        """The text of a sequence that has none yet."""
        return Detokenizer(self.params, self.tokenizer, self.chat)

    def with_text(self, entry: dict[int, Logprob]) -> dict[int, Logprob]:
        """Fill in what each token reads like."""
        name_tokens(entry, self.tokenizer)
        return entry

    def output(self) -> RequestOutput:
        """A snapshot of the whole request."""
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            prompt_logprobs=None if self.prompt_logprobs is None else self.prompt_logprobs[:],
            outputs=[sequence.output() for sequence in self.sequences],
            finished=self.finished,
            num_cached_tokens=self.num_cached_tokens,
            metrics=self.metrics.snapshot(),
        )
