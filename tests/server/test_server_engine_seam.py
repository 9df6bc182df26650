"""What the server asks of `AsyncLLM`: prepare and submit, listeners, the time of the current step, failed steps."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from server_rig import Rig, stub_rig, wait_until

from minipaged import SamplingParams
from minipaged.outputs import RequestOutput


def test_preparing_has_no_effect_and_submitting_can_be_taken_back(stub: Rig) -> None:
    async def main() -> None:
        request = stub.llm.prepare([1, 2], SamplingParams(max_tokens=400))
        assert not stub.llm.engine.has_unfinished()
        stub.runner.gate.clear()
        stream = stub.llm.submit(request)
        with pytest.raises(ValueError, match="alive"):
            stub.llm.submit(request)
        stream.close()  # never read
        stream.close()
        stub.runner.gate.set()
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    asyncio.run(main())
    stub.wait_idle()


def test_outputs_until_the_last(stub: Rig) -> None:
    async def main() -> list[RequestOutput]:
        with stub.llm.submit(stub.llm.prepare([1], SamplingParams(max_tokens=5))) as stream:
            return [output async for output in stream]

    outputs = asyncio.run(main())
    assert outputs[-1].finished
    assert outputs[-1].outputs[0].text == "abcde"


def test_step_seconds(stub: Rig) -> None:
    assert stub.llm.step_seconds == 0.0
    stub.runner.gate.clear()
    sock = stub.send("/v1/completions", {"prompt": "x", "max_tokens": 1})
    stub.runner.in_step.wait(5)
    wait_until(lambda: stub.llm.step_seconds > 0.02, "time passes")
    stub.runner.gate.set()
    sock.recv(1000)
    sock.close()
    wait_until(lambda: stub.llm.step_seconds == 0.0, "the step has ended")


def test_listeners_see_every_step_and_cannot_stop_the_engine(tokenizer_folder: Path) -> None:
    with stub_rig(tokenizer_folder) as rig:
        seen: list[int] = []

        def broken(outputs: list[RequestOutput]) -> None:
            raise RuntimeError("a fault in a listener")

        rig.llm.step_listeners[:0] = [broken]
        rig.llm.step_listeners.append(lambda outputs: seen.extend(len(o.outputs[0].token_ids) for o in outputs))
        assert rig.client.completions.create(model="stub", prompt="x", max_tokens=4).choices[0].text == "abcd"
        assert seen == [1, 2, 3, 4]
        assert rig.http.get("/health").status_code == 200
        assert rig.metric("generation_tokens_total") == 4
