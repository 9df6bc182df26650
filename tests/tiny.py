"""Tiny random Qwen3 folders written by transformers, and transformers as the oracle (the rig of the cases).

Everything that Hugging Face initialises to a constant is randomised: with q_norm and k_norm weights of 1, "normalise,
then rotate" and "rotate, then normalise" are the same function, and a wrong model would pass.
"""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from minipaged.model.config import ModelConfig
from minipaged.model.random_weights import QWEN3_SHAPES

TINY: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # heads * head_dim != hidden_size, as in Qwen3-0.6B
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "eos_token_id": 300,
}


def tiny_config() -> ModelConfig:
    """The shape of `TINY` as this package's config: a published one made small."""
    ours = {field.name for field in fields(ModelConfig)}
    return replace(QWEN3_SHAPES["qwen3-0.6b"], **{name: value for name, value in TINY.items() if name in ours})


def randomise_(model: torch.nn.Module, seed: int = 0) -> None:
    """Random values everywhere: matrices keep the scale of their input, norms are in [0.5, 1.5], biases far from 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if parameter.dim() == 1 and name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5, generator=generator)
            elif parameter.dim() == 1 or "embed_tokens" in name or "lm_head" in name:
                parameter.normal_(0, 0.3, generator=generator)
            else:
                parameter.normal_(0, 1.2 / parameter.shape[1] ** 0.5, generator=generator)


def make_tiny_folder(
    folder: Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "5GB",
    edit_config: dict[str, Any] | None = None,
    generation_config: dict[str, Any] | None = None,
    **overrides: Any,
) -> Path:
    """Write a random Qwen3 to `folder` with `save_pretrained` and return it; there is no tokenizer.

    `overrides` are fields of `Qwen3Config`. `edit_config` is merged into config.json afterwards, as a person would
    edit it (None removes a field). `generation_config` replaces generation_config.json.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM

    model = Qwen3ForCausalLM(Qwen3Config(**{**TINY, **overrides}))
    randomise_(model, seed)
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    if edit_config:
        edit_json(folder / "config.json", edit_config)
    if generation_config is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation_config))
    return folder


def edit_json(path: Path, changes: dict[str, Any]) -> None:
    """Merge `changes` into a JSON object file; a value of None removes the key."""
    content = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in content.items() if changes.get(key, 0) is not None}))


def load_hf(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The oracle: transformers' model with eager attention."""
    from transformers import Qwen3ForCausalLM

    return Qwen3ForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()


@torch.no_grad()
def hf_logits(model: Any, token_ids: list[int]) -> torch.Tensor:
    """Logits of every position in one uncached pass, float32 [len(token_ids), vocab]."""
    return model(torch.tensor([token_ids]), use_cache=False).logits[0].float()


def random_tokens(count: int, *, seed: int = 0, vocab_size: int = 320) -> list[int]:
    return torch.randint(0, vocab_size, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def clear_positions(logits: torch.Tensor, margin: float = 1e-3) -> torch.Tensor:
    """bool [T]: the largest logit leads the second by more than `margin`, so equal greedy tokens may be demanded."""
    top = logits.topk(2, dim=-1).values
    return (top[..., 0] - top[..., 1]) > margin
