"""config.json in all its spellings, and the refusals; inverse frequencies against transformers' own."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from minipaged.errors import CheckpointError, UnsupportedModelError
from minipaged.model.config import ModelConfig
from minipaged.model.rope import inverse_frequencies, rotary_table
from tiny import TINY, edit_json, load_hf, make_tiny_folder

BASE: dict[str, Any] = {
    **TINY,
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "dtype": "bfloat16",
}


def config(**changes: Any) -> ModelConfig:
    """BASE with changes; a value of `...` removes the field."""
    return ModelConfig.from_dict({key: value for key, value in {**BASE, **changes}.items() if value is not ...})


def test_reads_what_transformers_writes(tmp_path: Path) -> None:
    """C26: head_dim is its own field, not hidden_size / heads."""
    read = ModelConfig.from_folder(make_tiny_folder(tmp_path, attention_bias=True, tie_word_embeddings=False))
    assert (read.hidden_size, read.num_attention_heads, read.head_dim) == (64, 4, 32)
    assert (read.num_key_value_heads, read.intermediate_size, read.num_hidden_layers) == (2, 96, 2)
    assert (read.vocab_size, read.max_position_embeddings, read.rms_norm_eps) == (320, 512, 1e-6)
    assert read.attention_bias is True
    assert read.tie_word_embeddings is False
    assert (read.dtype, read.eos_token_ids, read.rope_theta) == ("float32", (300,), 10000.0)


def test_kv_bytes_use_head_dim() -> None:
    """C26, and the article: Qwen3-0.6B keeps 112 KiB per token in bf16."""
    qwen = config(num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8, head_dim=128, hidden_size=1024)
    assert qwen.kv_bytes_per_token(2) == 112 * 1024


def test_defaults_for_absent_and_null_fields() -> None:
    absent = config(num_key_value_heads=..., head_dim=..., max_position_embeddings=..., rms_norm_eps=..., dtype=...)
    null = config(num_key_value_heads=None, head_dim=None, max_position_embeddings=None, rms_norm_eps=None, dtype=None)
    assert absent == null
    assert (absent.num_key_value_heads, absent.head_dim, absent.dtype) == (4, 128, None)
    assert (absent.max_position_embeddings, absent.rms_norm_eps) == (32768, 1e-6)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": ..., "torch_dtype": "float16"}, "float16"),
        ({"dtype": "torch.float32"}, "float32"),
        ({"dtype": "auto"}, None),
    ],
)
def test_dtype_under_both_names(fields: dict[str, Any], expected: str | None) -> None:
    assert config(**fields).dtype == expected


THETA_SPELLINGS: dict[str, dict[str, Any]] = {
    "top level int": {"rope_theta": 1000000},
    "top level float": {"rope_theta": 1e6},
    "top level string": {"rope_theta": "1000000"},
    "rope_parameters": {"rope_theta": ..., "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"}},
    "rope_parameters string": {"rope_theta": ..., "rope_parameters": {"rope_theta": "1e6", "rope_type": "default"}},
    "rope_parameters without type": {"rope_theta": ..., "rope_parameters": {"rope_theta": 1e6}},
    "rope_parameters wins": {"rope_theta": 5, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
    "rope_parameters without theta": {"rope_theta": 1e6, "rope_parameters": {"rope_type": "default"}},
    "rope_scaling null": {"rope_theta": 1e6, "rope_scaling": None},
    "theta null inside": {"rope_theta": 1e6, "rope_parameters": {"rope_theta": None, "rope_type": "default"}},
}


@pytest.mark.parametrize("spelling", THETA_SPELLINGS)
def test_theta_is_found_wherever_it_is(spelling: str) -> None:
    """C28: the second inverse frequency at head_dim 128 is 0.8058 (0.8660 would be theta 10 000)."""
    read = config(head_dim=128, **THETA_SPELLINGS[spelling])
    assert read.rope_theta == 1e6
    assert isinstance(read.rope_theta, float)
    frequencies, factor = inverse_frequencies(read)
    assert frequencies[1].item() == pytest.approx(0.8058, abs=5e-5)
    assert factor == 1.0


def test_absent_theta_is_transformers_default_and_said(caplog: pytest.LogCaptureFixture) -> None:
    """C28: nothing gives theta: transformers uses 10 000; so do we, but not in silence."""
    with caplog.at_level(logging.WARNING, "minipaged"):
        read = config(head_dim=128, rope_theta=...)
    assert read.rope_theta == 10_000.0
    assert inverse_frequencies(read)[0][1].item() == pytest.approx(0.8660, abs=5e-5)
    assert [record.message for record in caplog.records if "rope_theta" in record.message and "10000" in record.message]


YARNS: dict[str, dict[str, Any]] = {
    "plain": {"factor": 4.0, "original_max_position_embeddings": 128},
    "no ramp rounding": {"factor": 4.0, "original_max_position_embeddings": 128, "truncate": False},
    "betas": {"factor": 2.5, "original_max_position_embeddings": 4096, "beta_fast": 16, "beta_slow": 2},
    "attention factor": {"factor": 8.0, "original_max_position_embeddings": 256, "attention_factor": 1.25},
    "mscale": {"factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 0.7, "mscale_all_dim": 1.0},
    "mscale alone": {"factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 0.7},
    "original absent": {"factor": 2.0},
    "factor one": {"factor": 1.0, "original_max_position_embeddings": 512},
    "tiny original": {"factor": 4.0, "original_max_position_embeddings": 4},
    "integer factor": {"factor": 4, "original_max_position_embeddings": 128},
}


@pytest.mark.parametrize("head_dim", [32, 128])
@pytest.mark.parametrize("theta", [10000.0, 1e6])
@pytest.mark.parametrize("name", YARNS)
@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling rope_type", "rope_scaling type"])
def test_yarn_equals_transformers(name: str, theta: float, head_dim: int, spelling: str) -> None:
    """Bit for bit: the oracle is transformers' rotary module, built from the same config.json content."""
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    where, kind = {
        "rope_parameters": ("rope_parameters", "rope_type"),
        "rope_scaling rope_type": ("rope_scaling", "rope_type"),
        "rope_scaling type": ("rope_scaling", "type"),
    }[spelling]
    raw = {**BASE, "head_dim": head_dim, "rope_theta": theta, where: {kind: "yarn", **YARNS[name]}}
    oracle = Qwen3RotaryEmbedding(Qwen3Config(**json.loads(json.dumps(raw))))
    assert oracle.rope_type == "yarn"
    ours = ModelConfig.from_dict(raw)
    frequencies, factor = inverse_frequencies(ours)
    assert torch.equal(frequencies, oracle.inv_freq)
    assert factor == oracle.attention_scaling

    cos, sin = oracle(torch.zeros(1), torch.arange(600)[None])
    table = rotary_table(ours, 600)
    assert table.cos.shape == (600, head_dim // 2)
    assert torch.equal(table.cos, cos[0, :, : head_dim // 2])
    assert torch.equal(table.sin, sin[0, :, : head_dim // 2])


def test_default_table_equals_transformers() -> None:
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    cos, sin = Qwen3RotaryEmbedding(Qwen3Config(**BASE))(torch.zeros(1), torch.arange(40960)[None])
    table = rotary_table(config(), 40960)
    assert table.cos.dtype == torch.float32
    assert torch.equal(table.cos, cos[0, :, :16])
    assert torch.equal(table.sin, sin[0, :, :16])


YARN = {"factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize("place", ["top", "scaling"])
def test_scaling_beside_rope_parameters_is_what_transformers_makes_of_it(key: str, place: str) -> None:
    """A model card's `rope_scaling` snippet pasted into a config of the newer form."""
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    raw: dict[str, Any] = {
        **BASE,
        "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
        "rope_scaling": {key: "yarn", **YARN, **({"rope_theta": 1e6} if place == "scaling" else {})},
    }
    raw["rope_theta"] = 1e6 if place == "top" else None
    raw = {name: value for name, value in raw.items() if value is not None}
    ours = ModelConfig.from_dict(raw)
    oracle = Qwen3RotaryEmbedding(Qwen3Config(**raw))
    frequencies, factor = inverse_frequencies(ours)
    assert oracle.rope_type == "yarn"
    assert torch.equal(frequencies, oracle.inv_freq)
    assert factor == oracle.attention_scaling


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope_scaling": {"type": "yarn", **YARN}}, "rope_theta is 1000000.0 in rope_parameters and None beside"),
        ({"rope_scaling": {"type": "yarn", **YARN}, "rope_theta": 5e5}, "and 500000.0 beside rope_scaling"),
        (
            {"rope_scaling": {"type": "linear", "rope_type": "yarn", "rope_theta": 1e6, **YARN}},
            "has rope_type 'yarn' and type 'linear'",
        ),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0, "rope_theta": 1e6}}, "rope type 'dynamic' is not"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "rope_theta": 1e6}}, "rope type 'linear' is not"),
        ({"rope_scaling": {"type": "llama3", "factor": 2.0, "rope_theta": 1e6}}, "rope type 'llama3' is not"),
        (
            {
                "rope_scaling": {"type": "default", "rope_theta": 1e6},
                "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, **YARN},
            },
            "rope_scaling is 'default' and rope_parameters 'yarn'",
        ),
        (
            {
                "rope_scaling": {"type": "yarn", "rope_theta": 1e6, **YARN},
                "rope_parameters": {"rope_type": "linear", "rope_theta": 1e6, "factor": 2.0},
            },
            "name different kinds",
        ),
    ],
)
def test_rope_settings_that_contradict_or_are_not_there_are_refused(fields: dict[str, Any], message: str) -> None:
    raw = {**BASE, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}, **fields}
    if "rope_theta" not in fields:
        raw.pop("rope_theta", None)
    with pytest.raises(ValueError, match=re.escape(message)):
        ModelConfig.from_dict(raw)


@pytest.mark.parametrize(
    "switched_off",
    [
        {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 0},
        {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0},
        {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 2},
        {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 28},
        {"use_sliding_window": True, "sliding_window": 64, "layer_types": ["full_attention", "full_attention"]},
    ],
)
def test_windows_that_are_switched_off_load(switched_off: dict[str, Any]) -> None:
    assert config(**switched_off).num_hidden_layers == 2


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "other architecture": ({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, "LlamaForCausalLM"),
    "qwen2": ({"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}, "Qwen2ForCausalLM"),
    "moe": ({"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}, "Qwen3MoeForCausalLM"),
    "moe by type": ({"architectures": ..., "model_type": "qwen3_moe"}, "qwen3_moe"),
    "experts": ({"num_experts": 128}, "num_experts 128"),
    "no head": ({"architectures": ["Qwen3ForSequenceClassification"]}, "Qwen3ForSequenceClassification"),
    "nothing": ({"architectures": ..., "model_type": ...}, "model_type None"),
    "vision": ({"architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl"}, "Qwen3VL"),
    "window": ({"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}, "1 of 2 layers"),
    "window types": ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
    "other layer type": ({"layer_types": ["linear_attention", "full_attention"]}, "linear_attention"),
    "linear rope": ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "'linear'"),
    "dynamic rope": ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'"),
    "llama3 rope": ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "rope_theta": 1e6}}, "'llama3'"),
    "longrope": ({"rope_scaling": {"rope_type": "longrope"}}, "'longrope'"),
    "rope by layer": ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "full_attention"),
    "partial rope": ({"partial_rotary_factor": 0.5}, "0.5"),
    "quantised": ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "'gptq'"),
    "activation": ({"hidden_act": "gelu"}, "'gelu'"),
    "float8": ({"dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
    "head_dim": ({"head_dim": 20}, "head_dim 20"),
    "head_dim too large": ({"head_dim": 512}, "head_dim 512"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unsupported_is_refused_by_name(case: str) -> None:
    changes, name = REFUSED[case]
    with pytest.raises(UnsupportedModelError) as caught:
        config(**changes)
    assert name in str(caught.value)
    assert "support" in str(caught.value)


SENSELESS: dict[str, tuple[dict[str, Any], str]] = {
    "missing": ({"hidden_size": ...}, "hidden_size is missing"),
    "null": ({"vocab_size": None}, "vocab_size is missing"),
    "zero": ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive integer, found 0"),
    "negative": ({"intermediate_size": -1}, "intermediate_size must be a positive integer, found -1"),
    "float": ({"num_attention_heads": 4.5}, "num_attention_heads must be a positive integer, found 4.5"),
    "text": ({"vocab_size": "many"}, "vocab_size must be a positive integer, found 'many'"),
    "bool": ({"head_dim": True}, "head_dim must be a positive integer, found True"),
    "eps": ({"rms_norm_eps": "tiny"}, "rms_norm_eps must be a positive number, found 'tiny'"),
    "theta": ({"rope_theta": "large"}, "rope_theta must be a positive number, found 'large'"),
    "theta zero": ({"rope_theta": 0}, "rope_theta must be a positive number, found 0"),
    "tie": ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false, found 'yes'"),
    "eos": ({"eos_token_id": "</s>"}, "eos_token_id must be a token id, a list of them or null, found '</s>'"),
    "heads": ({"num_attention_heads": 6, "num_key_value_heads": 4}, "num_attention_heads (6) must be a multiple of"),
    "yarn factor": ({"rope_scaling": {"rope_type": "yarn", "factor": -2}}, "factor must be a positive number"),
    "rope shape": ({"rope_scaling": "yarn"}, "rope_scaling must be an object or null"),
}


@pytest.mark.parametrize("case", SENSELESS)
def test_senseless_fields_are_named_with_their_value(case: str) -> None:
    """C23 among them: 6 query heads on 4 key-value heads."""
    changes, text = SENSELESS[case]
    with pytest.raises(ValueError, match=r".") as caught:
        config(**changes)
    assert text in str(caught.value)
    assert "config.json" in str(caught.value)


def test_folder_without_or_with_broken_config(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        ModelConfig.from_folder(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": ')
    with pytest.raises(CheckpointError, match="not valid JSON"):
        ModelConfig.from_folder(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(CheckpointError, match="JSON object"):
        ModelConfig.from_folder(tmp_path)


def test_edited_folder_equals_transformers_reading_of_it(tmp_path: Path) -> None:
    """C28 end to end: a new-style folder, and the same folder in the old style, give the frequencies transformers
    computes.
    """
    folder = make_tiny_folder(tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    oracle = load_hf(folder).model.rotary_emb.inv_freq
    assert torch.equal(inverse_frequencies(ModelConfig.from_folder(folder))[0], oracle)
    edit_json(folder / "config.json", {"rope_parameters": None, "rope_theta": 1000000, "rope_scaling": None})
    assert torch.equal(inverse_frequencies(ModelConfig.from_folder(folder))[0], oracle)
    assert torch.equal(load_hf(folder).model.rotary_emb.inv_freq, oracle)
