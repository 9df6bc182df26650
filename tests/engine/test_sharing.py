"""Prefix cache, waiting for a prefix, forks: what is computed once, and by whom it may be used."""

from __future__ import annotations

import pytest
from paged_stub import oracle
from stub_engine import StubEngine, alone

from minipaged.sampling_params import SamplingParams


@pytest.mark.parametrize(("length", "cached"), [(4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (13, 12), (14, 12), (17, 16)])
def test_a_fully_cached_prompt_recomputes_its_last_token(length: int, cached: int) -> None:
    """C08: at least one token is computed, no block too few is found, and the output is the same."""
    stub = StubEngine(64, 4)
    prompt = list(range(100, 100 + length))
    for number in range(3):
        stub.add(f"r{number}", prompt, max_tokens=3)
        before = stub.runner.tokens_computed
        output = stub.run()[f"r{number}"]
        assert output.num_cached_tokens == (cached if number else 0)
        assert stub.runner.tokens_computed - before == length - output.num_cached_tokens + 2
        assert stub.tokens(f"r{number}") == alone(prompt, max_tokens=3)[0]


def test_the_work_is_sized_after_the_hit_is_known() -> None:
    """C09: 11 tokens of which 8 are cached: positions 8, 9, 10; again after a preemption."""
    stub = StubEngine(16, 4)
    prefix = list(range(8))
    stub.add("prime", prefix, max_tokens=1)
    stub.run()
    stub.add("r", [*prefix, 50, 51, 52], max_tokens=4)
    stub.step()
    assert stub.last["r"].num_cached_tokens == 4 + 4
    assert stub.rows() == {1: (8, 3)}
    child = stub.engine.scheduler.running[0]
    stub.engine.scheduler.preempt(child)
    stub.step()
    assert stub.rows() == {1: (8, 4)}
    stub.run()
    assert stub.last["r"].num_cached_tokens == 8
    assert [stub.tokens("r")] == alone([*prefix, 50, 51, 52], max_tokens=4)


@pytest.mark.parametrize("budget", [4, 5, 7, 64])
def test_a_burst_of_equal_prompts_computes_the_prefix_once(budget: int) -> None:
    stub = StubEngine(64, 4, max_num_batched_tokens=budget)
    prompt = list(range(23))
    for number in range(6):
        stub.add(f"r{number}", prompt, max_tokens=2)
    stub.run()
    # the first computes 23 tokens, each other one the 3 after the last full block; all of them decode one more
    assert stub.runner.tokens_computed == 23 + 5 * 3 + 6
    assert [stub.last[f"r{number}"].num_cached_tokens for number in range(6)] == [0] + [20] * 5
    stats = stub.engine.stats()
    assert (stats.prefix_query_tokens, stats.prefix_hit_tokens) == (6 * 23, 5 * 20)


def test_a_prefix_that_is_half_computed_is_waited_for_as_well() -> None:
    stub = StubEngine(64, 4, max_num_batched_tokens=6)
    stub.add("first", list(range(24)), max_tokens=1)
    stub.step(2)
    stub.add("second", [*range(20), 99, 98], max_tokens=1)
    stub.run()
    assert stub.last["second"].num_cached_tokens == 20


@pytest.mark.parametrize("end", ["abort", "error", "preempted"])
def test_waiting_for_a_prefix_ends_when_its_provider_does(end: str) -> None:
    """The provider wants prompt log-probabilities: it takes chunks of 64 and leaves budget to others."""
    stub = StubEngine(128, 4)
    prompt = [number % 300 for number in range(200)]
    stub.add("provider", prompt, max_tokens=2, prompt_logprobs=0)
    stub.add("waiting", prompt, max_tokens=2)
    stub.step(2)
    assert stub.rows() == {0: (64, 64)}
    if end == "abort":
        stub.engine.abort("provider")
    elif end == "error":
        stub.runner.fail = lambda step: step == 2
        stub.step()
    else:
        stub.engine.scheduler.preempt(stub.engine.scheduler.running[0])
    stub.run(limit=10)
    assert [stub.tokens("waiting")] == alone(prompt, max_tokens=2)
    assert stub.last["waiting"].num_cached_tokens == (196 if end == "preempted" else 128)
    assert stub.reason("provider") == {"abort": "abort", "error": "error", "preempted": "length"}[end]
    assert stub.is_idle()


def test_only_a_request_that_waits_for_a_prefix_lets_others_pass() -> None:
    stub = StubEngine(64, 4, max_num_batched_tokens=16)
    prompt = list(range(24))
    stub.add("provider", prompt, max_tokens=2)
    stub.step()
    stub.add("waits", prompt, max_tokens=2)
    stub.add("other", [200, 201], max_tokens=2)
    stub.step()
    assert stub.rows() == {0: (16, 8), 2: (0, 2)}
    stub.step()
    assert stub.rows() == {0: (24, 1), 1: (20, 4), 2: (2, 1)}


def test_a_salt_keeps_tenants_apart() -> None:
    stub = StubEngine(64, 4)
    prompt = list(range(12))
    for number, salt in enumerate(["a", "b", None, "a"]):
        stub.add(f"r{number}", prompt, salt=salt, max_tokens=1)
        stub.run()
    assert [stub.last[f"r{number}"].num_cached_tokens for number in range(4)] == [0, 0, 0, 8]


def test_prompt_logprobs_read_nothing_from_the_cache_but_fill_it() -> None:
    """C18: an entry per prompt token, the first None, in chunks, after a preemption, and beside a warm cache."""
    stub = StubEngine(16, 4, max_num_batched_tokens=5)
    prompt = list(range(12))
    stub.add("scored", prompt, prompt_logprobs=0, max_tokens=3)
    stub.step(2)
    stub.engine.scheduler.preempt(stub.engine.scheduler.running[0])  # in the middle of the prompt
    stub.run()
    stub.add("reads", prompt, max_tokens=1)
    stub.add("scored too", prompt, prompt_logprobs=0, max_tokens=1)
    stub.run()
    for request_id in ("scored", "scored too"):
        entries = stub.last[request_id].prompt_logprobs
        assert entries[0] is None
        assert [next(iter(entry)) for entry in entries[1:]] == prompt[1:]
        assert stub.last[request_id].num_cached_tokens == 0
    assert stub.last["reads"].num_cached_tokens == 8


def test_generated_tokens_are_cached_too() -> None:
    """The second turn of a conversation finds the first one's answer."""
    stub = StubEngine(64, 4)
    stub.add("turn 1", list(range(10)), max_tokens=7)
    answer = stub.run()["turn 1"].outputs[0].token_ids
    stub.add("turn 2", [*range(10), *answer, 5, 6], max_tokens=1)
    assert stub.run()["turn 2"].num_cached_tokens == 16  # 10 + 7 - 1 tokens were in memory


def test_copy_on_write_of_the_half_filled_block() -> None:
    """C13: 6 tokens, block size 4, three children: two copies, the prompt computed once, and the prompt's blocks
    shared.
    """
    stub = StubEngine(16, 4, caching=False)
    params = {"n": 3, "temperature": 1.0, "seed": 7, "max_tokens": 5}
    stub.add("r", [1, 2, 3, 4, 5, 6], **params)
    stub.step()
    stats = stub.engine.stats()
    assert (stats.blocks_in_use, stats.blocks_shared, stats.blocks_saved) == (2, 2, 4)
    stub.step()
    assert len(stub.runner.plans[-1].block_copies) == 2
    stats = stub.engine.stats()
    assert (stats.blocks_in_use, stats.blocks_shared, stats.blocks_saved) == (4, 1, 2)
    stub.run()
    assert [child.token_ids for child in stub.last["r"].outputs] == alone([1, 2, 3, 4, 5, 6], **params)
    assert stub.runner.copies == 2
    assert stub.runner.tokens_computed == 6 + 3 * 4
    assert stub.is_idle()


def test_children_differ_repeat_and_end_on_their_own() -> None:
    """C15: indexes 0, 1, 2 once each, not all equal, the same again; a child that ends early stops nobody."""
    prompt, params = [4, 5, 6], {"n": 3, "temperature": 1.0, "seed": 7, "max_tokens": 12}
    texts = alone(prompt, **params)
    assert len({tuple(text) for text in texts}) > 1
    stop = next(token for token in texts[1][1:6] if token not in texts[0] + texts[2])
    stub = StubEngine()
    stub.add("r", prompt, stop_token_ids=[stop], **params)
    stub.run()
    again = [oracle(prompt, SamplingParams(stop_token_ids=[stop], **params), 7, index) for index in range(3)]
    assert [child.token_ids for child in stub.last["r"].outputs] == again
    assert [child.index for child in stub.last["r"].outputs] == [0, 1, 2]
    assert [child.finish_reason for child in stub.last["r"].outputs] == ["length", "stop", "length"]
    assert len(again[1]) < len(again[0]) == 12


@pytest.mark.parametrize("gone", [0, 1, 2])
def test_a_child_may_end_with_its_first_token(gone: int) -> None:
    """The leader's blocks are shared before it leaves; a sibling that is over at once never gets any."""
    prompt, params = [4, 5, 6], {"n": 3, "temperature": 1.0, "seed": 2, "max_tokens": 6}
    first = [text[0] for text in alone(prompt, **params)]
    assert len(set(first)) == 3
    stub = StubEngine()
    stub.add("r", prompt, stop_token_ids=[first[gone]], **params)
    stub.run()
    for index, child in enumerate(stub.last["r"].outputs):
        assert child.token_ids == oracle(prompt, SamplingParams(stop_token_ids=[first[gone]], **params), 2, index)
    assert len(stub.tokens("r", gone)) == 1
    assert stub.is_idle()


def test_shared_prefix_is_counted_once() -> None:
    """C06: three requests share a 2-block prefix and own a block each: at most 5 blocks in use, none at the end."""
    stub = StubEngine(16, 4)
    prefix = list(range(8))
    stub.add("prime", [*prefix, 1], max_tokens=1)
    stub.run()
    peak = 0
    for number in range(3):
        stub.add(f"r{number}", [*prefix, 100 + number], max_tokens=3)
    stub.step()
    peak = max(peak, stub.engine.stats().blocks_in_use)
    stub.engine.abort("r1")
    while stub.engine.has_unfinished():
        stub.step()
        peak = max(peak, stub.engine.stats().blocks_in_use)
    assert peak == 5
    assert stub.is_idle()


def test_twins_in_flight_keep_their_own_blocks() -> None:
    """C11: B computed the same prefix as A at the same time (it did not wait: it wants prompt log-probabilities);
    its copies stay its own until it ends, whoever takes freed blocks meanwhile."""
    stub = StubEngine(16, 4)
    prompt = list(range(9))
    stub.add("A", prompt, max_tokens=2)
    stub.add("B", prompt, max_tokens=20, prompt_logprobs=0)
    stub.step(3)
    stub.add("C", [77] * 25, max_tokens=4)
    stub.run()
    assert [stub.tokens("B")] == alone(prompt, max_tokens=20)
    assert [stub.tokens("C")] == alone([77] * 25, max_tokens=4)
    assert stub.is_idle()


def test_blocks_come_back_after_requests_finish() -> None:
    """C05: 20 different requests one after another on 8 blocks, then one that needs all of them, by evicting."""
    stub = StubEngine(8, 4)
    for number in range(20):
        stub.add(f"r{number}", [number] * 12, max_tokens=2)
        stub.run()
        assert stub.is_idle()
    stub.add("all", [99] * 30, max_tokens=3)
    assert [stub.run()["all"].outputs[0].token_ids] == alone([99] * 30, max_tokens=3)


def test_looking_a_prefix_up_again_and_again_is_not_paid_by_length() -> None:
    """A head that waits for blocks is not matched against the cache at each step."""
    stub = StubEngine(64, 4)
    stub.add("running", [1] * 100, max_tokens=100)
    stub.step()
    stub.add("head", [2] * 200, max_tokens=2)
    stub.step(2)
    calls = []
    match = stub.manager.create_sequence_from_prefix
    stub.manager.create_sequence_from_prefix = lambda *a, **k: (calls.append(1), match(*a, **k))[1]
    stub.step(30)
    assert not calls
    stub.run()
    assert stub.last["head"].finished
