"""Continuous batching: which tokens of which sequences the next step computes, and who waits.

One total order rules everything: `Sequence.order`. Under "fcfs" it is the arrival. Under "priority" it is

    arrival_step + priority * priority_ageing_steps

a *virtual arrival*: a request of priority p is treated as if it had come p * priority_ageing_steps steps later. That is
linear ageing (effective priority = priority - waited / ageing) written without a clock: the difference between two
requests never changes while they wait, so the order is fixed at arrival, and a request is overtaken only by those that
arrive within a known window.

    waiting                 running (hold blocks)                   finished
    sorted by order  ---->  sorted by order                  ---->
        ^    admit: head first      | preempt: last first
        +---------------------------+

Rules, in the order in which a step applies them:

1. Every running sequence with one token left to compute (a decode) gets it, oldest first.
2. Running prefills get chunks of what is left of `max_num_batched_tokens`, oldest first; one token at least, if decodes
   use it up.
3. The head of the queue is admitted when the blocks of all its known tokens, less the cached ones, and what the running
   prefills still need fit above the watermark (no watermark when nothing runs). Strict first come, first served: nobody
   passes a head that does not fit. Only a request that waits for a prefix which a running one is computing right now
   lets others pass.
4. A sequence that finds no block takes those of the last running sequence, if that is newer than itself. The newest
   waits in place instead. Blocks go back tail first, so that the prefix is still cached when the victim comes back.

Liveness. The first unfinished sequence in the order is never preempted and is the first to be admitted. While it waits,
only older ones are ahead of it, and there are none, so every running sequence is newer and finishes or is preempted by
rule 4 in its turn. Once it runs, rule 4 lets it take every block of the pool, and submission refused whatever the whole
pool cannot hold. So it computes at least one token per turn, and there are at most ceil(running /
max_num_batched_tokens) steps between turns. Induction over the order does the rest.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import TYPE_CHECKING, TypeAlias

from minipaged.engine.plan import ScheduledSequence, StepPlan
from minipaged.engine.request import Sequence, Status
from minipaged.errors import OutOfBlocksError

if TYPE_CHECKING:
    from minipaged.engine.config import EngineConfig
    from minipaged.kv import KVBlockManager

_ORDER = attrgetter("order")
Release: TypeAlias = Callable[[list[int]], None]

PROMPT_LOGPROBS_CHUNK = 64
"""Largest chunk of a prefill that wants prompt log-probabilities: its logits are float32 [chunk, vocabulary], 39 MB."""


class Scheduler:
    """Owns the queues and drives the block manager.

    sequence_ids: unused numbers. on_release: called with the numbers of sequences
    that lose their blocks.
    """

    def __init__(
        self, manager: KVBlockManager, config: EngineConfig, sequence_ids: Iterator[int], on_release: Release
    ) -> None:
        self.manager = manager
        self.max_num_seqs = config.max_num_seqs
        self.token_budget = config.max_num_batched_tokens
        self._ageing_steps = config.priority_ageing_steps if config.scheduling_policy == "priority" else 0
        self.watermark_blocks = int(manager.num_physical_blocks * config.watermark)
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self.prefix_query_tokens = 0
        self.prefix_hit_tokens = 0
        self._sequence_ids = sequence_ids
        self._on_release = on_release
        self._turn = 0
        self._rows: dict[Sequence, ScheduledSequence] = {}

    # ---- queues

    def virtual_arrival(self, priority: int, step: int) -> int:
        """First part of a new request's order; see the head of this file."""
        return step + priority * self._ageing_steps if self._ageing_steps else 0

    def reset(self) -> None:
        """Forget every sequence; the manager holds none."""
        self.waiting.clear()
        self.running.clear()

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; the leader of a request with n > 1 stands for all n until its prompt is computed."""
        sequence.status = Status.WAITING
        if sequence.keys is not None:
            sequence.keys.extend(sequence.token_ids[len(sequence.keys) :])  # what was generated before a preemption
        elif self.manager.enable_prefix_caching:
            sequence.keys = self.manager.prefix_keys(sequence.token_ids, salt=sequence.request.cache_salt)
        insort(self.waiting, sequence, key=_ORDER)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """`child` starts running with everything that `parent` has in memory, sharing its blocks."""
        self._claim_id(child)
        self.manager.fork_sequence(parent.sequence_id, child.sequence_id)
        child.num_computed = parent.num_computed
        child.status = Status.RUNNING
        insort(self.running, child, key=_ORDER)

    def _claim_id(self, sequence: Sequence) -> None:
        """Another number, if somebody who uses the manager beside the engine has taken this one."""
        while sequence.sequence_id in self.manager.sequences:
            self._on_release([sequence.sequence_id])
            sequence.sequence_id = next(self._sequence_ids)

    def remove(self, sequence: Sequence) -> None:
        """The sequence is over, in whatever state it is: take it out of its queue, give its blocks back."""
        if sequence.status is Status.RUNNING:
            self.running.remove(sequence)
        elif sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
        sequence.status = Status.FINISHED
        sequence.waits_for = None
        self._release(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Take a running sequence's blocks away; it is computed again later from its own token history."""
        self.running.remove(sequence)
        self._rows.pop(sequence, None)
        sequence.forget_computed()
        sequence.request.metrics.num_preemptions += 1
        self.num_preemptions += 1
        self.add(sequence)
        self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        if sequence.sequence_id in self.manager.sequences:
            self.manager.release_sequence(sequence.sequence_id)
        self._on_release([sequence.sequence_id])  # without blocks too: a sibling may have been sampled before its fork

    # ---- one step

    def schedule(self) -> StepPlan:
        """Decide the next step and allocate the slots of every token in it.

        Rows: those of one token first, then chunks, each by order.
        """
        self._rows = {}
        preemptions = self.num_preemptions
        decodes: list[Sequence] = []
        prefills: list[Sequence] = []
        for sequence in self.running:
            (prefills if sequence.is_prefill else decodes).append(sequence)

        for sequence in self._take_turns(decodes):
            if sequence.status is Status.RUNNING:  # not preempted by an older one a moment ago
                self._schedule_tokens(sequence, 1)
        budget = max(self.token_budget - len(self._rows), 1)
        for sequence in prefills:
            if budget == 0:
                break
            if sequence.status is Status.RUNNING:
                budget -= self._schedule_tokens(sequence, budget)
        if self.waiting and budget and self.num_preemptions == preemptions:
            self._admit(budget)

        rows = list(self._rows.values())
        if len(rows) > len(decodes):
            rows.sort(key=lambda row: row.num_tokens > 1)
        return StepPlan(rows, self.manager.take_block_copies(), sum([row.num_tokens for row in rows]))

    def _take_turns(self, decodes: list[Sequence]) -> list[Sequence]:
        """All decodes, or as many as the budget holds: those that have waited longest for their turn."""
        if len(decodes) <= self.token_budget:
            return decodes
        decodes = sorted(decodes, key=attrgetter("last_turn", "order"))[: self.token_budget]
        self._turn += 1
        for sequence in decodes:
            sequence.last_turn = self._turn
        return sorted(decodes, key=_ORDER)

    def _schedule_tokens(self, sequence: Sequence, budget: int) -> int:
        """Give `sequence` slots for its next tokens, at most `budget`; returns how many.

        0 means that there is no block, and nobody newer to take one from.
        """
        manager, number, start = self.manager, sequence.sequence_id, sequence.num_computed
        wanted = min(len(sequence.token_ids) - start, budget)
        scores_prompt = sequence.wants_prompt_logprobs
        if scores_prompt:
            wanted = min(wanted, PROMPT_LOGPROBS_CHUNK)
        while True:
            # Rather a smaller chunk than somebody else's blocks: a prefill preempts only when it cannot advance at all.
            if wanted > 1:
                block_size = manager.block_size
                wanted = max(1, min(wanted, -start % block_size + manager.num_available_blocks * block_size))
            try:
                slots = [manager.append_token(number)] if wanted == 1 else manager.append_tokens(number, wanted)
                break
            except OutOfBlocksError:
                victim = self.running[-1]
                if victim is sequence:
                    return 0
                self.preempt(victim)
        sample_for = sequence.samples_with if start + wanted == len(sequence.token_ids) else ()
        num_logits = wanted if scores_prompt else min(1, len(sample_for))
        self._rows[sequence] = ScheduledSequence(sequence, start, wanted, slots, sample_for, scores_prompt, num_logits)
        return wanted

    # ---- admission

    def _admit(self, budget: int) -> None:
        """Start waiting sequences, strictly in order, while seats, tokens and blocks last."""
        seats = self.max_num_seqs - sum([sequence.seats for sequence in self.running])
        promised = sum([self._still_needed(sequence) for sequence in self.running if sequence.is_prefill])
        position = 0
        while position < len(self.waiting) and budget > 0:
            sequence = self.waiting[position]
            if sequence.seats > seats:
                return
            if self._waits_for_prefix(sequence):
                position += 1
                continue
            if not self._start(sequence, promised):
                return
            del self.waiting[position]
            seats -= sequence.seats
            budget -= self._schedule_tokens(sequence, budget)
            promised += self._still_needed(sequence)

    def _still_needed(self, sequence: Sequence) -> int:
        """Blocks for the rest of the tokens known today, after this step's chunk: promised, not to be given away."""
        left = len(sequence.token_ids) - self.manager.sequences[sequence.sequence_id].sequence_length
        return self.manager.blocks_needed(sequence.sequence_id, left) if left > 0 else 0

    def _start(self, sequence: Sequence, promised: int) -> bool:
        """Bind the cached prefix and move `sequence` to running if the rest fits; else leave everything as it was."""
        manager, keys = self.manager, sequence.lookup_keys
        free_before = manager.num_available_blocks
        spare = free_before - (promised + self.watermark_blocks if self.running else 0)
        if self.running and spare < sequence.blocks_wanted:
            return False  # what an earlier attempt found out: the prefix is not looked up again at every step
        self._claim_id(sequence)
        if keys is not None:
            state = manager.create_sequence_from_prefix(sequence.sequence_id, keys)
        else:
            state = manager.create_sequence(sequence.sequence_id, salt=sequence.request.cache_salt)
        cached = state.sequence_length
        wanted = manager.blocks_needed(sequence.sequence_id, len(sequence.token_ids) - cached)
        wanted += free_before - manager.num_available_blocks  # what the hit woke from idleness is nobody else's either
        if wanted > spare:
            manager.release_sequence(sequence.sequence_id)
            self._on_release([sequence.sequence_id])
            sequence.blocks_wanted = wanted
            return False
        sequence.blocks_wanted = 0
        sequence.num_computed = cached
        sequence.status = Status.RUNNING
        insort(self.running, sequence, key=_ORDER)
        if sequence.request.num_cached_tokens is None:
            sequence.request.num_cached_tokens = cached
            if keys is not None:
                self.prefix_query_tokens += len(sequence.token_ids)
                self.prefix_hit_tokens += cached
        return True

    # ---- waiting for a prefix

    def _waits_for_prefix(self, sequence: Sequence) -> bool:
        """Is a running prefill about to compute this sequence's next full block? Then wait for it and share.

        The provider is looked for once; afterwards the check is O(1) until the provider has computed everything that
        both have in common, or stops running (finished, aborted, failed, preempted). The waiting one holds nothing, so
        nobody can wait for it.
        """
        if sequence.waits_for is not None:
            provider, until = sequence.waits_for
            if provider.status is Status.RUNNING and provider.num_computed < until:
                return True
            sequence.waits_for = None
        own = sequence.lookup_keys
        if own is None:
            return False
        providers = [(other, other.keys) for other in self.running if other.is_prefill and other.keys is not None]
        if not providers:
            return False
        block_size = self.manager.block_size
        usable = (len(sequence.token_ids) - 1) // block_size  # blocks: the last token is always computed
        wanted = own.fingerprints[:usable]
        cached = self.manager.match_prefix(own) // block_size
        for provider, keys in providers:
            end = shared_prefix_blocks(wanted, keys.fingerprints, cached)
            if end > cached and end * block_size > provider.num_computed:
                sequence.waits_for = (provider, end * block_size)
                return True
        return False


def shared_prefix_blocks(a: list[int], b: list[int], start: int) -> int:
    """How many leading blocks two sequences have in common, from fingerprints; `start` if block `start` differs.

    An equal fingerprint vouches for everything before it, so the beginnings are not compared again.
    """
    end, limit = start, min(len(a), len(b))
    while end < limit and a[end] == b[end]:
        end += 1
    return end
