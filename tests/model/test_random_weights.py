"""Published sizes, and models made of random numbers without a file."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from driving import Driver

from minipaged.model.config import ModelConfig
from minipaged.model.parameters import parameters, weight_bytes_per_step
from minipaged.model.random_weights import POOL, QWEN3_SHAPES, RandomWeights
from minipaged.model.weights import load_model
from minipaged.ops.torch.backend import TorchBackend
from tiny import TINY, random_tokens, tiny_config

SMALL = tiny_config()


def count(config: ModelConfig) -> int:
    return sum(math.prod(parameter.shape) for parameter in parameters(config).values())


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("qwen3-0.6b", 0.596),
        ("qwen3-1.7b", 1.721),
        ("qwen3-4b", 4.022),
        ("qwen3-8b", 8.191),
        ("qwen3-14b", 14.768),
        ("qwen3-32b", 32.762),
    ],
)
def test_published_sizes_have_their_published_number_of_parameters(name: str, billions: float) -> None:
    assert count(QWEN3_SHAPES[name]) / 1e9 == pytest.approx(billions, abs=6e-4)


def test_parameter_names_are_those_of_transformers() -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    for tied, bias in ((True, False), (False, True)):
        ours = parameters(replace(SMALL, tie_word_embeddings=tied, attention_bias=bias))
        theirs = Qwen3ForCausalLM(Qwen3Config(**{**TINY, "tie_word_embeddings": tied, "attention_bias": bias}))
        assert {name: want.shape for name, want in ours.items()} == {
            name: tuple(parameter.shape) for name, parameter in theirs.named_parameters()
        }


def test_bytes_a_decode_step_reads() -> None:
    """1.192 GB for the 0.6B in bf16; an untied model does not read its embedding table."""
    assert weight_bytes_per_step(QWEN3_SHAPES["qwen3-0.6b"], 2) == pytest.approx(1.192e9, rel=1e-3)
    untied = QWEN3_SHAPES["qwen3-8b"]
    assert weight_bytes_per_step(untied, 2) == 2 * (count(untied) - 151936 * 4096)


def test_tensors_are_random_and_repeatable() -> None:
    config = QWEN3_SHAPES["qwen3-0.6b"]
    source, again, other = (RandomWeights(config, seed=seed) for seed in (1, 1, 2))
    name = "model.layers.3.mlp.up_proj.weight"
    tensor = source.tensor(name)
    assert tensor.shape == (3072, 1024)
    assert tensor.dtype == torch.bfloat16
    assert torch.equal(tensor, again.tensor(name))
    assert not torch.equal(tensor, other.tensor(name))
    assert not torch.equal(tensor, source.tensor("model.layers.4.mlp.up_proj.weight"))
    assert tensor.float().std().item() == pytest.approx(0.02, rel=0.01)
    assert tensor.float().mean().item() == pytest.approx(0, abs=1e-4)
    norm = source.tensor("model.norm.weight").float()
    assert norm.mean().item() == pytest.approx(1, abs=0.01)
    assert norm.std().item() > 0.005
    with pytest.raises(KeyError):
        source.tensor("lm_head.weight")


def test_tensor_larger_than_the_pool_is_filled() -> None:
    """The embedding of the 0.6B is 37 pools long; no row repeats another."""
    table = RandomWeights(QWEN3_SHAPES["qwen3-0.6b"]).tensor("model.embed_tokens.weight")
    assert table.numel() > 3 * POOL
    assert table[-1000:].float().std().item() == pytest.approx(0.02, rel=0.05)
    rows = table[::37, :8].float()
    assert torch.unique(rows, dim=0).shape[0] == rows.shape[0]


def test_a_model_runs_without_a_file() -> None:
    model = load_model(SMALL, RandomWeights(SMALL), TorchBackend(), activation_dtype=torch.float32, progress=False)
    logits = Driver(model, 4).step({0: random_tokens(20), 1: random_tokens(3, seed=1)})
    assert logits.shape == (23, 320)
    assert torch.isfinite(logits).all()
    assert logits.std() > 0.01
