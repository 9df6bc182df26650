"""`ModelSource`: where a model comes from, as one object: a folder, or a published shape with random weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from minipaged.model.checkpoint import Checkpoint
from minipaged.model.config import ModelConfig
from minipaged.model.generation_config import GenerationDefaults
from minipaged.model.parameters import TensorSource
from minipaged.model.random_weights import QWEN3_SHAPES, RandomWeights


@dataclass(frozen=True)
class ModelSource:
    """name: for people. dtype: of the checkpoint. folder: where config, weights and perhaps a tokenizer lie, None =
    nowhere.
    """

    name: str
    config: ModelConfig
    tensors: TensorSource
    dtype: torch.dtype
    generation_defaults: GenerationDefaults
    folder: Path | None = None

    @classmethod
    def from_folder(cls, folder: str | Path) -> ModelSource:
        """config.json and safetensors, checked against each other. Errors as `ModelConfig.from_folder` and
        `Checkpoint`.
        """
        folder = Path(folder)
        config = ModelConfig.from_folder(folder)
        checkpoint = Checkpoint(folder)
        checkpoint.check(config)
        stated = getattr(torch, config.dtype) if config.dtype else checkpoint.dtype
        return cls(folder.name, config, checkpoint, stated, GenerationDefaults.from_folder(folder, config), folder)

    @classmethod
    def random(cls, shape: str, *, seed: int = 0) -> ModelSource:
        """A shape of `QWEN3_SHAPES` with random bfloat16 weights and no tokenizer: nothing is read or downloaded.

        ValueError for an unknown shape.
        """
        config = shape_config(shape)
        weights = RandomWeights(config, seed=seed)
        return cls(f"{shape.lower()} (random weights)", config, weights, torch.bfloat16, GenerationDefaults())


def shape_config(shape: str) -> ModelConfig:
    """The config of a shape of `QWEN3_SHAPES`, upper or lower case. ValueError for an unknown one."""
    config = QWEN3_SHAPES.get(shape.lower())
    if config is None:
        raise ValueError(f"shape {shape!r} is unknown; choose one of {', '.join(QWEN3_SHAPES)}")
    return config
