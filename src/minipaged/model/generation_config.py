"""What a model's folder says about generating: end-of-sequence ids and sampling defaults."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minipaged.errors import CheckpointError
from minipaged.model.config import ModelConfig, read_json, read_token_ids

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """None = the folder says nothing about it: the neutral value applies.

    `eos_token_ids` is the union of generation_config.json and config.json: a chat model's turn ends at either, and
    one file often lists only one of them.
    """

    eos_token_ids: tuple[int, ...] = ()
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    @classmethod
    def from_folder(cls, folder: str | Path, config: ModelConfig) -> GenerationDefaults:
        """Read `folder`/generation_config.json, which may be absent. CheckpointError that names a field that makes no
        sense.
        """
        path = Path(folder) / "generation_config.json"
        return cls.from_dict(read_json(path) if path.is_file() else {}, config, where=str(path))

    @classmethod
    def from_dict(
        cls, raw: Mapping[str, Any], config: ModelConfig, *, where: str = "generation_config.json"
    ) -> GenerationDefaults:
        """As `from_folder`, from the file's content. `do_sample: false` means greedy: temperature 0."""
        listed = read_token_ids(raw.get("eos_token_id"), "eos_token_id", where)
        ids = dict.fromkeys(listed + config.eos_token_ids)
        strange = [token_id for token_id in ids if token_id >= config.vocab_size]
        if strange:
            logger.warning(
                "%s: eos_token_id %s is outside the vocabulary of %d ids and can end no text",
                where,
                strange,
                config.vocab_size,
            )
        top_k = _number(raw, "top_k", 0, math.inf, where)
        return cls(
            eos_token_ids=tuple(token_id for token_id in ids if token_id < config.vocab_size),
            temperature=0.0 if raw.get("do_sample") is False else _number(raw, "temperature", 0, math.inf, where),
            top_p=_number(raw, "top_p", 0, 1, where),
            top_k=None if top_k is None else int(top_k),
            min_p=_number(raw, "min_p", 0, 1, where),
            repetition_penalty=_number(raw, "repetition_penalty", 1e-6, 1e6, where),
        )


def _number(raw: Mapping[str, Any], name: str, low: float, high: float, where: str) -> float | None:
    value = raw.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high or value == math.inf:
        raise CheckpointError(f"{where}: {name} must be a number from {low:g} to {high:g}, found {value!r}")
    return float(value)
