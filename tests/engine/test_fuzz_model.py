"""The fuzz of `test_fuzz.py` with the real model: paged K/V, input batch, sampler, NaN poison.

Each row of logits from which a token was drawn is compared with Hugging Face's for the same history, so that random
children and aborted requests are checked as well as greedy ones.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
import torch
from scenario import NUM_BLOCKS, Scenario, make_scenario

from minipaged import LLM
from minipaged.engine.config import EngineConfig
from minipaged.engine.engine import Engine
from minipaged.engine.listeners import Poison
from minipaged.errors import RequestTooLargeError
from minipaged.kv import FanOut, KVBlockManager, PagedKVCache
from minipaged.model.qwen3 import Qwen3Model
from minipaged.runner.input_batch import InputBatch
from minipaged.runner.model_runner import ModelRunner
from minipaged.sampling.sampler import Sampler
from tiny import clear_positions, hf_logits, load_hf

VOCAB = 320


@pytest.fixture(scope="module")
def model(tiny_folder: Path) -> Iterator[Qwen3Model]:
    with LLM(tiny_folder, num_blocks=40) as llm:
        torch.set_num_threads(1)
        yield llm.loaded.model


class ModelRig:
    """One scenario on the tiny model, with the logits of every drawn token kept."""

    def __init__(self, scenario: Scenario, model: Qwen3Model) -> None:
        self.scenario, size = scenario, scenario.block_size
        config = model.config
        caches = [
            PagedKVCache(NUM_BLOCKS, config.num_key_value_heads, size, config.head_dim, dtype=torch.float32)
            for _ in range(config.num_hidden_layers)
        ]
        input_batch = InputBatch(
            max_tokens=64, max_seqs=4, max_blocks=NUM_BLOCKS, block_size=size, num_slots=NUM_BLOCKS * size
        )
        manager = KVBlockManager(
            NUM_BLOCKS,
            size,
            enable_prefix_caching=scenario.caching,
            eviction_policy=scenario.eviction,
            listener=FanOut(input_batch.tables.on_event, Poison(caches)),
        )
        self.runner = ModelRunner(model, model.backend, caches, Sampler(VOCAB), input_batch)
        self.logits: dict[int, list[torch.Tensor]] = {}
        self._spy()
        limits = EngineConfig(
            max_num_seqs=scenario.max_num_seqs,
            max_num_batched_tokens=scenario.budget,
            vocab_size=VOCAB,
            scheduling_policy=scenario.policy,
            check_invariants=True,
        )
        self.engine = Engine(self.runner, manager, limits)
        self.manager = manager

    def _spy(self) -> None:
        sample, execute = self.runner.sampler.sample, self.runner.execute

        def sample_and_keep(logits, sequences):
            for row, sequence in zip(logits, sequences, strict=True):
                kept = self.logits.setdefault(sequence.sequence_id, [])
                if len(kept) == sequence.num_generated:
                    kept.append(row.clone())
            return sample(logits, sequences)

        def execute_and_fail(plan):
            result = execute(plan)
            if self.engine.num_steps in self.scenario.failing_steps:
                raise RuntimeError("injected, after all writes")
            return result

        self.runner.sampler.sample = sample_and_keep
        self.runner.execute = execute_and_fail

    def run(self, reference: object) -> tuple[int, int]:
        """Play it and compare; returns (positions compared, of these with a clear winner)."""
        requests, last, step = {}, {}, 0
        jobs = self.scenario.jobs
        end = max([job.arrival for job in jobs] + [job.abort or 0 for job in jobs])
        while step <= end or self.engine.has_unfinished():
            for job in jobs:
                if job.abort == step:
                    self.engine.abort(job.request_id)
                if job.arrival == step:
                    try:
                        self.engine.add_request(job.request_id, job.prompt, job.params, cache_salt=job.salt)
                        requests[job.request_id] = self.engine._live[job.request_id]
                    except RequestTooLargeError:
                        continue
            for output in self.engine.step():
                last[output.request_id] = output
            step += 1
        assert self.manager.num_available_blocks == NUM_BLOCKS
        assert not self.manager.sequences
        return self._compare(requests, last, reference)

    def _compare(self, requests: dict, last: dict, reference: object) -> tuple[int, int]:
        compared = clear_ones = 0
        for request_id, output in last.items():
            for child, completion in zip(requests[request_id].sequences, output.outputs, strict=True):
                tokens = completion.token_ids
                assert completion.finish_reason != "error" or completion.error.endswith("after all writes")
                if not tokens:
                    continue
                wanted = hf_logits(reference, [*output.prompt_token_ids, *tokens])[-len(tokens) - 1 : -1]
                got = torch.stack(self.logits[child.sequence_id][: len(tokens)])
                torch.testing.assert_close(got, wanted, atol=1e-4, rtol=0)
                if child.params.greedy and not child.params.min_tokens:
                    clear = clear_positions(wanted)
                    assert torch.equal(wanted.argmax(-1)[clear], torch.tensor(tokens)[clear])
                    clear_ones += int(clear.sum())
                compared += len(tokens)
        return compared, clear_ones


def fuzz(model: Qwen3Model, reference: object, seconds: float, seed: int) -> None:
    end = time.monotonic() + seconds
    compared = clear = preemptions = hits = 0
    while time.monotonic() < end:
        scenario = make_scenario(Random(seed))
        rig = ModelRig(scenario, model)
        try:
            positions, with_winner = rig.run(reference)
        except BaseException as error:
            error.add_note(f"seed {seed}") if hasattr(error, "add_note") else None
            raise
        compared, clear = compared + positions, clear + with_winner
        stats = rig.engine.stats()
        preemptions, hits = preemptions + stats.preemptions, hits + stats.prefix_hit_tokens
        seed += 1
    assert compared > 300
    assert clear > 50
    assert preemptions > 0
    assert hits > 0


def test_model_fuzz_for_a_fixed_time(model: Qwen3Model, tiny_folder: Path) -> None:
    """C07, C10, C13, C17, C19: a NaN from a slot that was not written, or anybody else's K/V, is at least 1e-4 away."""
    fuzz(model, load_hf(tiny_folder), float(os.environ.get("MINIPAGED_SHORT_FUZZ_SECONDS", "20")), 1000)


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_long_model_fuzz(model: Qwen3Model, tiny_folder: Path) -> None:
    fuzz(model, load_hf(tiny_folder), float(os.environ.get("MINIPAGED_FUZZ_SECONDS", "1800")), int(time.time()) << 20)
