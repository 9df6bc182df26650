"""Error figures, verdicts and the JSON object, on numbers small enough to check by hand."""

from __future__ import annotations

import json
import math

import pytest
import torch

from minipaged.verify.judge import (
    BFLOAT16_FLOOR,
    LOGIT_TOLERANCE,
    NEAR_TIE_MARGIN,
    Claim,
    ErrorFigures,
    Report,
    judge_op,
    judge_token,
    measure,
)


def test_measure_is_relative_to_each_token():
    """A large token does not hide the error of a small one."""
    reference = torch.tensor([[100.0, 0.0], [0.5, -1.0]])
    figures = measure(reference + torch.tensor([[0.1, 0.0], [0.0, 0.01]]), reference)
    assert figures.max_abs == pytest.approx(0.1, rel=1e-4)
    assert figures.relative_per_token == pytest.approx((1e-3, 1e-2), rel=1e-4)
    assert figures.max_relative == pytest.approx(1e-2, rel=1e-4)
    assert figures.rms == pytest.approx(math.hypot(0.1, 0.01) / math.hypot(100, 0.5, 1), rel=1e-4)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_infinitely_wrong(value):
    ours = torch.ones(2, 3)
    ours[1, 2] = value
    figures = measure(ours, torch.ones(2, 3))
    assert figures.relative_per_token == (0.0, math.inf)
    assert figures.max_abs == figures.rms == math.inf
    assert not judge_op("prefill", 0, "q_proj", figures, [0, 1]).passed


def test_measure_of_zeros():
    zero = torch.zeros(2, 3)
    assert measure(zero, zero) == ErrorFigures(0.0, (0.0, 0.0), 0.0)
    assert measure(zero + 1e-9, zero).max_relative == math.inf


def test_operations_are_judged_by_their_worst_token_in_float32_and_by_the_peer_in_bfloat16():
    figures = ErrorFigures(0.01, (1e-6, 3e-4, 4e-4), 1e-2)
    result = judge_op("chunk", 1, "o_proj", figures, [7, 8, 9])
    assert (result.passed, result.error, result.first_bad_token) == (False, 4e-4, 8)
    for theirs, passed in ((0.0066, False), (0.0067, True)):  # 1.5 times that is below or above 1e-2
        assert judge_op("chunk", 1, "o_proj", figures, [7, 8, 9], ErrorFigures(0.0, (), theirs)).passed is passed
    exact = ErrorFigures(0.0, (), 0.0)
    assert judge_op("chunk", 1, "q_norm", ErrorFigures(0.0, (0.0,), BFLOAT16_FLOOR), [0], exact).passed


def logits(first: float, second: float) -> torch.Tensor:
    return torch.tensor([0.0, first, second, -4.0])


@pytest.mark.parametrize(
    ("margin", "chosen", "verdict"),
    [
        (0.5, 1, "equal"),
        (0.5, 2, "bug"),
        (1.5 * NEAR_TIE_MARGIN, 2, "bug"),
        (0.5 * NEAR_TIE_MARGIN, 2, "near tie"),
        (0.5 * NEAR_TIE_MARGIN, 1, "equal"),
        (0.5, -1, "bug"),  # nothing could be drawn
    ],
)
def test_a_different_token_is_a_near_tie_only_where_the_margin_is_small(margin, chosen, verdict):
    reference = logits(3.0, 3.0 - margin)
    token = judge_token(
        0, 9, reference, reference + 1e-6, chosen, margin_limit=NEAR_TIE_MARGIN, error_limit=LOGIT_TOLERANCE
    )
    assert (token.verdict, token.expected, token.position) == (verdict, 1, 9)
    assert token.margin == pytest.approx(margin, abs=1e-6)


def test_the_same_token_from_wrong_logits_is_a_bug():
    reference = logits(3.0, 1.0)
    token = judge_token(0, 9, reference, reference * 1.01, 1, margin_limit=1e-3, error_limit=LOGIT_TOLERANCE)
    assert token.verdict == "bug"
    assert token.max_abs == pytest.approx(0.04, rel=1e-3)


def test_a_claim_needs_rows_and_equal_bits_where_bits_are_promised():
    assert Claim("a", "", 8, 8, 0.0, 0.0).passed
    assert not Claim("a", "", 8, 7, 0.0, 0.0).passed  # -0.0 for 0.0: no difference, other bits
    assert Claim("a", "", 8, 0, 5e-5, 1e-4).passed
    assert not Claim("a", "", 8, 0, 2e-4, 1e-4).passed
    assert not Claim("a", "", 0, 0, 0.0, 1e-4).passed  # nothing was compared


def report(**changes: object) -> Report:
    values = {"prompts": [[5, 6, 7], [8, 9]], "machine": {}, "versions": {"transformers": "5"}, **changes}
    return Report("m", "torch", "float32", 2, 16, **values)


def test_json_has_the_fixed_keys_and_no_infinity():
    figures = ErrorFigures(math.inf, (0.0, 0.0, 0.0, math.inf, 0.0), math.inf)
    near = judge_token(0, 3, logits(3.0, 2.9995), logits(3.0, 2.9995), 2, margin_limit=1e-3, error_limit=1e-3)
    found = report(ops=[judge_op("prefill", 1, "kv_write", figures, range(5))], tokens=[near])
    content = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    fixed = {"passed": False, "layers": 2, "tokens_compared": 1, "near_ties": 1, "bugs": 1}
    assert {key: content[key] for key in fixed} == fixed
    assert list(content)[:5] == list(fixed)
    assert content["op_errors"][0]["max_abs"] is None
    place = {"layer": 1, "op": "kv_write", "prompt": 1, "position": 0, "paths": ["prefill"]}
    assert {key: content["bug_details"][0][key] for key in place} == place


def test_a_report_without_bugs_passes():
    clean = report(tokens=[judge_token(0, 3, logits(3, 1), logits(3, 1), 1, margin_limit=1e-3, error_limit=1e-3)])
    assert clean.passed
    assert clean.to_dict()["bugs"] == 0


def test_token_numbers_become_prompt_and_position():
    assert [report().token_position(number) for number in range(5)] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
    with pytest.raises(IndexError):
        report().token_position(5)
