"""C54: how many calls a step makes does not grow with the length of the sequences (they are counted, not timed)."""

from __future__ import annotations

import cProfile
import pstats

import torch

from minipaged.engine.config import EngineConfig
from minipaged.engine.engine import Engine
from minipaged.kv import FanOut, KVBlockManager
from minipaged.ops.backend import AttentionBatch, AttentionPlan
from minipaged.runner.input_batch import InputBatch
from minipaged.runner.model_runner import ModelRunner
from minipaged.sampling.sampler import Sampler
from minipaged.sampling_params import SamplingParams

VOCAB = 64


class FixedLogits:
    """A model, and a back end, that compute nothing."""

    def __init__(self, rows: int) -> None:
        self.logits = torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(0))

    def forward(self, token_ids, plan, caches, logits_rows=None):
        return self.logits[: len(logits_rows)]

    def plan(self, batch: AttentionBatch) -> AttentionPlan:
        return AttentionPlan(batch)


def make_engine(num_seqs: int, max_len: int) -> Engine:
    blocks_each = -(-max_len // 16)
    input_batch = InputBatch(
        max_tokens=512,
        max_seqs=num_seqs,
        max_blocks=blocks_each,
        block_size=16,
        num_slots=num_seqs * blocks_each * 16,
    )
    manager = KVBlockManager(
        num_seqs * blocks_each, 16, enable_prefix_caching=True, listener=FanOut(input_batch.tables.on_event)
    )
    model = FixedLogits(num_seqs)
    config = EngineConfig(max_num_seqs=num_seqs, vocab_size=VOCAB)
    return Engine(ModelRunner(model, model, [], Sampler(VOCAB), input_batch), manager, config)


def calls_in(engine: Engine, steps: int) -> int:
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(steps):
        engine.step()
    profile.disable()
    return pstats.Stats(profile).total_calls


def test_calls_per_step_do_not_grow_with_length() -> None:
    """8 sequences x 500 tokens: 64 steps at the end make as many calls as 64 at the beginning."""
    engine = make_engine(8, 600)
    for number in range(8):
        engine.add_request(str(number), [number] * 3, SamplingParams(max_tokens=500, ignore_eos=True, seed=1))
    engine.step()
    early = calls_in(engine, 64)
    for _ in range(300):
        engine.step()
    late = calls_in(engine, 64)
    assert late <= early * 1.01
    assert engine.stats().running == 8


def test_the_block_tables_of_a_step_are_those_of_the_manager() -> None:
    """The rows that are kept up to date by events equal the manager's tables at every step: forks, copies, preemptions,
    prefix hits.
    """
    num_blocks, block_size = 12, 4
    input_batch = InputBatch(
        max_tokens=64, max_seqs=8, max_blocks=num_blocks, block_size=block_size, num_slots=num_blocks * block_size
    )
    manager = KVBlockManager(num_blocks, block_size, enable_prefix_caching=True, listener=input_batch.tables.on_event)
    model = FixedLogits(64)
    runner = ModelRunner(model, model, [], Sampler(VOCAB), input_batch)
    runner.backend.copy_blocks = lambda caches, pairs: copies.extend(pairs)
    copies: list[tuple[int, int]] = []
    compared = 0

    def forward(token_ids, plan, caches, logits_rows=None):
        nonlocal compared
        batch: AttentionBatch = plan.batch
        starts = batch.query_start_loc.tolist()
        assert starts[-1] == len(token_ids) == len(batch.positions) == len(batch.slot_mapping)
        rows = engine_plan[0].rows
        for number, row in enumerate(rows):
            state = manager.sequences[row.sequence.sequence_id]
            length = row.start + row.num_tokens
            assert batch.block_tables[number, : len(state.block_table)].tolist() == state.block_table
            assert batch.seq_lens[number] == length == state.sequence_length
            tokens = slice(starts[number], starts[number + 1])
            assert batch.positions[tokens].tolist() == list(range(row.start, length))
            assert batch.slot_mapping[tokens].tolist() == row.slots
            assert token_ids[tokens].tolist() == row.sequence.token_ids[row.start : length]
            compared += 1
        assert batch.max_seq_len == max(batch.seq_lens.tolist())
        assert batch.max_query_len == max(row.num_tokens for row in rows)
        return model.logits[: len(logits_rows)]

    engine_plan: list = []
    execute = runner.execute

    def spy(plan):
        engine_plan[:] = [plan]
        return execute(plan)

    model.forward = forward
    runner.execute = spy
    engine = Engine(runner, manager, EngineConfig(max_num_seqs=6, max_num_batched_tokens=7, check_invariants=True))
    for number in range(12):
        params = SamplingParams(n=1 + number % 3, max_tokens=14, seed=number, temperature=1.0)
        engine.add_request(str(number), [1, 2, 3, 4, 5, number % 2, 7][: 4 + number % 4], params)
    while engine.has_unfinished():
        engine.step()
    stats = engine.stats()
    assert compared > 200
    assert copies
    assert stats.preemptions
    assert stats.prefix_hit_tokens
    assert input_batch.tables._row_of == {}
