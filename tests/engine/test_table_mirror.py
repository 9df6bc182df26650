"""The mirror of the block tables that kernels read: whatever else happens on the manager, it has it."""

from __future__ import annotations

from pathlib import Path

import pytest
from llm_rig import GREEDY, is_idle, load

from minipaged import LLM, SamplingParams
from minipaged.kv import BlockEvent, FanOut, KVBlockManager
from minipaged.runner.input_batch import BlockTables

PROMPT = list(range(1, 12))


@pytest.fixture
def undisturbed(tiny_folder: Path) -> list[int]:
    with load(tiny_folder) as llm:
        return llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].outputs[0].token_ids


def use_the_pool(llm: LLM, step: int) -> None:
    """A caller who takes blocks of the engine's own manager: longer than any request, forked, with ids to come."""
    manager = llm.engine.block_manager
    first, second = 10_000 + 2 * step, 10_001 + 2 * step
    manager.create_sequence(first)
    manager.append_tokens(first, 58)
    manager.fork_sequence(first, second)
    manager.append_tokens(second, 2)
    manager.release_sequence(first)
    manager.release_sequence(second)
    manager.free_block(manager.allocate_block())


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_foreign_sequences_of_any_length_change_no_token(
    tiny_folder: Path, undisturbed: list[int], backend: str
) -> None:
    from minipaged.ops import available_backends

    if available_backends()[backend] is not None:
        pytest.skip(f"back end {backend}: {available_backends()[backend]}")
    with load(tiny_folder, num_blocks=64, max_model_len=40, backend=backend) as llm:
        tokens: list[int] = []
        for number, output in enumerate(llm.stream(PROMPT, GREEDY)):
            tokens += output.outputs[0].token_ids
            use_the_pool(llm, number)
        assert tokens == undisturbed
        assert llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].outputs[0].token_ids == undisturbed
        assert is_idle(llm)


@pytest.mark.parametrize("fork", [False, True])
def test_foreign_sequences_with_ids_that_the_engine_will_need(tiny_folder: Path, fork: bool) -> None:
    """They live on through prefill, fork, penalties (counts are kept by id), preemption and the end of the request."""
    params = SamplingParams(n=3, temperature=1.0, seed=4, max_tokens=12, presence_penalty=1.5, ignore_eos=True)
    with load(tiny_folder) as llm:
        wanted = [c.token_ids for c in llm.generate(PROMPT, params, use_tqdm=False)[0].outputs]
        manager = llm.engine.block_manager
        for sequence_id in range(3, 12, 1 + fork):
            if fork and sequence_id > 3:
                manager.fork_sequence(3, sequence_id)
            else:
                manager.create_sequence(sequence_id)
                manager.append_tokens(sequence_id, 5)
        foreign = {i: list(state.block_table) for i, state in manager.sequences.items()}
        tokens: list[list[int]] = [[], [], []]
        for number, output in enumerate(llm.stream(PROMPT, params)):
            if number == 4:
                llm.engine.scheduler.preempt(llm.engine.scheduler.running[-1])
            for got, completion in zip(tokens, output.outputs, strict=True):
                got.extend(completion.token_ids)
        assert tokens == wanted
        assert {i: state.block_table for i, state in manager.sequences.items()} == foreign
        assert not llm.engine.runner.sampler._counts  # type: ignore[attr-defined]
        for sequence_id in foreign:
            manager.release_sequence(sequence_id)
        assert is_idle(llm)


def test_the_row_of_a_foreign_sequence_that_is_gone(tiny_folder: Path, undisturbed: list[int]) -> None:
    with load(tiny_folder) as llm:
        assert llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].outputs[0].token_ids == undisturbed
        llm.engine.block_manager.create_sequence(1)
        llm.engine.block_manager.append_tokens(1, 9)
        llm.engine.block_manager.release_sequence(1)  # its row of the mirror stays, and is written over
        assert llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].outputs[0].token_ids == undisturbed


def test_the_mirror_grows_in_both_directions() -> None:
    tables = BlockTables(1, 2)
    manager = KVBlockManager(40, 1, listener=FanOut(tables.on_event))
    for sequence in range(3):
        manager.create_sequence(sequence)
        manager.append_tokens(sequence, 3 + 5 * sequence)
    for sequence, row in enumerate(tables.rows(range(3))):
        table = manager.sequences[sequence].block_table
        assert tables.table[row, : len(table)].tolist() == table


def test_who_is_needed_may_raise_and_who_is_not_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[str] = []

    def needed(event: BlockEvent) -> None:
        if event.block == 2:
            raise LookupError("no place")
        seen.append(event.kind)

    def optional(event: BlockEvent) -> None:
        raise ValueError("disk full")

    listener = FanOut(needed, optional)
    manager = KVBlockManager(3, 1, listener=listener)
    manager.create_sequence(0)
    manager.append_tokens(0, 2)
    assert seen == ["allocate", "allocate"]
    assert listener.listeners == []
    assert "gets no more of them" in caplog.text
    with pytest.raises(LookupError, match="no place"):
        manager.append_token(0)
    manager.check_invariants()
