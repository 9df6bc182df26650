"""Eviction policies of a user's that raise: `generate` says so when the others are done, and no block is lost."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from llm_rig import GREEDY, is_idle, load

from minipaged import LLM, AsyncLLM, RequestOutput, SamplingParams
from minipaged.errors import EvictionPolicyError
from minipaged.kv import KVBlockManager, RankedPolicy

ONE = replace(GREEDY, max_tokens=1)


class NoSuper(RankedPolicy):
    def __init__(self) -> None:
        self.mine = 1

    def rank(self, block: int, released: int) -> int:
        return released


class WrongRank(RankedPolicy):
    def rank(self, block: int) -> int:  # type: ignore[override]
        return block


class RaisesIn(RankedPolicy):
    """Raises once, in the method of that name."""

    def __init__(self, name: str) -> None:
        super().__init__()
        method = getattr(self, name)

        def once(*arguments: Any) -> Any:
            setattr(self, name, method)
            raise LookupError(f"in {name}")

        setattr(self, name, once)

    def rank(self, block: int, released: int) -> int:
        return released


def outputs_of(llm: LLM, prompts: Any, params: SamplingParams) -> list[RequestOutput]:
    """Also those that the exception of a broken policy brings; it is raised exactly if one of them is an error."""
    try:
        outputs, raised = llm.generate(prompts, params, use_tqdm=False), False
    except EvictionPolicyError as error:
        outputs, raised = error.outputs, True
    assert raised == any(output.outputs[0].finish_reason == "error" for output in outputs)
    return outputs


@pytest.mark.parametrize(("policy", "message"), [(NoSuper, "has no attribute"), (WrongRank, "rank")])
def test_every_request_reports_the_policys_own_error(
    tiny_folder: Path, policy: type[RankedPolicy], message: str
) -> None:
    with load(tiny_folder, num_blocks=8, max_model_len=24, eviction_policy=policy()) as llm:
        for start in (0, 100, 200):  # the pool is full of cached blocks by the third one
            prompt = list(range(start, start + 13))
            with pytest.raises(EvictionPolicyError, match=f"eviction_policy {policy.__name__} failed") as raised:
                llm.generate(prompt, SamplingParams(max_tokens=3, temperature=0.0), use_tqdm=False)
            assert message in str(raised.value)
            [output] = raised.value.outputs
            assert output.outputs[0].finish_reason == "error"
            assert message in (output.outputs[0].error or "")
            assert is_idle(llm)


@pytest.mark.parametrize("name", ["insert", "hit", "add", "remove", "evict"])
def test_requests_that_need_the_policy_fail_and_others_are_right(tiny_folder: Path, name: str) -> None:
    prompts = [list(range(start, start + 13)) for start in (0, 0, 100, 200, 0, 300)]
    with load(tiny_folder, num_blocks=8, max_model_len=24) as llm:
        wanted = [llm.generate(prompt, ONE, use_tqdm=False)[0].outputs[0].token_ids for prompt in prompts]
    with load(tiny_folder, num_blocks=8, max_model_len=24, eviction_policy=RaisesIn(name)) as llm:
        failed = 0
        for prompt, tokens in zip(prompts, wanted, strict=True):
            [completion] = outputs_of(llm, prompt, ONE)[0].outputs
            if completion.finish_reason == "error":
                assert f"LookupError: in {name}" in (completion.error or "")
                failed += 1
            else:
                assert completion.token_ids == tokens
            assert is_idle(llm)
        assert 1 <= failed < len(prompts)


def test_requests_side_by_side(tiny_folder: Path) -> None:
    """Under preemption too, everything ends, and what is no error is right."""
    prompts = [list(range(start, start + 9)) for start in (0, 100, 200, 300)]
    with load(tiny_folder) as llm:
        wanted = [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, use_tqdm=False)]
    for name in ("insert", "add", "remove", "evict"):
        with load(tiny_folder, num_blocks=8, max_model_len=24, eviction_policy=RaisesIn(name)) as llm:
            outputs = outputs_of(llm, prompts, GREEDY)
            assert [output.prompt_token_ids for output in outputs] == prompts
            assert all(output.finished for output in outputs)
            fine = [output.outputs[0].finish_reason != "error" for output in outputs]
            assert any(fine)
            assert [o.outputs[0].token_ids for o, ok in zip(outputs, fine, strict=True) if ok] == [
                tokens for tokens, ok in zip(wanted, fine, strict=True) if ok
            ]
            assert is_idle(llm)


def test_streams_end_with_the_reason_error(tiny_folder: Path) -> None:
    """Their reader has seen part of the answer, and sees how it ends."""
    with load(tiny_folder, num_blocks=8, max_model_len=24, eviction_policy=NoSuper()) as llm:
        *_, last = llm.stream(list(range(13)), GREEDY)
        assert last.outputs[0].finish_reason == "error"
        assert "eviction_policy NoSuper failed" in (last.outputs[0].error or "")

    async def read(llm: AsyncLLM) -> RequestOutput:
        return [output async for output in llm.generate(list(range(13)), GREEDY)][-1]

    with load(tiny_folder, num_blocks=8, max_model_len=24, eviction_policy=NoSuper()) as llm:
        served = AsyncLLM.from_engine(llm.engine)
        try:
            last = asyncio.run(read(served))
        finally:
            served.close()
        assert last.outputs[0].finish_reason == "error"
        assert "eviction_policy NoSuper failed" in (last.outputs[0].error or "")


def test_a_mistake_in_the_tokens_of_one_request_raises_nothing(tiny_folder: Path) -> None:
    """Only what breaks the engine's own work is raised; a mask of one request is that request's."""
    bad = replace(GREEDY, token_mask=lambda _: 1 / 0)  # type: ignore[arg-type,return-value]
    with load(tiny_folder) as llm:
        outputs = llm.generate([[1, 2], [3, 4]], [bad, GREEDY], use_tqdm=False)
        assert [output.outputs[0].finish_reason for output in outputs] == ["error", "length"]


def test_the_manager_completes_the_operation() -> None:
    manager = KVBlockManager(2, 2, enable_prefix_caching=True, eviction_policy=NoSuper())
    manager.create_sequence(0)
    manager.append_tokens(0, 4)
    manager.commit_tokens(0, [1, 2, 3, 4])
    with pytest.raises(EvictionPolicyError, match="_ranks") as raised:
        manager.release_sequence(0)
    assert isinstance(raised.value.__cause__, AttributeError)
    manager.check_invariants()
    assert manager.num_available_blocks == 2
    manager.create_sequence(1)
    with pytest.raises(EvictionPolicyError, match=r"failed again.*_heap.*first error.*_ranks"):
        manager.append_tokens(1, 4)
    manager.check_invariants()
    assert manager.sequences[1].sequence_length == 4
