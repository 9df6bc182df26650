"""Eviction policies of a user's that raise: the request fails with that error, no block is lost, the others go on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from llm_rig import GREEDY, is_idle, load

from minipaged import SamplingParams
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


@pytest.mark.parametrize(("policy", "message"), [(NoSuper, "has no attribute"), (WrongRank, "rank")])
def test_every_request_reports_the_policys_own_error(
    tiny_folder: Path, policy: type[RankedPolicy], message: str
) -> None:
    with load(tiny_folder, num_blocks=8, max_model_len=24, eviction_policy=policy()) as llm:
        for start in (0, 100, 200):  # the pool is full of cached blocks by the third one
            prompt = list(range(start, start + 13))
            [output] = llm.generate(prompt, SamplingParams(max_tokens=3, temperature=0.0), use_tqdm=False)
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
            [completion] = llm.generate(prompt, ONE, use_tqdm=False)[0].outputs
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
            outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
            fine = [output.outputs[0].finish_reason != "error" for output in outputs]
            assert any(fine)
            assert [o.outputs[0].token_ids for o, ok in zip(outputs, fine, strict=True) if ok] == [
                tokens for tokens, ok in zip(wanted, fine, strict=True) if ok
            ]
            assert is_idle(llm)


def test_the_manager_completes_the_operation() -> None:
    manager = KVBlockManager(2, 2, enable_prefix_caching=True, eviction_policy=NoSuper())
    manager.create_sequence(0)
    manager.append_tokens(0, 4)
    manager.commit_tokens(0, [1, 2, 3, 4])
    with pytest.raises(AttributeError, match="_ranks"):
        manager.release_sequence(0)
    manager.check_invariants()
    assert manager.num_available_blocks == 2
    manager.create_sequence(1)
    with pytest.raises(RuntimeError, match=r"failed again.*_heap.*first error.*_ranks"):
        manager.append_tokens(1, 4)
    manager.check_invariants()
    assert manager.sequences[1].sequence_length == 4
