"""How requests begin and end: validation, abort in every state, failures, other threads, Ctrl-C."""

from __future__ import annotations

import threading
from dataclasses import fields

import pytest
from stub_engine import StubEngine, alone

from minipaged.engine.config import EngineConfig
from minipaged.engine.engine import Engine
from minipaged.engine.plan import RowResult, SampledToken, StepPlan, StepResult
from minipaged.engine.request import Sequence
from minipaged.kv import KVBlockManager
from minipaged.outputs import RequestMetrics
from minipaged.sampling_params import SamplingParams


def make_busy(state: str) -> StubEngine:
    """An engine in which "victim" is in the given state, beside a "neighbour" that is decoding."""
    stub = StubEngine(16, 4, max_num_batched_tokens=6, max_num_seqs=3)
    stub.add("neighbour", [1, 2, 3], max_tokens=20)
    stub.step()
    if state == "waiting":
        stub.add("filler", [9] * 4, n=2, max_tokens=12)
        stub.step()
    stub.add("victim", list(range(30)) if state == "mid-prefill" else [5, 6, 7, 8], max_tokens=16)
    if state == "queued":
        return stub
    stub.step(3)
    victim = stub.engine._live["victim"].sequences[0]
    if state == "preempted":
        stub.engine.scheduler.preempt(victim)
    elif state == "finished":
        while "victim" not in stub.finish_order:
            stub.step()
    expected = {"waiting": "WAITING", "preempted": "WAITING", "finished": "FINISHED"}.get(state, "RUNNING")
    assert victim.status.name == expected
    assert (state == "mid-prefill") == (0 < victim.num_computed < victim.num_prompt_tokens)
    return stub


@pytest.mark.parametrize("state", ["queued", "waiting", "mid-prefill", "running", "preempted", "finished"])
@pytest.mark.parametrize("times", [1, 2])
def test_abort_in_every_state(state: str, times: int) -> None:
    """C10: no exception, reason "abort" in the next step, blocks back, the neighbour's tokens as ever."""
    stub = make_busy(state)
    already = stub.last.get("victim")
    for _ in range(times):
        stub.engine.abort("victim")
    outputs = {output.request_id: output for output in stub.step()}
    if state == "finished":
        assert "victim" not in outputs
        assert stub.last["victim"] is already
    else:
        assert outputs["victim"].finished
        assert outputs["victim"].outputs[0].finish_reason == "abort"
        assert outputs["victim"].metrics.finished_time is not None
    stub.run()
    assert [stub.tokens("neighbour")] == alone([1, 2, 3], max_tokens=20)
    assert stub.finish_order.count("victim") == 1
    assert stub.is_idle()


def test_abort_of_unknown_ids_is_not_remembered() -> None:
    stub = StubEngine()
    stub.engine.abort("later")
    stub.add("later", [1, 2], max_tokens=3)
    stub.run()
    stub.engine.abort("later")
    assert stub.reason("later") == "length"
    assert stub.engine.step() == []
    assert not stub.engine.has_unfinished()


def test_abort_ends_all_children_but_keeps_what_they_had() -> None:
    stub = StubEngine()
    stub.add("r", [1, 2, 3], n=3, temperature=1.0, max_tokens=12, stop_token_ids=[])
    stub.step(3)
    stub.engine.abort("r")
    stub.step()
    assert [len(child.token_ids) for child in stub.last["r"].outputs] == [3, 3, 3]
    assert {child.finish_reason for child in stub.last["r"].outputs} == {"abort"}
    assert stub.is_idle()


def test_abort_from_another_thread_while_a_step_runs() -> None:
    """C10: it takes effect at the next step."""
    stub = StubEngine()
    entered, leave = threading.Event(), threading.Event()
    stub.add("victim", [1, 2], max_tokens=10)
    stub.add("neighbour", [3, 4], max_tokens=4)

    def hold(plan: StepPlan) -> None:
        if stub.runner.steps == 2:
            entered.set()
            assert leave.wait(10)

    def other() -> None:
        assert entered.wait(10)
        stub.engine.abort("victim")
        stub.engine.add_request("late", [5, 6], SamplingParams(temperature=0.0, max_tokens=2))
        leave.set()

    stub.runner.on_execute = hold
    thread = threading.Thread(target=other)
    thread.start()
    stub.run()
    thread.join()
    assert stub.reason("victim") == "abort"
    assert len(stub.tokens("victim")) == 2
    assert [stub.tokens("neighbour")] == alone([3, 4], max_tokens=4)
    assert [stub.tokens("late")] == alone([5, 6], max_tokens=2)


def test_many_threads_add_and_abort() -> None:
    stub = StubEngine(64, 4)
    start = threading.Barrier(5)

    def client(number: int) -> None:
        start.wait()
        for i in range(20):
            stub.add(f"{number}-{i}", [number, i, 3], max_tokens=5)
            if i % 3 == 0:
                stub.engine.abort(f"{number}-{i}")

    threads = [threading.Thread(target=client, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    start.wait()
    while any(thread.is_alive() for thread in threads) or stub.engine.has_unfinished():
        stub.step()
    assert len(stub.finish_order) == len(set(stub.finish_order)) == 80
    for number in range(4):
        for i in range(20):
            if stub.reason(f"{number}-{i}") == "length":
                assert [stub.tokens(f"{number}-{i}")] == alone([number, i, 3], max_tokens=5)
    assert stub.is_idle()


def test_an_exception_in_the_forward_pass_fails_that_steps_requests_only() -> None:
    """Their blocks are freed, their new blocks are not findable (the pass left rubbish in them), and the engine goes
    on.
    """
    stub = StubEngine(32, 4, max_num_seqs=2)
    stub.add("a", list(range(10)), max_tokens=4)
    stub.add("b", [7, 7, 7], max_tokens=4)
    stub.add("waiting", [8, 8], max_tokens=4)
    stub.runner.fail = lambda step: step == 0
    outputs = stub.step()
    assert {output.request_id for output in outputs} == {"a", "b"}
    for output in outputs:
        assert output.outputs[0].finish_reason == "error"
        assert output.outputs[0].error == "RuntimeError: injected"
        assert output.outputs[0].token_ids == []
    assert stub.engine.stats().blocks_idle == 0
    stub.add("a", list(range(10)), max_tokens=4)
    stub.run()
    assert stub.last["a"].num_cached_tokens == 0
    assert [stub.tokens("a")] == alone(list(range(10)), max_tokens=4)
    assert [stub.tokens("waiting")] == alone([8, 8], max_tokens=4)
    assert stub.is_idle()


def test_a_row_without_a_token_fails_its_own_request_only() -> None:
    stub = StubEngine()
    stub.add("bad", [1, 2, 3, 4, 5], n=2, temperature=1.0, max_tokens=6)
    stub.add("good", [4, 5], max_tokens=6)
    stub.runner.bad_row = lambda step, sequence_id: step == 2 and sequence_id == 1
    stub.run()
    assert [child.finish_reason for child in stub.last["bad"].outputs] == ["error", "error"]
    assert stub.last["bad"].outputs[0].error == "injected NaN"
    assert [stub.tokens("good")] == alone([4, 5], max_tokens=6)
    assert stub.is_idle()


def test_what_a_failed_row_computed_is_not_findable() -> None:
    stub = StubEngine()
    stub.runner.bad_row = lambda step, sequence_id: step == 0
    stub.add("bad", list(range(9)), max_tokens=6)
    assert stub.run()["bad"].outputs[0].error == "injected NaN"
    stub.add("again", list(range(9)), max_tokens=6)
    assert stub.run()["again"].num_cached_tokens == 0


def test_a_runner_that_answers_nonsense_fails_the_step() -> None:
    class Short:
        def execute(self, plan: StepPlan) -> StepResult:
            return StepResult([])

    engine = Engine(Short(), KVBlockManager(8, 4), EngineConfig())
    engine.add_request("r", [1], SamplingParams())
    (output,) = engine.step()
    assert output.outputs[0].error == "RuntimeError: the runner returned 0 results for 1 rows"


def test_the_smallest_runner_is_one_method() -> None:
    """The contract's `Runner` has `execute` and nothing else."""

    class Counting:
        def execute(self, plan: StepPlan) -> StepResult:
            return StepResult(
                [RowResult([SampledToken(len(s.token_ids)) for s in row.sample_for]) for row in plan.rows]
            )

    engine = Engine(Counting(), KVBlockManager(8, 4), EngineConfig())
    engine.add_request("r", [1, 2], SamplingParams(max_tokens=3))
    while engine.has_unfinished():
        (output,) = engine.step()
    assert output.outputs[0].token_ids == [2, 3, 4]
    assert engine.batch_invariant is False


def test_an_error_in_one_requests_text_fails_that_request() -> None:
    class Tokenizer:
        is_byte_level = True
        special_ids: frozenset[int] = frozenset()

        def id_to_bytes(self, token_id: int) -> bytes:
            raise LookupError("no such token")

    stub = StubEngine(tokenizer=Tokenizer())
    stub.add("bad", [1, 2], n=3, max_tokens=3)
    stub.add("good", [3, 4], max_tokens=3, detokenize=False)
    stub.run()
    assert stub.last["bad"].outputs[0].error == "LookupError: no such token"
    assert [stub.tokens("good")] == alone([3, 4], max_tokens=3)
    assert stub.is_idle()


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_an_error_in_one_childs_text_leaves_nothing_of_its_siblings(bad: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the siblings have just ended with the same step."""
    append = Sequence.append

    def fail(self: Sequence, sample: SampledToken) -> None:
        if self.index == bad and self.request.request_id == "bad":
            raise LookupError("no such token")
        append(self, sample)

    monkeypatch.setattr(Sequence, "append", fail)
    for max_tokens in (1, 5):
        stub = StubEngine()
        stub.add("bad", [1, 2, 3], n=3, max_tokens=max_tokens)
        stub.add("good", [3, 4], max_tokens=3)
        stub.run()
        assert stub.reason("bad", bad) == "error"
        assert [stub.tokens("good")] == alone([3, 4], max_tokens=3)
        assert stub.is_idle()


def test_ctrl_c_in_a_step_leaves_an_engine_that_can_go_on() -> None:
    """KeyboardInterrupt passes through; running sequences start again from their tokens, and nothing is lost."""
    stub = StubEngine()

    def interrupt(plan: StepPlan) -> None:
        if stub.runner.steps == 4:
            raise KeyboardInterrupt

    stub.runner.on_execute = interrupt
    stub.add("a", [1, 2, 3, 4, 5], max_tokens=8)
    stub.add("b", [6, 7], n=2, temperature=1.0, max_tokens=8)
    with pytest.raises(KeyboardInterrupt):
        stub.run()
    stub.run()
    assert [stub.tokens("a")] == alone([1, 2, 3, 4, 5], max_tokens=8)
    assert [child.token_ids for child in stub.last["b"].outputs] == alone([6, 7], n=2, temperature=1.0, max_tokens=8)
    assert stub.is_idle()


def test_outputs_never_change_after_they_were_given() -> None:
    stub = StubEngine()
    stub.add("r", [1, 2], max_tokens=6)
    given = []
    while stub.engine.has_unfinished():
        given += stub.step()
    assert [len(output.outputs[0].token_ids) for output in given] == [1, 2, 3, 4, 5, 6]
    assert [output.finished for output in given] == [False] * 5 + [True]
    assert [output.metrics.finished_time is None for output in given] == [True] * 5 + [False]


def test_a_snapshot_of_the_metrics_has_every_field() -> None:
    names = [field.name for field in fields(RequestMetrics)]
    metrics = RequestMetrics(**{name: number for number, name in enumerate(names)})
    assert metrics.snapshot() == metrics
    assert metrics.snapshot() is not metrics


def test_metrics_follow_the_clock() -> None:
    times = iter(range(1000))
    stub = StubEngine(clock=lambda: float(next(times)), max_num_batched_tokens=4)
    stub.add("r", [1] * 10, max_tokens=3)
    metrics = stub.run()["r"].metrics
    moments = [metrics.arrival_time, metrics.first_scheduled_time, metrics.first_token_time, metrics.finished_time]
    assert moments == sorted(moments)
    assert len(set(moments)) == 4


def test_length_and_stop_reasons() -> None:
    tokens = alone([1, 2, 3], max_tokens=6)[0]
    stub = StubEngine()
    stub.add("stop", [1, 2, 3], max_tokens=6, stop_token_ids=[tokens[2]])
    stub.add("length", [1, 2, 3], max_tokens=6)
    stub.run()
    assert (stub.reason("stop"), stub.last["stop"].outputs[0].stop_reason) == ("stop", tokens[2])
    assert stub.tokens("stop") == tokens[:3]
    assert (stub.reason("length"), stub.last["length"].outputs[0].stop_reason) == ("length", None)


def test_random_requests_without_a_seed_differ_and_engines_repeat() -> None:
    texts = []
    for _ in range(2):
        stub = StubEngine(seed=5)
        for number in range(3):
            stub.add(f"r{number}", [1, 2], temperature=1.0, seed=None)
        stub.run()
        texts.append([tuple(stub.tokens(f"r{number}")) for number in range(3)])
    assert texts[0] == texts[1]
    assert len(set(texts[0])) == 3
