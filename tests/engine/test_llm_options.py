"""The keywords of `LLM`: what they mean for the pool, and what is said of values that make no sense."""

from __future__ import annotations

import inspect
import warnings
from pathlib import Path

import pytest

from minipaged import LLM, SamplingParams
from minipaged.errors import RequestTooLargeError


def test_the_signature_is_the_contracts() -> None:
    parameters = inspect.signature(LLM).parameters
    assert {name: p.default for name, p in parameters.items()} == {
        "model": None,
        "tokenizer": None,
        "revision": None,
        "dtype": "auto",
        "device": "auto",
        "backend": None,
        "block_size": 16,
        "num_blocks": None,
        "kv_cache_memory": None,
        "gpu_memory_utilization": 0.9,
        "max_model_len": None,
        "max_num_seqs": 64,
        "max_num_batched_tokens": None,
        "enable_prefix_caching": True,
        "eviction_policy": "lru",
        "scheduling_policy": "fcfs",
        "seed": 0,
        "threads": None,
        "check_invariants": False,
        "kv_journal": None,
    }
    assert all(p.kind is p.KEYWORD_ONLY for name, p in parameters.items() if name != "model")
    with pytest.raises(TypeError, match="max_seqs"):
        LLM("anywhere", max_seqs=3)


def test_sizing(tiny_folder: Path) -> None:
    """An explicit num_blocks wins with one warning; a pool from memory lowers max_model_len; an explicit length is
    never lowered.
    """
    per_block = 2 * 2 * 2 * 32 * 4 * 16
    with pytest.warns(UserWarning, match="num_blocks = 8 holds requests of 129 tokens"):
        llm = LLM(tiny_folder, num_blocks=8)
    assert llm.engine.max_model_len == 512
    with pytest.raises(RequestTooLargeError, match="the pool has 8"):
        llm.generate([1] * 129, SamplingParams(max_tokens=1))
    with pytest.warns(UserWarning, match="max_model_len lowered from 512 to 161"):
        llm = LLM(tiny_folder, kv_cache_memory=10 * per_block)
    assert llm.engine.block_manager.num_physical_blocks == 10
    assert "lowered" in llm.summary()
    with pytest.raises(ValueError, match="raise kv_cache_memory or lower max_model_len"):
        LLM(tiny_folder, kv_cache_memory=10 * per_block, max_model_len=162)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        LLM(tiny_folder, kv_cache_memory=10 * per_block, max_model_len=161)
    with pytest.raises(ValueError, match="does not hold one block"):
        LLM(tiny_folder, kv_cache_memory=1)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("block_size", 0),
        ("num_blocks", -1),
        ("max_num_seqs", True),
        ("max_num_batched_tokens", 0),
        ("max_model_len", 513),
        ("gpu_memory_utilization", 1.5),
        ("gpu_memory_utilization", "0.9"),
        ("enable_prefix_caching", "no"),
        ("check_invariants", 3),
        ("seed", 1.5),
        ("device", "tpu"),
        ("device", "mps"),
        ("device", "cuda:99"),
        ("scheduling_policy", "random"),
        ("eviction_policy", "mru"),
        ("threads", 0),
        ("backend", "cuda-magic"),
        ("dtype", "int3"),
    ],
)
def test_wrong_values_name_the_option(tiny_folder: Path, option: str, value: object) -> None:
    with pytest.raises(ValueError, match=option):
        LLM(tiny_folder, **{"num_blocks": 64, option: value})


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("max_model_len", -1),
        ("max_model_len", "x"),
        ("num_blocks", 10**30),
        ("seed", "x"),
        ("gpu_memory_utilization", "x"),
        ("device", "mps"),
        ("device", None),
        ("model", ""),
        ("tokenizer", 5),
        ("kv_journal", ""),
    ],
)
def test_options_that_make_no_sense_are_named(tiny_folder: Path, option: str, value: object) -> None:
    with pytest.raises(ValueError, match=option):
        LLM(**{"model": tiny_folder, option: value})


@pytest.mark.parametrize(("option", "value"), [("num_blocks", 1 << 45), ("max_num_batched_tokens", 1 << 45)])
def test_what_memory_cannot_hold_names_the_option(tiny_folder: Path, option: str, value: int) -> None:
    with pytest.raises(MemoryError, match=option):
        LLM(tiny_folder, **{option: value})
