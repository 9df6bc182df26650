"""The published dense Qwen3 sizes, and random weights for them: speed can be measured without downloading anything."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from minipaged.model.config import ModelConfig
from minipaged.model.parameters import parameters


def _shape(hidden: int, intermediate: int, layers: int, heads: int, *, tied: bool) -> ModelConfig:
    return ModelConfig(
        vocab_size=151936,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        rms_norm_eps=1e-6,
        tie_word_embeddings=tied,
        rope_theta=1e6,
        dtype="bfloat16",
    )


# From the config.json of each model on the Hugging Face Hub.
QWEN3_SHAPES: dict[str, ModelConfig] = {
    "qwen3-0.6b": _shape(1024, 3072, 28, 16, tied=True),
    "qwen3-1.7b": _shape(2048, 6144, 28, 16, tied=True),
    "qwen3-4b": _shape(2560, 9728, 36, 32, tied=True),
    "qwen3-8b": _shape(4096, 12288, 36, 32, tied=False),
    "qwen3-14b": _shape(5120, 17408, 40, 40, tied=False),
    "qwen3-32b": _shape(5120, 25600, 64, 64, tied=False),
}
POOL = 4_194_301  # a prime, so that rows of no matrix repeat in step


class RandomWeights:
    """A `TensorSource` without a file: normal numbers of standard deviation 0.02, norm weights around 1; the same
    seed gives the same model.

    Drawing a billion normal numbers takes longer than any benchmark, so tensors are cut from one pool of `POOL`
    numbers, each from its own start. One tensor exists at a time.
    """

    def __init__(self, config: ModelConfig, *, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> None:
        self._parameters = parameters(config)
        self._seed = seed
        self.dtype = dtype
        generator = torch.Generator().manual_seed(seed)
        self._pool = torch.empty(POOL).normal_(0, 0.02, generator=generator).to(dtype)

    def tensor(self, name: str) -> Tensor:
        """float [shape of `name`]; KeyError for a name that the config does not have."""
        shape = self._parameters[name].shape
        tensor = torch.empty(shape, dtype=self.dtype)
        flat = tensor.view(-1)
        start = zlib.crc32(f"{self._seed} {name}".encode()) % POOL
        filled = 0
        while filled < flat.numel():
            part = self._pool[start : start + flat.numel() - filled]
            flat[filled : filled + part.numel()] = part
            filled, start = filled + part.numel(), 0
        return tensor.add_(1) if name.endswith("norm.weight") else tensor
