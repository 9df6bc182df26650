"""A value of one request that cannot work ends that request, when it is prepared; nobody else notices."""

from __future__ import annotations

import asyncio
import json
import math
import numbers
import shutil
from collections.abc import Callable
from dataclasses import fields, replace
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llm_rig import GREEDY, is_idle, load
from stub_engine import StubEngine, alone

from minipaged import LLM, AsyncLLM, SamplingParams

PROMPT = list(range(1, 12))
HUGE = [2**31, 2**53, 2**63 - 1, 2**63, 2**64, 10**30, 10**400, -1, -(2**63), 1e-45, 1e-300, 1e38, 3.4e38, 1e39, 1e308]
FIELDS = ("temperature", "top_k", "top_p", "min_p", "seed", "logprobs", "prompt_logprobs", "presence_penalty",
          "frequency_penalty", "repetition_penalty", "min_tokens", "priority", "max_tokens", "n")  # fmt: skip


@pytest.fixture(scope="module")
def llm(tiny_folder: Path) -> Any:
    with load(tiny_folder, num_blocks=64, max_model_len=60) as made:
        yield made


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.dictionaries(st.sampled_from(FIELDS), st.sampled_from(HUGE), min_size=1, max_size=3),
    st.lists(st.sampled_from(HUGE), max_size=2),
    st.lists(st.sampled_from(HUGE), max_size=2),
)
def test_others_in_flight_are_untouched(llm: LLM, fields: dict[str, Any], ids: list[Any], bias: list[Any]) -> None:
    wanted = llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    stream = llm.stream(PROMPT, GREEDY)
    tokens = [*next(stream).outputs[0].token_ids]
    try:
        params = SamplingParams(**{"max_tokens": 3, **fields}, stop_token_ids=ids, logit_bias=dict.fromkeys(bias, 1.0))
        output = llm.generate([5, 6, 7], params, use_tqdm=False)[0]
    except ValueError as error:
        message = str(error)
    else:
        message = ""
        assert all(child.finish_reason != "error" for child in output.outputs)
        assert all(0 <= token < 320 for child in output.outputs for token in child.token_ids)
    assert not message or any(n in message for n in (*fields, "stop_token_ids", "logit_bias", "context length")), (
        message
    )
    tokens += [token for output in stream for token in output.outputs[0].token_ids]
    assert tokens == wanted
    assert is_idle(llm)


def test_a_salt_that_is_no_string_is_refused_at_once(tiny_folder: Path) -> None:
    async def use(served: AsyncLLM) -> list[int]:
        for salt in (5, b"x", ["a"]):
            with pytest.raises(TypeError, match="salt must be a string or None"):
                await anext(served.generate(PROMPT, GREEDY, cache_salt=salt))  # type: ignore[arg-type,call-overload]
        return [output async for output in served.generate(PROMPT, GREEDY)][-1].outputs[0].token_ids

    with load(tiny_folder) as llm:
        wanted = llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].outputs[0].token_ids
        served = AsyncLLM.from_engine(llm.engine)
        try:
            assert asyncio.run(use(served)) == wanted
            assert served.is_running
        finally:
            served.close()


def test_end_ids_of_a_config_that_do_not_exist_are_said_and_left_out(
    tiny_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": [10**30, 300, 320]}))
    with load(folder) as llm:
        assert llm.engine.config.generation_defaults is not None
        assert set(llm.engine.config.generation_defaults.eos_token_ids) <= set(range(320))
        params = replace(GREEDY, ignore_eos=False, min_tokens=2, max_tokens=4)
        assert llm.generate(PROMPT, params, use_tqdm=False)[0].outputs[0].finish_reason in ("stop", "length")
    assert f"eos_token_id [{10**30}, 320] is outside the vocabulary of 320 ids" in caplog.text


def test_min_p_of_the_models_folder_applies(tiny_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    (folder / "generation_config.json").write_text(json.dumps({"min_p": 1.0, "temperature": 1.0}))
    one = SamplingParams(max_tokens=1)
    with load(folder) as llm:
        tokens = {
            llm.generate(PROMPT, replace(one, seed=seed), use_tqdm=False)[0].outputs[0].token_ids[0]
            for seed in range(20)
        }
        assert len(tokens) == 1
        free = replace(one, min_p=0.0)
        more = {
            llm.generate(PROMPT, replace(free, seed=seed), use_tqdm=False)[0].outputs[0].token_ids[0]
            for seed in range(20)
        }
        assert len(more) > 5


class Raising:
    """Looks like a number until it is asked for its value."""

    def __index__(self) -> int:
        raise OverflowError("no")

    def __float__(self) -> float:
        raise OverflowError("no")

    def __len__(self) -> int:
        raise RuntimeError("no")


numbers.Real.register(Raising)

VALUES: list[Any] = [
    *HUGE, 0, 1, 3, -2, 0.5, math.nan, math.inf, -math.inf, True, False, None, "", "a", "\ud800", "7", b"x",
    [], [3], [[3]], (5, 2**64), [math.nan], ["\udfff"], ["", "a"], {3, 4}, range(3), np.float32(0.7), np.int64(4),
    {}, {3: 1.0}, {3: math.nan}, {3: 1e39}, {"3": 1}, {2**63: 1.0}, {-1: 0}, np.array([3, 4]), np.array(math.nan),
    Fraction(1, 3), Decimal("0.5"), 1j, object(), int, len, print,
    lambda ids: 1 / 0, lambda ids: [True] * 10**4, lambda ids: np.zeros(320, dtype=bool),
    Raising(), [Raising()], {3: Raising()},
]  # fmt: skip


def refusal(field: str, value: Any, add: Callable[..., None]) -> str | None:
    """Why a request with this value is not taken; None if it is."""
    try:
        if field == "request_id":
            add(value, [1, 2], SamplingParams(max_tokens=3))
        elif field == "cache_salt":
            add("r", [1, 2], SamplingParams(max_tokens=3), cache_salt=value)
        elif field == "prompt":
            add("r", value, SamplingParams(max_tokens=3))
        elif field == "a token of the prompt":
            add("r", [1, value], SamplingParams(max_tokens=3))
        else:
            add("r", [1, 2], SamplingParams(**{"max_tokens": 3, field: value}))
    except (ValueError, TypeError) as error:
        return str(error)
    return None


FIELDS_ALL = [field.name for field in fields(SamplingParams) if field.init]


@pytest.mark.parametrize("field", [*FIELDS_ALL, "request_id", "cache_salt", "prompt", "a token of the prompt"])
def test_every_field_takes_any_value_or_refuses_it(llm: LLM, field: str) -> None:
    """Refused by name, or the request ends in order, its own callback's fault included; another one runs on beside."""
    wanted = llm.generate(PROMPT, replace(GREEDY, max_tokens=40), use_tqdm=False)[0].outputs[0].token_ids
    engine = llm.engine
    taken = refused = 0
    beside: list[int] | None = None
    for value in VALUES:
        if "beside" not in engine._live:
            assert beside in (None, wanted)
            engine.add_request("beside", PROMPT, replace(GREEDY, max_tokens=40))
        message = refusal(field, value, engine.add_request)
        if message is not None:
            refused += 1
            assert field in ("prompt", "a token of the prompt") or field.rpartition("_")[2] in message
            assert engine._live.keys() == {"beside"}
        while engine._live.keys() - {"beside"} or message is not None:
            for output in engine.step():
                if output.request_id == "beside":
                    beside = output.outputs[0].token_ids
                    assert beside == wanted[: len(beside)]
                elif output.finished:
                    taken += 1
                    for completion in output.outputs:
                        assert field == "token_mask" or completion.error is None, value
                        assert all(0 <= token < 320 for token in completion.token_ids)
            message = None
    engine.drop_all()
    assert is_idle(llm)
    assert refused > 0
    assert taken > 0 or field in ("stop", "beam_width")


@pytest.mark.parametrize("token_id", [2**63, 10**30, -1])
def test_a_vocabulary_of_unknown_size_is_that_of_64_bits(token_id: int) -> None:
    stub = StubEngine(vocab_size=None)
    stub.add("beside", [1, 2, 3], max_tokens=6)
    for bad in ({"prompt": [1, token_id]}, {"prompt": [1], "stop_token_ids": [token_id]}):
        with pytest.raises(ValueError, match=rf"{token_id}|integers of at least 0"):
            stub.add("bad", **bad)  # type: ignore[arg-type]
    stub.add("large", [1, 2**63 - 1], max_tokens=2)
    stub.run()
    assert [stub.tokens("beside")] == alone([1, 2, 3], max_tokens=6)
    assert stub.reason("large") == "length"
