"""`AsyncLLM`: many at once, cancellation in every way, a clean end, and an end that is not clean."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from stub_engine import StubEngine, alone

from minipaged.engine.plan import StepPlan
from minipaged.llm.async_llm import AsyncLLM, EngineDeadError
from minipaged.outputs import RequestOutput
from minipaged.sampling_params import SamplingParams

GREEDY = {"temperature": 0.0, "seed": 0}


@asynccontextmanager
async def serving(stub: StubEngine) -> AsyncIterator[AsyncLLM]:
    async with AsyncLLM.from_engine(stub.engine) as llm:
        yield llm


async def collect(llm: AsyncLLM, prompt: list[int], **params: object) -> RequestOutput:
    last = None
    async for output in llm.generate(prompt, SamplingParams(**{**GREEDY, **params})):
        last = output
    return last


async def eventually(condition: Callable[[], bool]) -> None:
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it never happened")


def test_many_at_once_each_equal_to_itself_alone() -> None:
    async def main() -> None:
        async with serving(StubEngine(64, 4, max_num_seqs=8)) as llm:
            outputs = await asyncio.gather(*(collect(llm, [n, 2, 3], max_tokens=4 + n % 5) for n in range(50)))
        for n, output in enumerate(outputs):
            assert [output.outputs[0].token_ids] == alone([n, 2, 3], max_tokens=4 + n % 5)

    asyncio.run(main())


def test_outputs_are_cumulative_and_the_last_one_is_finished() -> None:
    async def main() -> None:
        async with serving(StubEngine()) as llm:
            seen = [o async for o in llm.generate([1, 2], SamplingParams(max_tokens=6, **GREEDY), "named")]
        assert [output.finished for output in seen] == [False] * (len(seen) - 1) + [True]
        lengths = [len(output.outputs[0].token_ids) for output in seen]
        assert lengths == sorted(lengths)
        assert lengths[-1] == 6
        assert {output.request_id for output in seen} == {"named"}

    asyncio.run(main())


@pytest.mark.parametrize("way", ["cancel", "aclose", "abort"])
def test_leaving_aborts_within_two_steps(way: str) -> None:
    """C41: whoever goes away takes the request along, whether it runs or waits."""

    async def main() -> None:
        stub = StubEngine(64, 4, max_num_seqs=1)
        gate = threading.Semaphore(0)
        stub.runner.on_execute = lambda plan: gate.acquire(timeout=10)
        async with serving(stub) as llm:
            got: list[RequestOutput] = []

            async def read() -> None:
                async for output in llm.generate([1, 2], SamplingParams(max_tokens=100, **GREEDY), "victim"):
                    got.append(output)

            async def wait_in_the_queue() -> None:
                async for _ in llm.generate([3, 4], SamplingParams(max_tokens=100, **GREEDY), "queued"):
                    pass

            generator = llm.generate([1, 2], SamplingParams(max_tokens=100, **GREEDY), "victim")
            reader = asyncio.ensure_future(anext(generator) if way == "aclose" else read())
            queued = asyncio.ensure_future(wait_in_the_queue())
            gate.release()
            await eventually(lambda: reader.done() if way == "aclose" else bool(got))
            steps = stub.runner.steps
            if way == "cancel":
                reader.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await reader
            elif way == "aclose":
                await generator.aclose()
            else:
                await llm.abort("victim")
            queued.cancel()
            await asyncio.gather(queued, return_exceptions=True)
            gate.release()
            gate.release()
            await eventually(lambda: not stub.engine.has_unfinished())
            assert stub.runner.steps <= steps + 2
            if way == "abort":
                await reader
                assert got[-1].outputs[0].finish_reason == "abort"
            assert stub.is_idle()
            assert not llm._mailboxes

    asyncio.run(main())


def test_invalid_requests_raise_and_hurt_nobody() -> None:
    async def main() -> None:
        stub = StubEngine(16, 4)
        gate = threading.Event()
        stub.runner.on_execute = lambda plan: stub.runner.steps == 1 or gate.wait(10)
        async with serving(stub) as llm:
            with pytest.raises(ValueError, match="empty"):
                await collect(llm, [])
            with pytest.raises(ValueError, match="context length exceeded"):
                await collect(llm, [1] * 1000)
            generator = llm.generate([1], SamplingParams(max_tokens=40, **GREEDY), "twice")
            await anext(generator)
            with pytest.raises(ValueError, match="'twice' is alive"):
                await anext(llm.generate([1], SamplingParams(max_tokens=4, **GREEDY), "twice"))
            gate.set()
            remaining = [output async for output in generator]
            assert [remaining[-1].outputs[0].token_ids] == alone([1], max_tokens=40)

    asyncio.run(main())


def test_a_failed_step_ends_its_requests_and_the_next_ones_work() -> None:
    async def main() -> None:
        stub = StubEngine()
        stub.runner.fail = lambda step: step == 1
        async with serving(stub) as llm:
            output = await collect(llm, [1, 2], max_tokens=5)
            assert output.outputs[0].error == "RuntimeError: injected"
            assert llm.is_running
            assert [(await collect(llm, [1, 2], max_tokens=5)).outputs[0].token_ids] == alone([1, 2], max_tokens=5)

    asyncio.run(main())


def test_the_death_of_the_engine_reaches_everybody_who_waits() -> None:
    class Fatal(BaseException):
        pass

    def die(plan: StepPlan) -> None:
        if stub.runner.steps == 3:
            raise Fatal("out of luck")

    stub = StubEngine()
    stub.runner.on_execute = die

    async def main() -> None:
        async with serving(stub) as llm:
            results = await asyncio.gather(
                *(collect(llm, [n], max_tokens=30) for n in range(5)), return_exceptions=True
            )
            for error in results:
                assert isinstance(error, EngineDeadError)
                assert "Fatal: out of luck" in str(error)
                assert isinstance(error.__cause__, Fatal)
            assert not llm.is_running
            with pytest.raises(EngineDeadError, match="out of luck"):
                await collect(llm, [1])

    asyncio.run(main())


def test_close_while_requests_run() -> None:
    async def main() -> None:
        stub = StubEngine(64, 4)
        async with serving(stub) as llm:
            stub.runner.on_execute = lambda plan: time.sleep(0.001)
            reader = asyncio.ensure_future(collect(llm, [1], max_tokens=200))
            await eventually(lambda: stub.runner.steps > 3)
            await asyncio.to_thread(llm.close)
            with pytest.raises(EngineDeadError, match="closed"):
                await reader
            with pytest.raises(EngineDeadError, match="closed"):
                await collect(llm, [1])
        assert not llm._thread.is_alive()
        assert stub.is_idle()

    asyncio.run(main())


def test_the_thread_sleeps_when_there_is_nothing_to_do() -> None:
    async def main() -> None:
        stub = StubEngine()
        async with serving(stub) as llm:
            await collect(llm, [1], max_tokens=3)
            steps = stub.engine.num_steps
            await asyncio.sleep(0.05)
            assert stub.engine.num_steps == steps
            await collect(llm, [1], max_tokens=3)
            assert stub.engine.num_steps == steps + 3

    asyncio.run(main())


def test_a_slow_reader_skips_to_the_latest_and_misses_nothing() -> None:
    async def main() -> None:
        stub = StubEngine(64, 4)
        gate = threading.Event()
        stub.runner.on_execute = lambda plan: stub.runner.steps == 1 or gate.wait(10)
        async with serving(stub) as llm:
            generator = llm.generate([1], SamplingParams(max_tokens=50, **GREEDY))
            first = await anext(generator)
            gate.set()
            await eventually(lambda: not stub.engine.has_unfinished())
            await asyncio.sleep(0.01)  # let the loop take the last call
            rest = [output async for output in generator]
        assert not first.finished
        assert len(rest) <= 2
        assert [rest[-1].outputs[0].token_ids] == alone([1], max_tokens=50)

    asyncio.run(main())


def test_requests_from_two_event_loops() -> None:
    stub = StubEngine(64, 4)
    llm = AsyncLLM.from_engine(stub.engine)
    results: dict[int, list[int]] = {}

    def client(number: int) -> None:
        output = asyncio.run(collect(llm, [number], max_tokens=20))
        results[number] = output.outputs[0].token_ids

    threads = [threading.Thread(target=client, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    llm.close()
    assert {number: [tokens] for number, tokens in results.items()} == {n: alone([n], max_tokens=20) for n in range(4)}
