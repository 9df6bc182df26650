"""D21: real SIGINTs, and several threads, on one `LLM`."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from llm_rig import GREEDY, is_idle, load

from minipaged import LLM, SamplingParams
from minipaged.llm.interrupts import Interrupts

CHILD = Path(__file__).with_name("sigint_child.py")


def many_interrupts(folder: Path, count: int) -> None:
    """In a process of its own, because a late signal would end the test run."""
    done = subprocess.run(
        [sys.executable, str(CHILD), str(folder), str(count)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["interrupts"] >= count
    assert report["wrong"] == []
    assert report["repairs"] > 0  # second ones that did cut a step short


def test_hundreds_of_interrupts(tiny_folder: Path) -> None:
    many_interrupts(tiny_folder, 200)


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_ten_thousand_interrupts(tiny_folder: Path) -> None:
    many_interrupts(tiny_folder, 10_000)


# ---- what holds a SIGINT back


@pytest.fixture
def handler() -> Iterator[list[int]]:
    """A handler that only counts."""
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda signum, frame: seen.append(signum))
    yield seen
    signal.signal(signal.SIGINT, before)


def test_the_first_waits_and_the_second_does_not(handler: list[int]) -> None:
    mine = signal.getsignal(signal.SIGINT)
    with Interrupts() as interrupts:
        signal.raise_signal(signal.SIGINT)
        assert handler == []
        interrupts.deliver()
        assert len(handler) == 1
        interrupts.deliver()
        signal.raise_signal(signal.SIGINT)
        assert len(handler) == 1
        signal.raise_signal(signal.SIGINT)
        assert len(handler) == 2
    assert len(handler) == 3
    assert signal.getsignal(signal.SIGINT) is mine


def test_the_usual_handler_raises() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    done: list[int] = []

    def press(times: int) -> None:
        with Interrupts():
            for number in range(times):
                signal.raise_signal(signal.SIGINT)
                done.append(number)

    try:
        with pytest.raises(KeyboardInterrupt):
            press(1)
        assert done == [0]
        with pytest.raises(KeyboardInterrupt):
            press(2)
        assert done == [0, 0]
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_one_inside_another(handler: list[int]) -> None:
    with Interrupts() as outer:
        with Interrupts():
            signal.raise_signal(signal.SIGINT)
        assert handler == []
        outer.deliver()
        assert len(handler) == 1


@pytest.mark.parametrize("other", [signal.SIG_IGN, signal.SIG_DFL])
def test_what_is_no_python_handler_stays(other: signal.Handlers) -> None:
    before = signal.signal(signal.SIGINT, other)
    try:
        with Interrupts():
            assert signal.getsignal(signal.SIGINT) == other
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_handler_that_is_set_inside_stays(handler: list[int]) -> None:
    def new(signum: int, frame: FrameType | None) -> None:
        handler.append(0)

    with Interrupts():
        signal.signal(signal.SIGINT, new)
    assert signal.getsignal(signal.SIGINT) is new


def test_other_threads_leave_the_handler_alone(handler: list[int]) -> None:
    mine, seen = signal.getsignal(signal.SIGINT), []

    def other() -> None:
        with Interrupts():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert seen == [mine]


def test_ctrl_c_in_a_forward_pass_lets_it_end(tiny_folder: Path) -> None:
    """The step is not cut short: nothing is computed again, and other requests keep their blocks."""
    with load(tiny_folder) as llm:
        execute = llm.engine.runner.execute

        def pressed(plan: Any) -> Any:
            if llm.engine.num_steps == 3:
                signal.raise_signal(signal.SIGINT)
            return execute(plan)

        stream = llm.stream([7, 8, 9], GREEDY)
        tokens = [*next(stream).outputs[0].token_ids]
        llm.engine.runner.execute = pressed  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            llm.generate([1, 2, 3], GREEDY, use_tqdm=False)
        assert llm.engine.num_steps == 4
        tokens += [token for output in stream for token in output.outputs[0].token_ids]
        assert llm.engine.stats().recomputed_tokens == 0
        assert tokens == llm.generate([7, 8, 9], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
        assert is_idle(llm)


# ---- several threads


def generate(llm: LLM, prompt: list[int], params: SamplingParams) -> list[list[int]]:
    [output] = llm.generate(prompt, params, use_tqdm=False)
    return [completion.token_ids for completion in output.outputs]


def stream(llm: LLM, prompt: list[int], params: SamplingParams) -> list[list[int]]:
    tokens: list[list[int]] = [[] for _ in range(params.n)]
    for output in llm.stream(prompt, params):
        for got, part in zip(tokens, output.outputs, strict=True):
            got.extend(part.token_ids)
    return tokens


@pytest.mark.parametrize("other", [generate, stream])
def test_two_threads_on_one_llm(tiny_folder: Path, other: Callable[..., list[list[int]]]) -> None:
    """Under preemption: each result is that of the call alone, of exactly `max_tokens` tokens."""
    two = replace(GREEDY, n=2, temperature=1.0, seed=1)
    calls = [(call, [first, 2, 3], replace(params, max_tokens=3 + first % 5))
             for first in range(12) for call, params in ((generate, GREEDY), (other, two))]  # fmt: skip
    with load(tiny_folder, num_blocks=7, max_model_len=20) as llm:
        expected = [generate(llm, prompt, params) for _, prompt, params in calls]
        results: dict[int, list[list[int]]] = {}

        def client(numbers: range) -> None:
            for number in numbers:
                call, prompt, params = calls[number]
                results[number] = call(llm, prompt, params)

        threads = [threading.Thread(target=client, args=(range(start, len(calls), 3),)) for start in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [results[number] for number in range(len(calls))] == expected
        assert all(len(tokens) == params.max_tokens for n, (_, _, params) in enumerate(calls) for tokens in results[n])
        assert is_idle(llm)


def test_two_threads_that_step_one_engine(tiny_folder: Path) -> None:
    with load(tiny_folder) as llm:
        [wanted] = generate(llm, [1, 2, 3], replace(GREEDY, max_tokens=60))
        llm.engine.add_request("r", [1, 2, 3], replace(GREEDY, max_tokens=60))
        request = llm.engine._live["r"]
        before = llm.engine.num_steps

        def step() -> None:
            while llm.engine.has_unfinished():
                llm.engine.step()

        threads = [threading.Thread(target=step) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert request.output().outputs[0].token_ids == wanted
        assert llm.engine.num_steps - before <= 60 + len(threads)
        assert is_idle(llm)
