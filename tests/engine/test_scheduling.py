"""Admission, budget, fairness, preemption, policies: which tokens run in which step."""

from __future__ import annotations

from itertools import pairwise

import pytest
from stub_engine import StubEngine, alone

from minipaged.errors import RequestTooLargeError
from minipaged.sampling_params import SamplingParams


def test_what_never_fits_is_refused_and_the_next_request_runs() -> None:
    """C03: nobody waits behind a request that can never run."""
    stub = StubEngine(50, 16)
    with pytest.raises(RequestTooLargeError, match=r"context length exceeded: 900 prompt tokens.*the pool has 50"):
        stub.add("A", [1] * 900)
    with pytest.raises(RequestTooLargeError, match="790 prompt tokens"):
        stub.add("A2", [1] * 790, max_tokens=100)
    stub.add("B", [1] * 10)
    assert len(stub.run(limit=20)["B"].outputs[0].token_ids) == 8
    assert set(stub.last) == {"B"}


def test_blocks_are_counted_without_the_last_sampled_token() -> None:
    """A pool of 4 x 4 slots serves 17 tokens: the K/V of the last one is never written. One more is refused."""
    stub = StubEngine(4, 4, max_model_len=100)
    stub.add("fits", [1] * 9, max_tokens=8)
    with pytest.raises(RequestTooLargeError, match=r"need 5 blocks of 4.*the pool has 4"):
        stub.add("larger", [1] * 9, max_tokens=9)
    assert len(stub.run()["fits"].outputs[0].token_ids) == 8


def test_max_tokens_none_means_as_many_as_fit() -> None:
    stub = StubEngine(4, 4)
    stub.add("pool", [1] * 9, max_tokens=None)
    assert len(stub.run()["pool"].outputs[0].token_ids) == 8
    stub = StubEngine(16, 4, max_model_len=20)
    stub.add("length", [1] * 9, max_tokens=None)
    assert len(stub.run()["length"].outputs[0].token_ids) == 11
    with pytest.raises(RequestTooLargeError, match="context length exceeded"):
        stub.add("full", [1] * 20, max_tokens=None)


def test_a_long_prompt_stops_no_stream() -> None:
    """C48: with 60 tokens of prompt in chunks of 8, the running stream gets a token in each of these steps."""
    stub = StubEngine(32, 4, max_num_batched_tokens=8)
    stub.add("stream", [5], max_tokens=40)
    stub.step(2)
    stub.add("long", list(range(60)), max_tokens=4)
    for expected in range(7, 57, 7):
        outputs = stub.step()
        assert [output.request_id for output in outputs] == ["stream"]
        assert stub.rows() == {0: (stub.rows()[0][0], 1), 1: (expected - 7, 7)}
    assert {output.request_id for output in stub.step()} == {"stream", "long"}


def test_decodes_that_fill_the_budget_leave_one_prefill_token_per_step() -> None:
    """C48: decode-first scheduling must let the prompt in."""
    stub = StubEngine(64, 4, max_num_batched_tokens=3, caching=False)
    for number in range(3):
        stub.add(f"decode{number}", [number], max_tokens=30)
    stub.step(2)
    stub.add("prompt", [9] * 6, max_tokens=2)
    for position in range(6):
        outputs = stub.step()
        assert stub.rows()[3] == (position, 1)
        assert len(outputs) == (3 if position < 5 else 4)
        assert stub.runner.plans[-1].num_tokens == 4


def test_more_sequences_than_budget_take_turns() -> None:
    """With one token per step, four streams advance evenly, and nobody starves."""
    stub = StubEngine(64, 4, max_num_batched_tokens=1, max_num_seqs=4, caching=False)
    for number in range(4):
        stub.add(f"r{number}", [number], max_tokens=10)
    stub.run()
    steps_of: dict[int, list[int]] = {number: [] for number in range(4)}
    for step, plan in enumerate(stub.runner.plans):
        assert plan.num_tokens <= 2
        for row in plan.rows:
            steps_of[row.sequence.sequence_id].append(step)
    for steps in steps_of.values():
        assert len(steps) == 10
        assert max(b - a for a, b in pairwise(steps)) <= 4


@pytest.mark.parametrize("later", ["small", "same size"])
def test_first_come_first_served_is_strict(later: str) -> None:
    """C16, the rule chosen: nobody passes a head that does not fit; the big one runs as soon as it does."""
    stub = StubEngine(16, 4, caching=False)
    stub.add("running", [1] * 20, max_tokens=16)  # 5 to 9 blocks
    stub.step()
    stub.add("big", [2] * 48, max_tokens=2)  # 12 blocks: has to wait
    stub.add("later", [3] * (4 if later == "small" else 48), max_tokens=2)
    while "running" not in stub.finish_order:
        stub.step()
        assert 1 not in stub.rows()
        assert 2 not in stub.rows()
    stub.step()
    assert 1 in stub.rows()
    stub.run()
    assert stub.finish_order[:2] == ["running", "big"]


def test_the_watermark_keeps_room_for_those_who_run() -> None:
    stub = StubEngine(100, 1, caching=False, watermark=0.1)
    stub.add("running", [1] * 50, max_tokens=30)
    stub.step()
    stub.add("too much", [2] * 41, max_tokens=2)
    stub.step()
    assert stub.engine.stats().running == 1
    alone_first = StubEngine(100, 1, caching=False, watermark=0.1)
    alone_first.add("all", [2] * 100, max_tokens=1)  # nothing runs: no watermark
    alone_first.step()
    assert alone_first.reason("all") == "length"


def test_promised_blocks_are_not_given_away() -> None:
    """Blocks are allocated chunk by chunk, but a second prompt does not get those that the first will need.

    (A prefill that wants prompt log-probabilities leaves a part of the budget to others, in chunks of 64.)
    """
    for steps in (1, 2):  # the second comes in the step of the first, or later
        stub = StubEngine(80, 4, caching=False)
        stub.add("first", [1] * 200, max_tokens=2, prompt_logprobs=0)
        stub.step(steps - 1)
        stub.add("second", [2] * 180, max_tokens=2)
        stub.step()
        assert stub.manager.num_available_blocks == 80 - 16 * steps  # it needs 45, and more than 30 are promised
        assert stub.engine.stats().waiting == 1
        stub.run()
        assert stub.engine.stats().preemptions == 0


def test_a_victim_that_has_its_slot_already_leaves_the_plan() -> None:
    """A prefill of high priority takes the blocks of a decode that was scheduled a moment before, in the same step."""
    stub = StubEngine(16, 1, scheduling_policy="priority", max_num_batched_tokens=2, caching=False)
    stub.add("low", [1] * 4, max_tokens=12, priority=3)
    stub.step(3)
    stub.add("high", [2] * 10, max_tokens=2)
    while stub.engine.stats().preemptions == 0:
        stub.step()
        assert 1 in stub.rows()
    assert 0 not in stub.rows()
    stub.run()
    assert [stub.tokens("low")] == alone([1] * 4, max_tokens=12)
    assert [stub.tokens("high")] == alone([2] * 10, max_tokens=2)


def test_max_num_seqs_counts_every_child_from_its_admission() -> None:
    """C49: n = 3 counts 3, also while one sequence computes the prompt for all."""
    stub = StubEngine(64, 4, max_num_seqs=4, max_num_batched_tokens=4, caching=False)
    stub.add("three", [1] * 12, n=3, max_tokens=6)
    stub.add("two", [2] * 4, n=2, max_tokens=2)
    stub.step(5)
    assert stub.engine.stats().waiting == 1
    with pytest.raises(RequestTooLargeError, match=r"n = 5 .*max_num_seqs = 4"):
        stub.add("five", [3], n=5)
    stub.run()
    assert stub.finish_order == ["three", "two"]


@pytest.mark.parametrize("block_size", [1, 3, 4])
@pytest.mark.parametrize("past", [0, 1])
@pytest.mark.parametrize("caching", [True, False])
def test_preemption_changes_nothing_but_time(block_size: int, past: int, caching: bool) -> None:
    """The newest gives its blocks up at k * bs or k * bs + 1 tokens, comes back, and its stream goes on as if nothing
    had happened.
    """
    stub = StubEngine(8, block_size, caching=caching)
    prompts = [[7] * (3 * block_size + past), [8] * (3 * block_size + past)]
    params = {"temperature": 1.0, "max_tokens": 4 * block_size}
    for number, prompt in enumerate(prompts):
        stub.add(f"r{number}", prompt, seed=number, **params)
    stub.run()
    for number, prompt in enumerate(prompts):
        assert [stub.tokens(f"r{number}")] == alone(prompt, seed=number, **params)
    assert stub.finish_order == ["r0", "r1"]
    old, new = stub.last["r0"].metrics, stub.last["r1"].metrics
    stats = stub.engine.stats()
    assert old.num_preemptions == 0
    assert new.num_preemptions == stats.preemptions >= 1
    assert new.num_recomputed_tokens == stats.recomputed_tokens
    if not caching:
        assert stats.recomputed_tokens >= 3 * block_size
        computed = 2 * (len(prompts[0]) + 4 * block_size - 1)
        assert stub.runner.tokens_computed == computed + stats.recomputed_tokens
    assert stub.is_idle()


def test_the_victim_finds_its_prefix_in_the_cache() -> None:
    """Blocks go back tail first, so that the beginning survives: recomputing costs less than the whole."""
    stub = StubEngine(10, 4)
    stub.add("old", [1] * 12, max_tokens=16)
    stub.add("new", [2] * 12, max_tokens=16)
    stub.run()
    metrics = stub.last["new"].metrics
    assert metrics.num_preemptions == 1
    assert 0 <= metrics.num_recomputed_tokens < 12


def test_forks_are_preempted_one_by_one() -> None:
    """A group that cannot run together still finishes: its newest children wait for the older ones."""
    stub = StubEngine(8, 4)
    params = {"n": 4, "temperature": 1.0, "max_tokens": 20, "seed": 3}
    stub.add("group", [1] * 10, **params)
    stub.run()
    assert [child.token_ids for child in stub.last["group"].outputs] == alone([1] * 10, **params)
    assert stub.last["group"].metrics.num_preemptions > 0
    assert stub.is_idle()


def test_liveness_bound_under_overload() -> None:
    """30 requests on a pool for about two: all finish, in order of arrival for equal sizes, within the bound of the
    scheduler's docstring.
    """
    stub = StubEngine(8, 4, max_num_seqs=8, max_num_batched_tokens=5)
    for number in range(30):
        stub.add(f"r{number}", [number] * 9, max_tokens=12)
    stub.run(limit=30 * (9 + 12) * 2)
    assert len(stub.finish_order) == 30
    place = {request_id: position for position, request_id in enumerate(stub.finish_order)}
    assert all(abs(place[f"r{number}"] - number) <= 8 for number in range(30))
    assert stub.is_idle()


def test_priority_runs_the_urgent_first_and_ages_the_others() -> None:
    """A request of priority 1 is overtaken by priority 0 only as long as these arrive within `priority_ageing_steps`
    steps.
    """
    stub = StubEngine(64, 4, max_num_seqs=1, scheduling_policy="priority", priority_ageing_steps=10, caching=False)
    stub.add("first", [1], max_tokens=2)
    stub.step()
    stub.add("low", [2], max_tokens=2, priority=1)
    number = 0
    while "low" not in stub.finish_order:
        stub.add(f"high{number}", [3], max_tokens=2)
        stub.step()
        number += 1
        assert number < 40
    overtakers = [request_id for request_id in stub.finish_order if request_id.startswith("high")]
    assert 2 <= len(overtakers) <= 10
    first_come = StubEngine(64, 4, max_num_seqs=1, caching=False)
    first_come.add("low", [2], max_tokens=2, priority=1)
    first_come.add("high", [2], max_tokens=2, priority=0)
    first_come.run()
    assert first_come.finish_order == ["low", "high"]


def test_out_of_blocks_takes_from_the_lowest_priority() -> None:
    stub = StubEngine(8, 4, scheduling_policy="priority", caching=False)
    stub.add("unimportant", [1] * 12, max_tokens=16, priority=5)
    stub.step()
    stub.add("important", [2] * 12, max_tokens=16, priority=0)
    stub.run()
    assert stub.finish_order == ["important", "unimportant"]
    assert stub.last["important"].metrics.num_preemptions == 0
    assert stub.last["unimportant"].metrics.num_preemptions > 0


def test_rows_keep_their_order() -> None:
    stub = StubEngine(64, 4)
    for number in range(5):
        stub.add(f"r{number}", [number] * (number + 1), max_tokens=10)
    stub.run()
    for plan in stub.runner.plans[1:]:
        ids = [row.sequence.sequence_id for row in plan.rows]
        assert ids == sorted(ids)


def test_blocks_held_by_somebody_else_fail_the_request_instead_of_hanging() -> None:
    stub = StubEngine(4, 4)
    held = [stub.manager.allocate_block() for _ in range(3)]
    stub.add("r", [1] * 8, max_tokens=2)
    stub.run(limit=3)
    assert stub.reason("r") == "error"
    assert "something else holds blocks" in stub.last["r"].outputs[0].error
    for block in held:
        stub.manager.free_block(block)
    stub.add("again", [1] * 8, max_tokens=2)
    assert stub.run()["again"].outputs[0].finish_reason == "length"


def test_greedy_siblings_are_equal() -> None:
    """C15, the policy chosen: n greedy texts are n equal texts."""
    stub = StubEngine()
    stub.engine.add_request("r", [1, 2, 3], SamplingParams(n=3, temperature=0.0, max_tokens=5))
    outputs = stub.run()["r"].outputs
    assert [child.index for child in outputs] == [0, 1, 2]
    assert outputs[0].token_ids == outputs[1].token_ids == outputs[2].token_ids
