"""The way an engine is set up on a GPU (warm-up, pool from measured memory, captured decode steps), on CPU tensors.

Only what asks CUDA itself is replaced: the free memory, and the capture of a graph.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from minipaged import LLM, SamplingParams
from minipaged.llm import loading
from minipaged.runner import graph_runner
from minipaged.runner.graph_runner import GraphRunner
from minipaged.runner.model_runner import ModelRunner

OPTIONS = {"backend": "triton", "block_size": 4, "max_model_len": 40, "max_num_seqs": 3, "max_num_batched_tokens": 16}
BLOCK_BYTES = 2 * 2 * 32 * 4 * 4  # K and V, heads, head_dim, tokens, float32; one layer
PARAMS = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


class Repeat:
    """A capture that computes again at every replay."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __call__(self, compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
        compute()
        return compute


@pytest.fixture
def warmed(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, int]]:
    """The warm-up runs that were made; a GPU of 100 blocks, 70 of which are free after them."""
    runs: list[dict[str, int]] = []
    warm_up = loading.warm_up

    def spy(model: object, **sizes: int) -> None:
        runs.append(sizes)
        warm_up(model, **sizes)  # type: ignore[arg-type]

    monkeypatch.setattr(loading, "warm_up", spy)
    monkeypatch.setattr(loading, "_is_gpu", lambda device: True)
    monkeypatch.setattr(loading, "_gpu_memory", lambda device: (70 * BLOCK_BYTES, 100 * BLOCK_BYTES))
    monkeypatch.setattr(graph_runner, "CudaCapture", Repeat)
    return runs


def test_an_engine_is_set_up_as_on_a_gpu(tiny_folder: Path, warmed: list[dict[str, int]]) -> None:
    """The largest steps run first, then the pool takes what is free less the share that stays; decodes are replayed."""
    llm = LLM(tiny_folder, gpu_memory_utilization=0.5, **OPTIONS)
    assert warmed == [{"num_tokens": 17, "num_seqs": 3, "block_size": 4}]
    assert llm.engine.block_manager.num_physical_blocks == 20
    runner = llm.engine.runner
    assert isinstance(runner, GraphRunner)
    prompts = [[5, 6, 7], [1, 2, 3, 4, 5, 6, 7, 8, 9]]
    outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
    plain = LLM(tiny_folder, num_blocks=40, **{**OPTIONS, "backend": "torch"})
    expected = plain.generate(prompts, PARAMS, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in expected]
    assert runner.num_replays >= 2


def test_what_does_not_fit_says_so(
    tiny_folder: Path, warmed: list[dict[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"gpu_memory_utilization = 0\.2 allows .* nothing is left for the KV pool"):
        LLM(tiny_folder, gpu_memory_utilization=0.2, **OPTIONS)
    with pytest.raises(MemoryError, match=r"pool of .* does not fit: .* lower num_blocks, block_size or kv_cache"):
        LLM(tiny_folder, num_blocks=71, **OPTIONS)
    monkeypatch.setenv(loading.GRAPHS_VARIABLE, "0")
    assert type(LLM(tiny_folder, num_blocks=70, **OPTIONS).engine.runner) is ModelRunner
    assert len(warmed) == 3
