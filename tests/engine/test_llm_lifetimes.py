"""How an `LLM` and what runs in it end: streams, threads, Ctrl-C, callbacks, closing, forks; two at once."""

from __future__ import annotations

import gc
import json
import os
import threading
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path

import pytest
from llm_rig import GREEDY, is_idle, load

from minipaged import LLM, RequestOutput, SamplingParams
from tiny import random_tokens


def test_breaking_out_of_a_stream_frees_at_once(bare: LLM) -> None:
    for output in bare.stream([1, 2, 3], SamplingParams(max_tokens=300)):
        assert not output.finished
        break
    assert is_idle(bare)


def test_an_exception_in_the_loop_over_a_stream_frees(bare: LLM) -> None:
    def use() -> None:
        for _ in bare.stream([1, 2, 3], SamplingParams(max_tokens=300)):
            raise LookupError

    with pytest.raises(LookupError):
        use()
    assert is_idle(bare)


def test_streams_read_in_turns(bare: LLM) -> None:
    alone = [bare.generate([n, 5], GREEDY, use_tqdm=False)[0].outputs[0].token_ids for n in range(3)]
    streams = [bare.stream([n, 5], GREEDY) for n in range(3)]
    got: list[list[int]] = [[], [], []]
    for parts in zip_longest(*streams):  # what came while another stream was read comes in one piece
        for tokens, part in zip(got, parts, strict=True):
            tokens.extend(part.outputs[0].token_ids if part else [])
    assert got == alone
    assert is_idle(bare)


def test_generate_inside_a_stream(bare: LLM) -> None:
    wanted = bare.generate([9, 9], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    got: list[int] = []
    for part in bare.stream([9, 9], GREEDY):
        got += part.outputs[0].token_ids
        bare.generate([7], SamplingParams(max_tokens=2), use_tqdm=False)
    assert got == wanted


@pytest.mark.parametrize("call", ["generate", "stream"])
def test_ctrl_c_aborts_and_frees(bare: LLM, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = bare.engine.runner
    execute, calls = runner.execute, []

    def interrupted(plan):
        calls.append(plan)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return execute(plan)

    monkeypatch.setattr(runner, "execute", interrupted)
    params = SamplingParams(max_tokens=100)
    calls_of = {
        "generate": lambda: bare.generate([[1, 2], [3, 4]], params, use_tqdm=False),
        "stream": lambda: list(bare.stream([1, 2], params)),
    }
    with pytest.raises(KeyboardInterrupt):
        calls_of[call]()
    assert len(calls) == 3
    assert is_idle(bare)
    assert bare.generate([1, 2], GREEDY, use_tqdm=False)[0].finished


def test_several_threads_share_the_batch(bare: LLM) -> None:
    alone = [bare.generate([n, 6, 7], GREEDY, use_tqdm=False)[0].outputs[0].token_ids for n in range(6)]
    results: dict[int, list[int]] = {}

    def client(number: int) -> None:
        (output,) = bare.generate([number, 6, 7], GREEDY, use_tqdm=False)
        results[number] = output.outputs[0].token_ids

    threads = [threading.Thread(target=client, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [results[number] for number in range(6)] == alone


def test_closed_means_closed(tiny_folder: Path) -> None:
    with load(tiny_folder) as llm:
        stream = llm.stream([1, 2], SamplingParams(max_tokens=100))
        next(stream)
    llm.close()
    for use in (lambda: llm.generate([1]), lambda: llm.engine, llm.summary, lambda: next(stream)):
        with pytest.raises(RuntimeError, match="closed"):
            use()


def test_two_in_one_process(tiny_folder: Path) -> None:
    one, two = load(tiny_folder, block_size=4), load(tiny_folder, block_size=3)
    prompts = [random_tokens(9, seed=1), random_tokens(20, seed=2)]
    streams = [llm.stream(prompt, GREEDY) for llm in (one, two) for prompt in prompts]
    results: list[list[int]] = [[] for _ in streams]
    for parts in zip_longest(*streams):
        for tokens, part in zip(results, parts, strict=True):
            tokens.extend(part.outputs[0].token_ids if part else [])
    assert results[:2] == results[2:]
    assert one.engine.block_manager is not two.engine.block_manager


def test_a_journal_replays_to_the_same_tables(tiny_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    with load(tiny_folder, kv_journal=path) as llm:
        llm.generate([[1, 2, 3, 4, 5], [1, 2, 3, 4, 6]], SamplingParams(n=2, max_tokens=6, seed=1), use_tqdm=False)
    header, *events = [json.loads(line) for line in path.read_text().splitlines()]
    assert header == {"num_blocks": 160, "block_size": 4}
    assert {"allocate", "share", "copy", "commit"} <= {event["kind"] for event in events}
    tables: dict[int, list[int]] = {}
    for event in events:
        if event["kind"] in ("allocate", "share", "copy"):
            table = tables.setdefault(event["sequence"], [])
            table[event["logical_index"] :] = [event["block"]]
    assert all(len(table) == -(-(5 + 6 - 1) // 4) for table in tables.values())
    assert [event["step"] for event in events] == sorted(event["step"] for event in events)
    assert events[-1]["step"] >= 5


def forgotten_stream(llm: LLM) -> None:
    """A stream that has begun and that only the cycle collector can find."""
    stream = llm.stream([1, 2, 3], SamplingParams(max_tokens=50, ignore_eos=True))
    next(stream)
    cycle: list[object] = [stream]
    cycle.append(cycle)


@pytest.mark.parametrize("where", ["while scheduling", "while sampling"])
def test_a_stream_collected_in_the_middle_of_a_step(tiny_folder: Path, where: str) -> None:
    """The garbage collector may close a forgotten stream anywhere: the step in progress keeps its plan, nobody else
    notices, and the blocks come back with the next step.
    """
    with load(tiny_folder) as llm:
        [expected] = llm.generate([4, 5, 6], GREEDY, use_tqdm=False)
        gc.disable()
        try:
            forgotten_stream(llm)
            if where == "while scheduling":
                llm.loaded.events.listeners.append(lambda _: gc.collect() * 0)
                params = GREEDY
            else:
                params = replace(GREEDY, token_mask=lambda _: None if gc.collect() >= 0 else [False])
            [output] = llm.generate([4, 5, 6], params, use_tqdm=False)
        finally:
            gc.enable()
        assert output.outputs[0].error is None
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids
        assert is_idle(llm)


def test_a_callback_that_generates_fails_its_own_request(tiny_folder: Path) -> None:
    with load(tiny_folder) as llm:
        inner = replace(GREEDY, token_mask=lambda _: llm.generate([1], GREEDY, use_tqdm=False) and None)
        outputs = llm.generate([[4, 5], [6, 7]], [inner, GREEDY], use_tqdm=False)
        assert outputs[0].outputs[0].finish_reason == "error"
        assert "callbacks must not generate" in str(outputs[0].outputs[0].error)
        assert outputs[1].outputs[0].finish_reason == "length"
        assert is_idle(llm)


def test_siblings_that_end_at_once_leave_no_token_counts(tiny_folder: Path) -> None:
    """n texts are sampled before their fork; one whose first token is its last never holds a block."""
    with load(tiny_folder) as llm:
        params = SamplingParams(n=3, max_tokens=1, temperature=1.0, presence_penalty=1.0)
        llm.generate([[1, 2], [3, 4]], params, use_tqdm=False)
        assert not llm.engine.runner.sampler._counts  # type: ignore[attr-defined]


def test_a_listener_that_raises_is_left_out(tiny_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with load(tiny_folder) as llm:
        [expected] = llm.generate([4, 5, 6], GREEDY, use_tqdm=False)
        llm.loaded.events.listeners.append(lambda _: 1 / 0)
        [output] = llm.generate([4, 5, 6], GREEDY, use_tqdm=False)
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids
        assert is_idle(llm)
        assert caplog.text.count("ZeroDivisionError") == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_journal_on_a_full_disk(tiny_folder: Path) -> None:
    """The text is not harmed; `close` says that the journal is not complete."""
    llm = load(tiny_folder, kv_journal="/dev/full")
    for start in range(40):
        [output] = llm.generate([start] * 30, GREEDY, use_tqdm=False)
        assert output.outputs[0].finish_reason == "length"
    with pytest.raises(OSError, match=r"kv_journal = '/dev/full'.*incomplete"):
        llm.close()
    llm.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_is_told_so(tiny_folder: Path) -> None:
    """The compute threads do not survive a fork, and waiting for them would never end: an error, and the parent goes
    on.
    """
    with load(tiny_folder) as llm:
        llm.generate([4, 5, 6], GREEDY, use_tqdm=False)
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                llm.generate([4, 5, 6], GREEDY, use_tqdm=False)
            except BaseException as error:
                os.write(writer, f"{type(error).__name__}: {error}".encode())
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as pipe:
            message = pipe.read()
        os.waitpid(child, 0)
        assert message.startswith(f"RuntimeError: this engine belongs to process {os.getpid()}")
        assert llm.generate([4, 5, 6], GREEDY, use_tqdm=False)[0].outputs[0].finish_reason == "length"


def test_an_end_that_nobody_was_told_of(tiny_folder: Path) -> None:
    """A step that ends requests of two threads and is then interrupted: the other thread does not wait for ever."""
    with load(tiny_folder) as llm:
        [expected] = llm.generate([4, 5, 6], GREEDY, use_tqdm=False)
        step = llm.engine.step

        def interrupted() -> list[RequestOutput]:
            if any(output.finished for output in step()):
                llm.engine.step = step  # type: ignore[method-assign]
            return []

        llm.engine.step = interrupted  # type: ignore[method-assign]
        [output] = llm.generate([4, 5, 6], GREEDY, use_tqdm=False)
        assert output.finished
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids
        assert is_idle(llm)
