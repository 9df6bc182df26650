"""Eviction policies of a user's that fail: it is said once, LRU serves from then on, and no request notices."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from llm_rig import GREEDY, is_idle, load

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


PROMPTS = [list(range(start, start + 13)) for start in (0, 0, 100, 200, 0, 300)]


class Unhashable(RankedPolicy):
    """Names its victim in a list."""

    def rank(self, block: int, released: int) -> int:
        return released

    def evict(self) -> int:
        return [super().evict()]  # type: ignore[return-value]


class Hostile:
    """An answer that raises whatever is done with it."""

    __hash__ = None  # type: ignore[assignment]

    def __index__(self) -> int:
        raise OverflowError

    def __repr__(self) -> str:
        raise RuntimeError


class HostileError(Exception):
    def __str__(self) -> str:
        raise RuntimeError


class AnswersHostile(Unhashable):
    def evict(self) -> int:
        return Hostile()  # type: ignore[return-value]


class RaisesHostile(Unhashable):
    def evict(self) -> int:
        raise HostileError


BROKEN = [
    (NoSuper, "has no attribute"),
    (WrongRank, "rank"),
    (Unhashable, "not one of the"),
    (AnswersHostile, "<Hostile instance"),
    (RaisesHostile, "HostileError"),
]


@pytest.mark.parametrize(("policy", "message"), BROKEN)
def test_lru_takes_over_and_says_so_once(
    tiny_folder: Path, policy: type[RankedPolicy], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    with load(tiny_folder, num_blocks=8, max_model_len=24) as llm:
        wanted = [llm.generate(prompt, ONE, use_tqdm=False)[0].outputs[0].token_ids for prompt in PROMPTS]
        hits = llm.engine.stats().prefix_hit_tokens
    with load(tiny_folder, num_blocks=8, max_model_len=24, eviction_policy=policy()) as llm:
        assert llm.engine.stats().eviction_policy == policy.__name__
        for prompt, tokens in zip(PROMPTS, wanted, strict=True):
            [completion] = llm.generate(prompt, ONE, use_tqdm=False)[0].outputs
            assert completion.token_ids == tokens
            assert is_idle(llm)
            llm.engine.block_manager.check_invariants()
        assert llm.engine.stats().prefix_hit_tokens == hits  # LRU from the beginning, or the same order as LRU
        serves = llm.engine.stats().eviction_policy
    assert serves.startswith(f"lru ({policy.__name__} failed: ")
    assert message in serves
    said = [record for record in caplog.records if "lru serves from now on" in record.getMessage()]
    assert len(said) == 1
    assert policy.__name__ in said[0].getMessage()


@pytest.mark.parametrize("name", ["insert", "hit", "add", "remove", "evict"])
def test_an_error_in_any_method_costs_no_request(tiny_folder: Path, name: str) -> None:
    prompts = [list(range(start, start + 9)) for start in (0, 100, 200, 300)]
    with load(tiny_folder) as llm:
        wanted = [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, use_tqdm=False)]
    with load(tiny_folder, num_blocks=8, max_model_len=24, eviction_policy=RaisesIn(name)) as llm:
        for _ in range(2):
            for _ in range(2):  # the second time its beginning is cached, and a candidate
                [again] = llm.generate(prompts[0], ONE, use_tqdm=False)
                assert again.outputs[0].token_ids == wanted[0][:1]
            outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
            assert [output.outputs[0].token_ids for output in outputs] == wanted
            assert is_idle(llm)
        assert f"{name}() raised LookupError: in {name}" in llm.engine.stats().eviction_policy


def test_ctrl_c_inside_a_policy_is_no_error_of_the_policy() -> None:
    class Interrupted(RankedPolicy):
        def rank(self, block: int, released: int) -> int:
            raise KeyboardInterrupt

    manager = KVBlockManager(2, 1, enable_prefix_caching=True, eviction_policy=Interrupted())
    manager.create_sequence(0)
    manager.append_tokens(0, 1)
    manager.commit_tokens(0, [1])
    with pytest.raises(KeyboardInterrupt):
        manager.release_sequence(0)
    assert manager.eviction_policy == "Interrupted"


def test_a_mistake_in_the_tokens_of_one_request_is_that_requests(tiny_folder: Path) -> None:
    bad = replace(GREEDY, token_mask=lambda _: 1 / 0)  # type: ignore[arg-type,return-value]
    with load(tiny_folder) as llm:
        outputs = llm.generate([[1, 2], [3, 4]], [bad, GREEDY], use_tqdm=False)
        assert [output.outputs[0].finish_reason for output in outputs] == ["error", "length"]


def test_the_manager_goes_on_with_lru(caplog: pytest.LogCaptureFixture) -> None:
    manager = KVBlockManager(3, 1, enable_prefix_caching=True, eviction_policy=RaisesIn("evict"))
    for sequence_id in range(3):
        manager.create_sequence(sequence_id)
        manager.append_tokens(sequence_id, 1)
        manager.commit_tokens(sequence_id, [100 + sequence_id])
    for sequence_id in (1, 0, 2):
        manager.release_sequence(sequence_id)
    assert [manager.allocate_block() for _ in range(3)] == [1, 0, 2]
    manager.check_invariants()
    assert manager.eviction_policy == "lru (RaisesIn failed: evict() raised LookupError: in evict)"
    assert [record.exc_info is not None for record in caplog.records] == [True]
