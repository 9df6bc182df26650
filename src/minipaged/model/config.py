"""`ModelConfig`: what config.json says about a dense Qwen3, checked field by field before any weight is read.

Accepts what transformers 4.51 to 5.x write: `dtype` or `torch_dtype`; `rope_theta` at the top level or inside
`rope_parameters`; YaRN in `rope_scaling` (`type` or `rope_type`) or in `rope_parameters`. Whatever is not implemented
is refused by name.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minipaged.errors import CheckpointError, UnsupportedModelError
from minipaged.kv.address import kv_cache_bytes

logger = logging.getLogger(__name__)

SUPPORTED = "minipaged runs dense Qwen3 (Qwen3ForCausalLM, model_type 'qwen3': 0.6B to 32B)"
DEFAULT_ROPE_THETA = 10_000.0  # transformers' default_theta, used when no place in config.json gives one
DEFAULT_HEAD_DIM = 128  # of transformers' Qwen3Config, whatever hidden_size and heads are
HEAD_DIMS = range(16, 257, 8)


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """Parameters of YaRN (Peng et al. 2023, arXiv:2309.00071) under the names of config.json."""

    factor: float
    original_max_position_embeddings: int
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A dense Qwen3. Field names and meanings are those of config.json; `rope_theta` and `yarn` are pulled out of its
    rope dictionaries.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    rope_theta: float = DEFAULT_ROPE_THETA
    yarn: YarnScaling | None = None
    dtype: str | None = None  # of the checkpoint: "bfloat16", "float16", "float32"; None = not stated
    eos_token_ids: tuple[int, ...] = ()

    @property
    def max_context(self) -> int:
        """Positions the model is made for, in tokens: max_position_embeddings, or with YaRN its stretched original
        context if that is longer.
        """
        if self.yarn is None:
            return self.max_position_embeddings
        return max(self.max_position_embeddings, int(self.yarn.original_max_position_embeddings * self.yarn.factor))

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Bytes of K and V that one token keeps in all layers: 2 L Hkv D itemsize."""
        return kv_cache_bytes(self.num_hidden_layers, 1, self.num_key_value_heads, self.head_dim, itemsize)

    @classmethod
    def from_folder(cls, folder: str | Path) -> ModelConfig:
        """Read `folder`/config.json. CheckpointError without one, else as `from_dict`."""
        path = Path(folder) / "config.json"
        if not path.is_file():
            raise CheckpointError(
                f"{folder} has no config.json: a model is a folder with config.json and *.safetensors"
            )
        return cls.from_dict(read_json(path), where=str(path))

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], *, where: str = "config.json") -> ModelConfig:
        """Check and convert the content of a config.json.

        UnsupportedModelError: a model or a feature that is not implemented. CheckpointError: a field that is missing or
        makes no sense; the message gives field and value.
        """
        fields = _Fields(raw, where)
        _refuse_unsupported(raw, where)
        heads = fields.integer("num_attention_heads")
        hidden = fields.integer("hidden_size")
        max_position = fields.integer("max_position_embeddings", default=32768)
        theta, yarn = _rope(raw, max_position, where)
        config = cls(
            vocab_size=fields.integer("vocab_size"),
            hidden_size=hidden,
            intermediate_size=fields.integer("intermediate_size"),
            num_hidden_layers=fields.integer("num_hidden_layers"),
            num_attention_heads=heads,
            num_key_value_heads=fields.integer("num_key_value_heads", default=heads),
            head_dim=fields.integer("head_dim", default=DEFAULT_HEAD_DIM),
            max_position_embeddings=max_position,
            rms_norm_eps=fields.number("rms_norm_eps", default=1e-6),
            tie_word_embeddings=fields.boolean("tie_word_embeddings", default=False),
            attention_bias=fields.boolean("attention_bias", default=False),
            rope_theta=theta,
            yarn=yarn,
            dtype=_checkpoint_dtype(raw, where),
            eos_token_ids=read_token_ids(raw.get("eos_token_id"), "eos_token_id", where),
        )
        if config.num_attention_heads % config.num_key_value_heads:
            raise CheckpointError(
                f"{where}: num_attention_heads ({config.num_attention_heads}) must be a multiple of "
                f"num_key_value_heads ({config.num_key_value_heads})"
            )
        if config.head_dim not in HEAD_DIMS:
            raise UnsupportedModelError(
                f"{where}: head_dim {config.head_dim} is not supported: multiples of {HEAD_DIMS.step} "
                f"from {HEAD_DIMS.start} to {HEAD_DIMS[-1]} are"
            )
        return config


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; CheckpointError that names the file if it is anything else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold a JSON object, found {type(content).__name__}")
    return content


def read_token_ids(value: object, name: str, where: str) -> tuple[int, ...]:
    """An id, a list of ids or null -> ids in the given order without repeats."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
            raise CheckpointError(f"{where}: {name} must be a token id, a list of them or null, found {value!r}")
    return tuple(dict.fromkeys(ids))


class _Fields:
    """Typed access to a JSON object; null counts as absent, and every error names file, field and value."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self._raw, self._where = raw, where

    def _get(self, name: str, default: Any) -> Any:
        value = self._raw.get(name)
        if value is not None:
            return value
        if default is None:
            raise CheckpointError(f"{self._where}: {name} is missing")
        return default

    def integer(self, name: str, *, default: int | None = None) -> int:
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise CheckpointError(f"{self._where}: {name} must be a positive integer, found {value!r}")
        return value

    def number(self, name: str, *, default: float | None = None) -> float:
        value = self._get(name, default)
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not (math.isfinite(number) and number > 0):
            raise CheckpointError(f"{self._where}: {name} must be a positive number, found {value!r}")
        return number

    def boolean(self, name: str, *, default: bool) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise CheckpointError(f"{self._where}: {name} must be true or false, found {value!r}")
        return value


def _refuse_unsupported(raw: Mapping[str, Any], where: str) -> None:
    def refuse(what: str) -> None:
        raise UnsupportedModelError(f"{where}: {what}. {SUPPORTED}")

    architectures = raw.get("architectures") or []
    if not isinstance(architectures, list):
        raise CheckpointError(f"{where}: architectures must be a list of names, found {architectures!r}")
    model_type = raw.get("model_type")
    if architectures and "Qwen3ForCausalLM" not in architectures:
        refuse(f"architecture {', '.join(map(str, architectures))} (model_type {model_type!r}) is not supported")
    if model_type not in ("qwen3", None) or not (architectures or model_type):
        refuse(f"model_type {model_type!r} is not supported")
    experts = raw.get("num_experts") or raw.get("num_local_experts")
    if experts:
        refuse(f"mixture of experts (num_experts {experts}) is not supported")
    quantization = raw.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "unnamed") if isinstance(quantization, dict) else quantization
        refuse(f"quantised weights (quantization_config, method {method!r}) are not supported; use the bf16 checkpoint")
    # "swish" is transformers' other name of the same function.
    if raw.get("hidden_act", "silu") not in ("silu", "swish"):
        refuse(f"hidden_act {raw['hidden_act']!r} is not supported, only 'silu'")
    _refuse_windows(raw, where, refuse)


def _refuse_windows(raw: Mapping[str, Any], where: str, refuse: Callable[[str], None]) -> None:
    """Sliding windows count only where they act: Qwen3 configs carry `sliding_window` and `max_window_layers`
    although switched off.
    """
    layer_types = raw.get("layer_types")
    windowed = bool(raw.get("use_sliding_window")) and raw.get("sliding_window", 4096) is not None
    if layer_types is not None:
        other = [str(kind) for kind in layer_types if kind != "full_attention"]
        count, total = len(other), len(layer_types)
    elif windowed:
        other, total = ["sliding_attention"], _Fields(raw, where).integer("num_hidden_layers")
        first = raw.get("max_window_layers", 28)
        if not isinstance(first, int):
            raise CheckpointError(f"{where}: max_window_layers must be an integer, found {first!r}")
        count = max(0, total - first)
    else:
        return
    if count:
        refuse(
            f"{count} of {total} layers use {', '.join(sorted(set(other)))} (use_sliding_window "
            f"{raw.get('use_sliding_window')!r}, sliding_window {raw.get('sliding_window')!r}, max_window_layers "
            f"{raw.get('max_window_layers')!r}); only full attention is supported"
        )


def _checkpoint_dtype(raw: Mapping[str, Any], where: str) -> str | None:
    value = raw.get("dtype") or raw.get("torch_dtype")
    if value in (None, "auto"):
        return None
    name = str(value).removeprefix("torch.")
    if name not in ("bfloat16", "float16", "float32"):
        raise UnsupportedModelError(f"{where}: dtype {value!r} is not supported: bfloat16, float16 and float32 are")
    return name


def _refuse_lost_theta(inside: Any, outside: Any, where: str) -> None:
    """transformers forgets rope_parameters, with the theta in it, as soon as there is a rope_scaling."""
    if inside is not None and inside != outside:
        raise CheckpointError(
            f"{where}: rope_theta is {inside!r} in rope_parameters and {outside!r} beside rope_scaling, for which "
            "transformers forgets rope_parameters: put rope_theta into rope_scaling"
        )


def _rope(raw: Mapping[str, Any], max_position: int, where: str) -> tuple[float, YarnScaling | None]:
    """theta and YaRN from all the places where they have lived; the older `rope_scaling` wins over `rope_parameters`,
    as in transformers.
    """
    parameters: dict[str, Any] = {}
    kinds: dict[str, Any] = {}
    for name in ("rope_parameters", "rope_scaling"):
        part = raw.get(name) or {}
        if not isinstance(part, dict):
            raise CheckpointError(f"{where}: {name} must be an object or null, found {part!r}")
        nested = sorted(key for key, value in part.items() if isinstance(value, dict))
        if nested:
            raise UnsupportedModelError(
                f"{where}: {name} differs by layer type ({', '.join(nested)}), which is not supported"
            )
        part = {key: value for key, value in part.items() if value is not None}
        if name == "rope_scaling" and part:
            _refuse_lost_theta(parameters.get("rope_theta"), part.get("rope_theta", raw.get("rope_theta")), where)
        if part:
            kinds[name] = part.setdefault("rope_type", part.get("type", "default"))
            if part.get("type", kinds[name]) != kinds[name]:
                raise CheckpointError(f"{where}: {name} has rope_type {kinds[name]!r} and type {part['type']!r}")
        parameters.update(part)
    if len(set(kinds.values()) - {"default"}) > 1:
        raise CheckpointError(f"{where}: rope_parameters and rope_scaling name different kinds: {kinds}")
    if len(kinds) == 2 and kinds["rope_scaling"] == "default" != kinds["rope_parameters"]:
        raise CheckpointError(
            f"{where}: rope_scaling is 'default' and rope_parameters {kinds['rope_parameters']!r}: remove one"
        )
    fields = _Fields(parameters, f"{where}, rope parameters")

    kind = parameters.get("rope_type", "default")
    if kind not in ("default", "yarn"):
        raise UnsupportedModelError(f"{where}: rope type {kind!r} is not supported: 'default' and 'yarn' are")
    partial = parameters.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise UnsupportedModelError(
            f"{where}: partial_rotary_factor {partial!r} is not supported: the whole head is rotated"
        )

    if "rope_theta" in parameters:
        theta = fields.number("rope_theta")
    elif raw.get("rope_theta") is not None:
        theta = _Fields(raw, where).number("rope_theta")
    else:
        theta = DEFAULT_ROPE_THETA
        logger.warning("%s gives no rope_theta; using transformers' default of %g", where, theta)
    if kind == "default":
        return theta, None

    original = _Fields(raw, where).integer(
        "original_max_position_embeddings",
        default=fields.integer("original_max_position_embeddings", default=max_position),
    )

    def optional(name: str) -> float | None:
        return fields.number(name) if name in parameters else None

    return theta, YarnScaling(
        factor=fields.number("factor", default=max_position / original),
        original_max_position_embeddings=original,
        attention_factor=optional("attention_factor"),
        # 0 means "the default" to transformers, so it must not be an error here
        beta_fast=fields.number("beta_fast", default=32.0) if parameters.get("beta_fast") else 32.0,
        beta_slow=fields.number("beta_slow", default=1.0) if parameters.get("beta_slow") else 1.0,
        mscale=optional("mscale") if parameters.get("mscale") else None,
        mscale_all_dim=optional("mscale_all_dim") if parameters.get("mscale_all_dim") else None,
        truncate=fields.boolean("truncate", default=True),
    )
