"""The keywords of `LLM`: what they mean for the pool, and what is said of values that make no sense."""

from __future__ import annotations

import asyncio
import inspect
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from minipaged import LLM, AsyncLLM, SamplingParams
from minipaged.errors import RequestTooLargeError
from minipaged.llm.options import EngineOptions


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
    with pytest.raises(ValueError, match=r"does not hold one block of 16 tokens.*lower block_size"):
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


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "8", np.float32(2), 1 << 63])
@pytest.mark.parametrize(
    "name",
    [
        "block_size",
        "max_num_seqs",
        "max_num_batched_tokens",
        "num_blocks",
        "kv_cache_memory",
        "max_model_len",
        "threads",
    ],
)
def test_sizes_are_checked_before_anything_is_loaded(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=name):
        EngineOptions(**{name: value})


class Whole:
    """An integer that is no `int`, as numpy's and others' are."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


@pytest.mark.parametrize("kind", [np.int64, np.uint8, Whole, torch.tensor])
def test_integers_of_any_kind(tiny_folder: Path, kind: Callable[[int], Any]) -> None:
    """Sizes and seeds of `LLM`, sampling parameters, prompts: the text is that of plain integers."""
    options = {"block_size": 4, "num_blocks": 64, "max_model_len": 100, "max_num_seqs": 3, "max_num_batched_tokens": 9}
    params = {"max_tokens": 6, "n": 2, "seed": 3, "top_k": 40, "min_tokens": 2, "logprobs": 1}
    with LLM(tiny_folder, seed=5, **options) as llm:
        [expected] = llm.generate([7, 8, 9], SamplingParams(**params, stop_token_ids=[1], logit_bias={2: 1.0}), False)
    with LLM(tiny_folder, seed=kind(5), **{name: kind(value) for name, value in options.items()}) as llm:
        given = SamplingParams(
            **{name: kind(value) for name, value in params.items()}, stop_token_ids=[kind(1)], logit_bias={kind(2): 1.0}
        )
        [output] = llm.generate([kind(7), kind(8), kind(9)], given, use_tqdm=False)
    assert [one.token_ids for one in output.outputs] == [one.token_ids for one in expected.outputs]
    assert output.prompt_token_ids == [7, 8, 9]
    plain = (given.n, given.seed, *given.stop_token_ids, *given.logit_bias, *output.prompt_token_ids)
    assert {type(number) for number in plain} == {int}


@pytest.mark.parametrize("value", [True, np.bool_(True), 1.0, np.float64(1), "1", Whole])
@pytest.mark.parametrize("name", ["n", "max_tokens", "seed", "stop_token_ids", "logit_bias"])
def test_what_is_no_integer(name: str, value: object) -> None:
    given = {"stop_token_ids": [value], "logit_bias": {value: 1.0}}.get(name, value)
    with pytest.raises(ValueError, match=name):
        SamplingParams(**{name: given})


def test_warnings_point_at_the_line_that_asked(tiny_folder: Path) -> None:
    async def closed(llm: AsyncLLM) -> None:
        async with llm:
            pass

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        LLM(tiny_folder, num_blocks=8).close()
        asyncio.run(closed(AsyncLLM(tiny_folder, num_blocks=8)))
        LLM(tiny_folder, kv_cache_memory=1 << 18).close()
        LLM(tiny_folder, threads=99, num_blocks=64).close()
    assert len(caught) == 4
    assert {warning.filename for warning in caught} == {__file__}
    lines = Path(__file__).read_text().splitlines()
    for warning in caught:
        assert "LLM(tiny_folder" in lines[warning.lineno - 1]


def test_a_longer_max_model_len_is_offered_only_where_the_model_allows_it(tiny_folder: Path) -> None:
    with LLM(tiny_folder, num_blocks=64, max_model_len=64) as llm:  # noqa: SIM117
        with pytest.raises(RequestTooLargeError, match=r"lower max_tokens or raise max_model_len \(the model has 512"):
            llm.generate([1] * 60, SamplingParams(max_tokens=10))
    with LLM(tiny_folder, num_blocks=64) as llm:
        for length in (510, 600):
            with pytest.raises(RequestTooLargeError, match="the model has no more positions") as caught:
                llm.generate([1] * length, SamplingParams(max_tokens=10))
            assert "raise" not in str(caught.value)
            assert ("lower max_tokens" in str(caught.value)) == (length < 512)


def test_a_block_that_memory_does_not_hold(tiny_folder: Path) -> None:
    for options in ({}, {"num_blocks": 10**6}):
        with pytest.raises((ValueError, MemoryError), match=r"lower .*block_size"):
            LLM(tiny_folder, block_size=10**9, **options)
