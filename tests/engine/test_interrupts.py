"""D19, D21: Ctrl-C anywhere in the engine's work. What runs is computed again, what comes next is right, nothing is
lost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from interrupting import interrupted, places
from llm_rig import GREEDY, is_idle, load
from stub_engine import StubEngine, alone

from minipaged import LLM, RequestOutput, SamplingParams

PROMPT = [5, 6, 7, 8, 9]
REQUESTS: dict[str, tuple[list[int], dict[str, Any]]] = {
    "greedy": (PROMPT, {"max_tokens": 7}),
    "two": ([1, 2, 3], {"n": 2, "temperature": 1.0, "seed": 3, "max_tokens": 6}),
    "hit": ([*PROMPT, 1, 2, 3], {"max_tokens": 5, "prompt_logprobs": None}),
}


def busy_stub(steps: int) -> StubEngine:
    """Three requests on a pool so small that they preempt each other, after so many steps; one more is to end."""
    stub = StubEngine(6, 4, max_num_batched_tokens=8)
    stub.add("before", PROMPT, max_tokens=1)
    stub.run()
    for name, (prompt, params) in REQUESTS.items():
        stub.add(name, prompt, **params)
    stub.add("victim", [9, 9], max_tokens=8)
    stub.step(steps)
    stub.engine.abort("victim")
    return stub


THOROUGH = pytest.mark.parametrize("thorough", [False, pytest.param(True, marks=pytest.mark.slow)])


@THOROUGH
@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5, 7])
def test_a_step_that_is_cut_short_anywhere(steps: int, thorough: bool) -> None:
    expected = {name: alone(prompt, **params) for name, (prompt, params) in REQUESTS.items()}
    count = places(busy_stub(steps).step)
    assert count > 100
    for at in range(1, count + 1, 1 if thorough else 5):
        stub = busy_stub(steps)
        live = dict(stub.engine._live)  # an output that the engine was about to return is lost
        assert interrupted(stub.step, at)
        stub.run()
        for name in REQUESTS.keys() & live.keys():
            assert [child.token_ids for child in live[name].output().outputs] == expected[name], at
        assert [child.finish_reason for child in live["victim"].output().outputs] == ["abort"], at
        assert stub.is_idle(), at
        stub.add("again", PROMPT, max_tokens=7)
        stub.run()
        assert [stub.tokens("again")] == expected["greedy"]


def test_this_happens_under_preemption() -> None:
    stub = busy_stub(5)
    stub.run()
    assert stub.engine.stats().preemptions > 0
    assert stub.engine.stats().prefix_hit_tokens > 0


@pytest.mark.parametrize("call", ["drop", "drop_all"])
def test_ending_requests_may_be_cut_short_as_well(call: str) -> None:
    def end(stub: StubEngine) -> None:
        if call == "drop_all":
            stub.engine.drop_all()
        else:
            stub.engine.drop(stub.engine._live["two"])

    first = busy_stub(4)
    count = places(lambda: end(first))
    for at in range(1, count):
        stub = busy_stub(4)
        two = stub.engine._live["two"]
        assert interrupted(lambda stub=stub: end(stub), at)  # type: ignore[misc]
        end(stub) if "two" in stub.engine._live else None
        assert two.finished
        stub.run()
        assert {child.finish_reason for child in two.output().outputs} == {"abort"}
        if call == "drop":
            assert [stub.tokens("greedy")] == alone(PROMPT, max_tokens=7)
        assert stub.is_idle(), at


def test_an_error_of_the_engines_own_is_repaired_too() -> None:
    """A caller who releases the engine's own sequence: that step raises, and the next one starts from the tokens."""
    stub = busy_stub(4)
    stub.manager.release_sequence(stub.engine.scheduler.running[0].sequence_id)
    with pytest.raises(KeyError):
        stub.run()
    stub.run()
    for name, (prompt, params) in REQUESTS.items():
        assert [child.token_ids for child in stub.last[name].outputs] == alone(prompt, **params)
    assert stub.is_idle()


def test_a_text_that_cannot_be_made_again_ends_its_own_request() -> None:
    class Tokenizer:
        is_byte_level, fails = True, False
        special_ids: frozenset[int] = frozenset()

        def id_to_bytes(self, token_id: int) -> bytes:
            if self.fails and token_id == first:
                raise LookupError("no such token")
            return b"x"

    first = alone([1, 2], max_tokens=1)[0][0]
    stub = StubEngine(tokenizer=Tokenizer())
    stub.add("bad", [1, 2], n=2, max_tokens=6)
    stub.add("good", [3, 4], max_tokens=6, detokenize=False)
    stub.step(2)
    stub.runner.on_execute = lambda plan: (_ for _ in ()).throw(KeyboardInterrupt)
    Tokenizer.fails = True
    with pytest.raises(KeyboardInterrupt):
        stub.step()
    stub.runner.on_execute = None
    stub.run()
    assert [child.error for child in stub.last["bad"].outputs] == ["LookupError: no such token"] * 2
    assert [stub.tokens("good")] == alone([3, 4], max_tokens=6)
    assert stub.is_idle()


# ---- the real model

DEMO = [  # text, stop strings, log-probabilities, penalties: everything that is derived from tokens
    ("ROMEO: Good", SamplingParams(temperature=0.0, max_tokens=9, logprobs=2, prompt_logprobs=0)),
    ("JULIET:", SamplingParams(n=2, seed=1, max_tokens=8, presence_penalty=1.0, logprobs=0, stop=["qzq"])),
    ("ROMEO: Good morrow", SamplingParams(temperature=0.0, max_tokens=7)),
]


def what(outputs: list[RequestOutput]) -> list[object]:
    """Everything but times and counters."""
    return [(o.prompt_logprobs, o.outputs) for o in outputs]


def run(llm: LLM) -> list[RequestOutput]:
    return llm.generate([prompt for prompt, _ in DEMO], [params for _, params in DEMO], use_tqdm=False)


@pytest.fixture(scope="module")
def demo() -> Any:
    with LLM(num_blocks=8, block_size=4, max_num_batched_tokens=9, check_invariants=True, max_model_len=32) as llm:
        yield llm


@THOROUGH
def test_generate_may_be_cut_short_anywhere(demo: LLM, thorough: bool) -> None:
    """Submitting, steps, giving back: the next generate gives a fresh engine's outputs."""
    expected = what(run(demo))
    total = places(lambda: run(demo))
    assert total > 2000
    for at in range(1, total + 1, total // (500 if thorough else 40)):
        demo.engine.block_manager.reset_prefix_cache()
        interrupted(lambda: run(demo), at)
        assert what(run(demo)) == expected, at
        assert is_idle(demo), at


@THOROUGH
def test_what_runs_in_another_thread_is_not_harmed(demo: LLM, thorough: bool) -> None:
    """The engine is stepped for others as well: their texts, log-probabilities and lengths are as ever."""
    expected = what(run(demo))
    engine = demo.engine

    def start(steps: int) -> dict[str, RequestOutput]:
        last: dict[str, RequestOutput] = {}
        for number, (prompt, params) in enumerate(DEMO):
            engine.add_request(str(number), prompt, params)
        for _ in range(steps):
            last.update({output.request_id: output for output in engine.step()})
        return last

    def finish(last: dict[str, RequestOutput]) -> list[object]:
        while engine.has_unfinished():
            last.update({output.request_id: output for output in engine.step()})
        return what([last[str(number)] for number in range(len(DEMO))])

    assert finish(start(0)) == expected
    for steps in (1, 4, 7, 9):
        last = start(steps)
        total = places(engine.step)
        finish(last)
        for at in range(1, total + 1, total // (300 if thorough else 10)):
            last = start(steps)
            assert interrupted(engine.step, at)
            assert finish(last) == expected, (steps, at)
            assert is_idle(demo)
    assert engine.stats().preemptions > 0


def test_a_required_listener_that_fails_harms_nobody_for_long(tiny_folder: Path) -> None:
    with load(tiny_folder) as llm:
        wanted = llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].outputs[0].token_ids
        mirror = llm.loaded.events.required
        for fail_at in range(1, 6):
            left = fail_at

            def failing(event: Any) -> None:
                nonlocal left
                left -= 1
                if left == 0:
                    raise MemoryError("no room for the mirror")
                mirror(event)

            llm.engine.block_manager.reset_prefix_cache()
            llm.loaded.events.required = failing
            params = replace(GREEDY, max_tokens=20)
            try:
                llm.generate([PROMPT, [1, 2, 3]], params, use_tqdm=False)
            except MemoryError:
                assert left <= 0
            llm.loaded.events.required = mirror
            assert llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].outputs[0].token_ids == wanted
            assert is_idle(llm)
