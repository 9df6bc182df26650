"""SamplingParams: what is refused, what None means, what resolve fills in. CASES C33, C34, C38."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace

import numpy as np
import pytest

from minipaged.sampling_params import SamplingParams

DEFAULTS = SimpleNamespace(
    eos_token_ids=(300, 301), temperature=0.6, top_p=0.95, top_k=20, repetition_penalty=1.1, min_p=0.05
)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("n", [0, -1, 1.0, True, "2", None]),
        ("temperature", [-0.1, math.nan, math.inf, "0.5", True, 1e39, 10**400]),
        ("top_p", [-0.1, 1.1, math.nan, "1", False]),
        ("top_k", [-2, 1.5, "3", True]),
        ("min_p", [-0.1, 1.01, math.nan, "0.1"]),
        ("seed", [1.5, "7", True]),
        ("max_tokens", [0, -1, 2.0, "5", True]),
        ("min_tokens", [-1, None, 0.5]),
        ("stop", ["", [""], ["a", ""], [1], 5, {"a": 1}, b"x"]),
        ("stop_token_ids", [[-1], [True], ["1"], "12", 5, [1.0]]),
        ("ignore_eos", [1, None, "yes"]),
        ("logprobs", [-2, True, 1.0]),
        ("prompt_logprobs", [-2, False, "1"]),
        (
            "logit_bias",
            [{-1: 1.0}, {1: math.nan}, {1: 101}, {"1": 1.0}, {1: "2"}, {True: 1.0}, [(1, 2)], {1: -math.inf}],
        ),
        ("presence_penalty", [-2.1, 2.1, math.inf, None, 10**400]),
        ("frequency_penalty", [-2.1, 2.1, "0"]),
        ("repetition_penalty", [0, -1.0, math.inf, 1e-40, 9e-7, 1.1e6, 1e40]),
        ("skip_special_tokens", [None, 0]),
        ("detokenize", ["no"]),
        ("include_stop_str_in_output", [1]),
        ("token_mask", [[True], 1]),
        ("beam_width", [2, 0]),
        ("length_penalty", [math.nan, "1", 2.0, 0]),
        ("priority", [0.5, None, True, 2**31 + 1, -(2**40)]),
    ],
)
def test_every_field_is_checked_and_named_c33_c34(name: str, values: list[object]) -> None:
    for value in values:
        with pytest.raises(ValueError, match=name):
            SamplingParams(**{name: value})


@pytest.mark.parametrize("penalty", [1e-6, 1e6])
def test_the_strongest_repetition_penalties_stay_in_float32(penalty: float) -> None:
    """Logits far larger than any model's, and the largest bias, divided or multiplied by the limits."""
    checked = SamplingParams(repetition_penalty=penalty).repetition_penalty
    assert checked == penalty
    logits, factor = np.float32([-1e30, -200, 0, 200, 1e30]), np.float32(checked)
    assert np.isfinite(np.where(logits > 0, logits / factor, logits * factor)).all()


def test_edges_that_are_allowed_c34() -> None:
    for kwargs in (
        {"temperature": 0},
        {"temperature": 1e-6},
        {"top_p": 0},
        {"top_p": 1e-9},
        {"top_p": 1},
        {"top_k": 0},
        {"top_k": -1},
        {"top_k": 10**9},
        {"stop": []},
        {"stop": ["a"] * 5},
        {"logprobs": -1},
        {"logprobs": 0},
        {"seed": -(2**70)},
        {"min_tokens": 3, "max_tokens": 3},
        {"logit_bias": {}},
    ):
        SamplingParams(**kwargs)


def test_min_tokens_above_max_tokens_and_stop_without_text_are_refused_c38() -> None:
    with pytest.raises(ValueError, match="min_tokens must be at most max_tokens = 3, got 4"):
        SamplingParams(min_tokens=4, max_tokens=3)
    with pytest.raises(ValueError, match="detokenize"):
        SamplingParams(stop="x", detokenize=False)
    with pytest.raises(ValueError, match="min_tokens"):
        SamplingParams(min_tokens=9).resolve(None, 8)


def test_numpy_scalars_become_python_numbers_and_lists_are_copied() -> None:
    stops, ids, bias = ["a"], [np.int64(5)], {np.int32(3): np.float32(1.5)}
    params = SamplingParams(n=np.int64(2), temperature=np.float32(0.5), stop=stops, stop_token_ids=ids, logit_bias=bias)
    stops.append("b")
    bias.clear()
    assert (type(params.n), type(params.temperature), type(params.top_p)) == (int, float, type(None))
    assert params.stop == ("a",)
    assert params.stop_token_ids == (5,)
    assert params.logit_bias == {3: 1.5}
    assert SamplingParams(stop="ab").stop == ("ab",)


def test_unknown_fields_and_later_changes_are_refused() -> None:
    with pytest.raises(TypeError):
        SamplingParams(temprature=1.0)  # type: ignore[call-arg]
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().n = 2  # type: ignore[misc]


def test_resolve_takes_the_users_value_then_the_models_then_the_neutral_one() -> None:
    model = SamplingParams(temperature=0, seed=3, stop=["x"]).resolve(DEFAULTS, 77)
    assert (model.temperature, model.top_p, model.top_k, model.repetition_penalty) == (0.0, 0.95, 20, 1.1)
    assert (model.max_tokens, model.seed, model.stop, model.min_p) == (77, 3, ("x",), 0.05)
    assert model.eos_token_ids == (300, 301)
    neutral = SamplingParams(max_tokens=5).resolve(None, 77)
    assert (neutral.temperature, neutral.top_p, neutral.top_k, neutral.repetition_penalty) == (1.0, 1.0, 0, 1.0)
    assert (neutral.max_tokens, neutral.eos_token_ids, neutral.min_p) == (5, (), 0.0)
    assert SamplingParams(min_p=0.0).resolve(DEFAULTS, 77).min_p == 0.0


def test_user_stop_ids_add_to_the_models_c31() -> None:
    assert SamplingParams(stop_token_ids=[7]).resolve(DEFAULTS, 5).end_token_ids == (300, 301, 7)


def test_vocabulary_check_names_what_is_outside() -> None:
    SamplingParams(logit_bias={319: 1}, logprobs=320, prompt_logprobs=-1).check_vocabulary(320)
    with pytest.raises(ValueError, match="logit_bias holds token id 320"):
        SamplingParams(logit_bias={320: 1}).check_vocabulary(320)
    for token_id in (320, 5000, 2**63 - 1, 10**30):
        with pytest.raises(
            ValueError, match=f"stop_token_ids holds token id {token_id}, outside the vocabulary of 320"
        ):
            SamplingParams(stop_token_ids=[7, token_id]).check_vocabulary(320)
    with pytest.raises(ValueError, match="prompt_logprobs must be at most the vocabulary's size 320, got 400"):
        SamplingParams(prompt_logprobs=400).check_vocabulary(320)


def test_every_field_that_is_accepted_has_an_effect_or_is_refused() -> None:
    """A value that differs from the default changes what `resolve` gives out, or is refused by the field's name."""
    other = {
        "n": 2, "temperature": 0.3, "top_p": 0.3, "top_k": 3, "min_p": 0.3, "seed": 4, "max_tokens": 3, "min_tokens": 1,
        "stop": ["x"], "stop_token_ids": [4], "ignore_eos": True, "logprobs": 1, "prompt_logprobs": 1,
        "logit_bias": {1: 1.0}, "presence_penalty": 1.0, "frequency_penalty": 1.0, "repetition_penalty": 1.3,
        "skip_special_tokens": False, "detokenize": False, "include_stop_str_in_output": True,
        "token_mask": lambda ids: None, "beam_width": 2, "length_penalty": 2.0, "priority": 1,
    }  # fmt: skip
    assert set(other) == {field.name for field in dataclasses.fields(SamplingParams) if field.init}
    plain = SamplingParams().resolve(DEFAULTS, 9)
    refused = []
    for name, value in other.items():
        try:
            changed = SamplingParams(**{name: value}).resolve(DEFAULTS, 9)
        except ValueError:
            refused.append(name)
            continue
        assert getattr(changed, name) != getattr(plain, name)
    assert refused == ["beam_width", "length_penalty"]
