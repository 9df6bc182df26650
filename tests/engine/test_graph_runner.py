"""Decode steps on persistent, padded buffers, without a GPU: here a "graph" repeats its computation on them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from minipaged import LLM, SamplingParams
from minipaged.engine.listeners import Poison
from minipaged.llm.memory import check_pool, gpu_pool_bytes
from minipaged.runner.graph_runner import GraphRunner, bucket_sizes
from minipaged.runner.warm_up import warm_up
from tiny import random_tokens

PROMPTS = [random_tokens(length, seed=length) for length in (1, 5, 16, 23, 37)]


def test_buckets_always_include_the_maximum() -> None:
    assert bucket_sizes(1) == [1]
    assert bucket_sizes(3) == [1, 2, 3]
    assert bucket_sizes(64)[:6] == [1, 2, 4, 8, 16, 24]
    for maximum in (1, 7, 100, 256, 1000):
        sizes = bucket_sizes(maximum)
        assert sizes[-1] == maximum
        assert sizes == sorted(set(sizes))


class Recorder:
    """A `Capture` for the CPU."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.fail_at = fail_at
        self.num_captures = 0

    def __call__(self, compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
        self.num_captures += 1
        compute()  # as CudaCapture: the step is computed once before its first replay
        if self.num_captures == self.fail_at:
            raise RuntimeError("operation not permitted when stream is capturing")
        return compute


def engine_with(folder: Path, recorder: Recorder | None, max_num_seqs: int = 7) -> LLM:
    llm = LLM(
        folder, backend="torch", block_size=4, num_blocks=64, max_model_len=100, max_num_seqs=max_num_seqs,
        max_num_batched_tokens=16, check_invariants=True,
    )  # fmt: skip
    torch.set_num_threads(1)
    llm.loaded.events.listeners.append(Poison(llm.loaded.caches))
    if recorder is not None:
        old = llm.engine.runner
        llm.engine.runner = GraphRunner(
            old.model, old.backend, old.caches, old.sampler, old.input_batch,
            max_seqs=max_num_seqs, max_model_len=100, capture=recorder,
        )  # fmt: skip
    return llm


def tokens_of(llm: LLM, **params: object) -> list[list[list[int]]]:
    params = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, "seed": 3, **params}
    outputs = llm.generate(PROMPTS, SamplingParams(**params), use_tqdm=False)
    return [[child.token_ids for child in output.outputs] for output in outputs]


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "n": 3, "top_k": 20, "top_p": 0.9}])
def test_replayed_steps_give_the_tokens_of_eager_ones(tiny_folder: Path, params: dict[str, object]) -> None:
    """Prefills, mixed steps, growing and shrinking batches, forks with copied blocks, NaN in every unused slot."""
    recorder = Recorder()
    llm = engine_with(tiny_folder, recorder)
    assert tokens_of(llm, **params) == tokens_of(engine_with(tiny_folder, None), **params)
    runner = llm.engine.runner
    assert isinstance(runner, GraphRunner)
    assert runner.num_replays > 10
    assert recorder.num_captures == len(runner.captured_sizes) <= len(runner.sizes)
    assert runner.failure is None


def test_steps_that_do_not_fit_run_eagerly(tiny_folder: Path) -> None:
    """Prompt log-probabilities and prefill never reach a graph; decodes after them do."""
    llm = engine_with(tiny_folder, Recorder())
    runner = llm.engine.runner
    assert isinstance(runner, GraphRunner)
    llm.generate(PROMPTS[3], SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    assert runner.num_replays == 0
    llm.generate(PROMPTS[3], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
    assert runner.num_replays == 3


@pytest.mark.parametrize("fail_at", [1, 2])
def test_a_failed_capture_falls_back_to_eager_steps(
    tiny_folder: Path, fail_at: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The step itself still gives its tokens, and nothing is captured again."""
    recorder = Recorder(fail_at)
    llm = engine_with(tiny_folder, recorder)
    params: dict[str, object] = {"temperature": 1.0, "n": 2}
    assert tokens_of(llm, **params) == tokens_of(engine_with(tiny_folder, None), **params)
    runner = llm.engine.runner
    assert isinstance(runner, GraphRunner)
    assert recorder.num_captures == fail_at
    assert "operation not permitted" in str(runner.failure)
    assert "decoding without CUDA graphs" in caplog.text


def test_a_slot_outside_the_pool_is_refused_before_anything_is_written(tiny_folder: Path) -> None:
    llm = engine_with(tiny_folder, Recorder())
    llm.loaded.events.listeners.pop()  # no poison: the blocks of a request that ends would change
    runner = llm.engine.runner
    assert isinstance(runner, GraphRunner)
    llm.engine.add_request("a", PROMPTS[1], SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
    llm.engine.step()
    before = [cache.key_cache.clone() for cache in runner.caches]
    runner.input_batch.num_slots = 1
    (output,) = llm.engine.step()
    assert output.outputs[0].finish_reason == "error"
    assert "do not all lie in the pool of 1" in str(output.outputs[0].error)
    assert runner.num_replays == 0
    for cache, old in zip(runner.caches, before, strict=True):
        assert torch.equal(cache.key_cache.nan_to_num(7), old.nan_to_num(7))


def test_all_sizes_can_be_captured_before_the_first_step(tiny_folder: Path) -> None:
    """What a capture computes is padding: no slot of the cache changes, and steps go on as ever."""
    recorder = Recorder()
    llm = engine_with(tiny_folder, recorder)
    runner = llm.engine.runner
    assert isinstance(runner, GraphRunner)
    before = [cache.key_cache.clone() for cache in runner.caches]
    runner.capture_all()
    assert runner.captured_sizes == runner.sizes == [1, 2, 4, 7]
    for cache, old in zip(runner.caches, before, strict=True):
        assert torch.equal(cache.key_cache.nan_to_num(7), old.nan_to_num(7))
    assert tokens_of(llm) == tokens_of(engine_with(tiny_folder, None))
    assert recorder.num_captures == 4


def test_warm_up_runs_the_largest_steps(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = engine_with(tiny_folder, None)
    model, seen = llm.loaded.model, []
    forward = model.forward

    def spy(token_ids: Tensor, plan: object, caches: object, rows: Tensor) -> Tensor:
        seen.append((len(token_ids), len(rows)))
        return forward(token_ids, plan, caches, rows)  # type: ignore[arg-type]

    monkeypatch.setattr(model, "forward", spy)
    warm_up(model, num_tokens=2 * model.max_model_len + 5, num_seqs=3, block_size=4)
    assert seen == [(2 * model.max_model_len + 5, 3), (3, 3)]


def test_pool_of_a_gpu() -> None:
    gib = 2**30
    assert gpu_pool_bytes(70 * gib, 80 * gib, 0.9) == 62 * gib
    with pytest.raises(ValueError, match=r"allows 72\.00 of 80\.00 GiB, and 75\.00 GiB are in use.*raise gpu_memory"):
        gpu_pool_bytes(5 * gib, 80 * gib, 0.9)
    check_pool(5 * gib, 5 * gib, "cuda:0")
    with pytest.raises(ValueError, match=r"pool of 6\.00 GiB does not fit: 5\.00 GiB .* lower num_blocks"):
        check_pool(6 * gib, 5 * gib, "cuda:0")
