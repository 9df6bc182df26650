"""A whole tiny model on the Triton back end, interpreted: `verify`, and the engine with replayed decode steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from minipaged import LLM, SamplingParams
from minipaged.engine.listeners import Poison
from minipaged.runner.graph_runner import GraphRunner
from minipaged.runner.warm_up import warm_up
from minipaged.verify.run import verify_model
from tiny import random_tokens


def prompts_of(*lengths: int) -> list[list[int]]:
    return [random_tokens(length, seed=length, vocab_size=64) for length in lengths]


def test_verify_passes(tiny_folder: Path) -> None:
    """Every operation of every layer against Hugging Face, logits, greedy tokens; block size 3."""
    report = verify_model(
        tiny_folder, backend="triton", device="cpu", block_size=3, num_tokens=4, prompts=prompts_of(11, 6)
    )
    assert report.backend == "triton"
    assert report.passed, report.to_dict()["bugs"]
    assert len(report.tokens) == 8
    assert {result.op for result in report.ops} >= {"attention", "q_rope", "k_rope", "kv_write", "mlp_gate_up"}


@pytest.mark.slow
def test_verify_passes_in_bfloat16(tiny_folder: Path) -> None:
    """The interpreter cuts bfloat16 off instead of rounding it, so only float32 is judged; it must run."""
    report = verify_model(
        tiny_folder, backend="triton", device="cpu", dtype="bfloat16", num_tokens=2, prompts=prompts_of(7)
    )
    assert all(torch.isfinite(torch.tensor(result.error)) for result in report.ops)


def test_decode_steps_can_be_replayed(tiny_folder: Path) -> None:
    """One plan, made from numbers alone, serves every later step of its size: kernels read lengths and tables."""
    options = {"block_size": 4, "num_blocks": 32, "max_model_len": 60, "max_num_seqs": 3, "max_num_batched_tokens": 16}
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    prompts = prompts_of(1, 9, 14)
    wanted = LLM(tiny_folder, backend="torch", **options).generate(prompts, params, use_tqdm=False)

    llm = LLM(tiny_folder, backend="triton", **options)
    llm.loaded.events.listeners.append(Poison(llm.loaded.caches))
    backend, plain = llm.loaded.model.backend, llm.engine.runner
    assert backend.capturable
    warm_up(llm.loaded.model, num_tokens=17, num_seqs=3, block_size=4)
    plans: list[object] = []
    planned = backend.plan

    def capture(compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Remembers the plan that the first run makes, as a graph would remember its launches."""
        compute()
        frozen = plans[-1]

        def replay() -> Tensor:
            backend.plan = lambda batch: frozen
            try:
                return compute()
            finally:
                backend.plan = recorded

        return replay

    def recorded(batch: object) -> object:
        plans.append(planned(batch))
        return plans[-1]

    backend.plan = recorded
    llm.engine.runner = GraphRunner(
        plain.model, backend, plain.caches, plain.sampler, plain.input_batch,
        max_seqs=3, max_model_len=60, capture=capture,
    )  # fmt: skip
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in wanted]
    assert llm.engine.runner.num_replays >= 4
