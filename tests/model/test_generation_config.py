"""C31: end-of-sequence ids from both files, and sampling defaults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from minipaged.errors import CheckpointError
from minipaged.model.config import ModelConfig
from minipaged.model.generation_config import GenerationDefaults
from minipaged.model.random_weights import QWEN3_SHAPES
from tiny import make_tiny_folder

CONFIG = QWEN3_SHAPES["qwen3-0.6b"]


def with_eos(*ids: int) -> ModelConfig:
    from dataclasses import replace

    return replace(CONFIG, eos_token_ids=ids)


@pytest.mark.parametrize(
    ("config_eos", "file", "expected"),
    [
        ((300,), {"eos_token_id": [300, 301]}, {300, 301}),
        ((300,), {"eos_token_id": 300}, {300}),
        ((300,), {"eos_token_id": 301}, {300, 301}),
        ((300,), {"eos_token_id": None}, {300}),
        ((300,), {}, {300}),
        ((), {"eos_token_id": [301, 301]}, {301}),
        ((), {}, set()),
        ((300, 302), {"eos_token_id": [301]}, {300, 301, 302}),
        ((0,), {"eos_token_id": []}, {0}),
    ],
)
def test_eos_is_the_union(config_eos: tuple[int, ...], file: dict[str, Any], expected: set[int]) -> None:
    read = GenerationDefaults.from_dict(file, with_eos(*config_eos))
    assert set(read.eos_token_ids) == expected
    assert len(read.eos_token_ids) == len(expected)


def test_missing_file_leaves_config_json(tmp_path: Path) -> None:
    folder = make_tiny_folder(tmp_path, edit_config={"eos_token_id": [300, 301]})
    (folder / "generation_config.json").unlink()
    assert GenerationDefaults.from_folder(folder, ModelConfig.from_folder(folder)) == GenerationDefaults((300, 301))


def test_file_written_by_transformers(tmp_path: Path) -> None:
    folder = make_tiny_folder(tmp_path)
    assert GenerationDefaults.from_folder(folder, ModelConfig.from_folder(folder)) == GenerationDefaults((300,))


def test_sampling_defaults_of_qwen3() -> None:
    file = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [151645, 151643]}
    read = GenerationDefaults.from_dict(file, CONFIG)
    assert read == GenerationDefaults((151645, 151643), temperature=0.6, top_p=0.95, top_k=20)
    assert isinstance(read.top_k, int)


def test_do_sample_false_is_greedy() -> None:
    file = {"do_sample": False, "temperature": 0.7, "repetition_penalty": 1.05, "min_p": 0.1}
    read = GenerationDefaults.from_dict(file, CONFIG)
    assert (read.temperature, read.repetition_penalty, read.min_p) == (0.0, 1.05, 0.1)
    assert GenerationDefaults.from_dict({"do_sample": None, "temperature": 0.7}, CONFIG).temperature == 0.7


@pytest.mark.parametrize("penalty", [0, 1e-40, 1e40])
def test_a_repetition_penalty_that_requests_may_not_have_is_refused(penalty: float) -> None:
    with pytest.raises(CheckpointError, match="repetition_penalty must be a number from 1e-06 to 1e"):
        GenerationDefaults.from_dict({"repetition_penalty": penalty}, CONFIG)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ({"eos_token_id": ["a"]}, r"eos_token_id must be a token id, a list of them or null, found \['a'\]"),
        ({"eos_token_id": -1}, "eos_token_id must be"),
        ({"temperature": "hot"}, "temperature must be a number from 0 to inf, found 'hot'"),
        ({"top_p": 1.5}, "top_p must be a number from 0 to 1, found 1.5"),
    ],
)
def test_senseless_values_are_named(file: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        GenerationDefaults.from_dict(file, CONFIG)


def test_broken_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps([1]))
    with pytest.raises(CheckpointError, match=r"generation_config\.json must hold a JSON object"):
        GenerationDefaults.from_folder(tmp_path, CONFIG)
