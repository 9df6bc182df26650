"""Kept sets, ties and the inverse CDF against full sorts and Hugging Face's warpers. CASES C33, C34, C51."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from text_rig import sequence
from transformers.generation.logits_process import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from minipaged.sampling import sample as sample_module
from minipaged.sampling.rng import mix64, uniforms
from minipaged.sampling.sample import first_of_sort, largest, row_argmax, sample, stable_topk
from minipaged.sampling.sampler import Sampler
from minipaged.sampling_params import SamplingParams


def params(**fields: object) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, **fields}).resolve(None, 100)  # type: ignore[arg-type]


def sampled(logits: torch.Tensor, p: SamplingParams, uniform: np.ndarray) -> np.ndarray:
    """Draw from one row of logits with each of the uniform numbers."""
    rows = logits.expand(len(uniform), -1).contiguous()
    return sample(rows, np.full(len(uniform), logits.max().item(), dtype=np.float32), [p] * len(uniform), uniform)


def reference(logits: torch.Tensor, p: SamplingParams) -> tuple[np.ndarray, float]:
    """The distribution by a full stable sort in float64: an independent statement of the documented rules.

    Also by how much of the CDF a sample may differ: rounding, and one token where top_p falls on a border between two.
    """
    x = logits.double().numpy() / p.temperature
    order = np.lexsort((np.arange(len(x)), -logits.numpy()))
    probs = np.exp(x - x.max())
    probs /= probs.sum()
    keep = order[: p.top_k if 0 < p.top_k < len(x) else len(x)]
    inside = probs[keep] / probs[keep].sum()
    before = np.concatenate([[0.0], np.cumsum(inside)[:-1]])
    on_border = p.top_p < 1 and bool((np.abs(before - p.top_p) < 1e-6).any())
    if p.top_p < 1:
        keep = keep[(before < p.top_p) | (np.arange(len(keep)) == 0)]
    keep = keep[probs[keep] >= p.min_p * probs[keep].max()]
    out = np.zeros(len(x))
    out[keep] = probs[keep]
    out /= out.sum()
    return out, 2e-5 + on_border * out.max()


@st.composite
def cases(draw_from: st.DrawFn) -> tuple[torch.Tensor, SamplingParams]:
    vocab = draw_from(st.sampled_from([1, 5, 127, 128, 320, 1000, 4001]))
    rng = np.random.default_rng(draw_from(st.integers(0, 2**32)))
    logits = rng.normal(size=vocab) * draw_from(st.sampled_from([0.0, 0.3, 3.0, 20.0]))
    if draw_from(st.booleans()):
        logits = np.round(logits)  # many ties
    fields = {
        "temperature": draw_from(st.sampled_from([0.3, 1.0, 1.7])),
        "top_k": draw_from(st.sampled_from([-1, 0, 1, 2, 20, 100, 319, 320, 1000])),
        "top_p": draw_from(st.sampled_from([0.0, 1e-9, 0.1, 0.37, 0.9, 0.99993, 1.0])),
        "min_p": draw_from(st.sampled_from([0.0, 0.0, 0.07, 0.5, 1.0])),
    }
    return torch.tensor(logits, dtype=torch.float32), params(**fields)


@settings(max_examples=120, deadline=None)
@given(cases())
def test_samples_follow_the_exact_inverse_cdf_of_a_full_sort_c34_c51(case: tuple[torch.Tensor, SamplingParams]) -> None:
    logits, p = case
    want, slack = reference(logits, p)
    uniform = np.concatenate([np.linspace(0, 1, 40, endpoint=False), [1 - 2.0**-53]])
    got = sampled(logits, p, uniform)
    sums = np.cumsum(want)
    for u, token in zip(uniform, got, strict=True):
        # the token's interval of the exact CDF, widened by float32 rounding of the probabilities
        below = sums[token - 1] if token else 0.0
        assert below - slack <= u <= sums[token] + slack
        assert (
            want[token] > 0 or slack > 1e-4 or p.top_p > 0.999
        )  # where float32 cannot tell the last token of a nucleus


@pytest.mark.parametrize(
    ("fields", "warpers"),
    [
        ({"top_k": 7}, [TopKLogitsWarper(7)]),
        ({"top_p": 0.8}, [TopPLogitsWarper(0.8)]),
        ({"min_p": 0.05}, [MinPLogitsWarper(0.05)]),
        (
            {"top_k": 50, "top_p": 0.6, "min_p": 0.02},
            [TopKLogitsWarper(50), TopPLogitsWarper(0.6), MinPLogitsWarper(0.02)],
        ),
    ],
)
@pytest.mark.parametrize("scale", [0.01, 1.0, 4.0])
def test_kept_set_and_probabilities_equal_hugging_face(fields: dict, warpers: list, scale: float) -> None:
    torch.manual_seed(3)
    logits = torch.randn(997) * scale
    scores = logits[None] / 0.7
    for warper in warpers:
        scores = warper(None, scores)
    want = torch.softmax(scores.double(), -1)[0].numpy()
    num = 3000
    uniform = (
        np.arange(num) + 0.5
    ) / num  # a grid: each token is sampled in proportion to its probability, to one grid step
    counts = np.bincount(sampled(logits, params(temperature=0.7, **fields), uniform), minlength=997)
    assert np.all(np.abs(counts - want * num) <= 1.5)
    assert set(np.flatnonzero(counts)) <= set(np.flatnonzero(want))
    assert set(np.flatnonzero(want * num > 2)) <= set(np.flatnonzero(counts))


@pytest.mark.parametrize("shape", ["flat", "peaked", "equal", "bf16"])
@pytest.mark.parametrize("fields", [{}, {"top_k": 20}, {"top_k": 5000}])
def test_top_p_at_full_vocabulary_equals_the_full_sort_c51(shape: str, fields: dict) -> None:
    torch.manual_seed(0)
    logits = torch.randn(151_936) * {"flat": 0.05, "peaked": 4.0, "equal": 0.0, "bf16": 3.0}[shape]
    if shape == "bf16":
        logits = logits.bfloat16().float()
    p = params(top_p=0.9, **fields)
    want, slack = reference(logits, p)
    kept = np.flatnonzero(want)
    if fields:
        ids, values = next(largest(logits[None], [fields["top_k"]]))
        weights = np.exp(values.astype(np.float64) - values.max())
        ids = ids[sample_module._restricted(weights, weights.sum(), p) > 0]
    else:
        ids, weights = sample_module._nucleus_candidates(torch.softmax(logits, 0), 0.9)
        ids = ids[sample_module._restricted(weights, 1.0, p) > 0]
    # equal up to the tokens whose border lies within the rounding of a float32 softmax
    assert len(np.setxor1d(ids, kept)) <= 1e-6 / want[want > 0].min() + 1
    uniform = (np.arange(20) + 0.37) / 20
    got = sampled(logits, p, uniform)
    sums = np.cumsum(want)
    assert np.all(want[got] > 0)
    assert np.all((sums[got] - want[got] - slack <= uniform) & (uniform <= sums[got] + slack))


def test_nothing_sorts_the_vocabulary_c51() -> None:
    vocab = 151_936
    logits = torch.randn(4, vocab) * 4
    sizes: list[int] = []
    sort = np.sort

    def counting(values: np.ndarray, *args: object, **kwargs: object) -> np.ndarray:
        sizes.append(values.size)
        return sort(values, *args, **kwargs)

    sampler = Sampler(vocab)
    with (
        mock.patch.object(sample_module.np, "sort", counting),
        mock.patch.object(torch.Tensor, "sort", side_effect=AssertionError("sort")),
        mock.patch.object(torch.Tensor, "topk", side_effect=AssertionError("topk")),
    ):
        for fields in ({"temperature": 0.0}, {"temperature": 0.8}, {"temperature": 0.8, "top_k": 20, "min_p": 0.1}):
            sampler.sample(logits, [sequence(**fields) for _ in range(4)])
        assert sizes == []
        sampler.sample(logits, [sequence(temperature=0.8, top_k=20, top_p=0.9) for _ in range(4)])
        assert max(sizes) == 20
        sizes.clear()
        sampler.sample(logits, [sequence(temperature=0.6, top_p=0.9) for _ in range(4)])
        assert max(sizes) < vocab / 4


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([3, 128, 300, 1500]), st.booleans(), st.data())
def test_largest_and_topk_equal_a_stable_sort_with_ties(seed: int, vocab: int, ties: bool, data: st.DataObject) -> None:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(3, vocab)).astype(np.float32) * 2
    if ties:
        x = np.round(x)
    x[1, rng.integers(0, vocab, size=vocab // 2)] = -np.inf
    k = data.draw(st.integers(1, vocab))
    counts = [k, 1, vocab]
    for row, (ids, values) in enumerate(largest(torch.from_numpy(x), counts)):
        order = np.argsort(-x[row], kind="stable")[: counts[row]]
        assert ids.tolist() == sorted(order.tolist())
        assert np.array_equal(values, x[row][ids])
        assert np.array_equal(np.flatnonzero(first_of_sort(x[row], counts[row])), ids)
    values, ids = stable_topk(torch.from_numpy(x), k)
    assert np.array_equal(ids.numpy(), np.argsort(-x, axis=1, kind="stable")[:, :k])
    assert np.array_equal(values.numpy(), np.take_along_axis(x, ids.numpy(), 1))


def test_argmax_takes_the_lowest_id_and_shows_nan() -> None:
    x = torch.tensor([[1.0, 3.0, 3.0, 2.0], [0.0, float("nan"), 9.0, 0.0], [-torch.inf] * 4])
    ids, top = row_argmax(x)
    assert ids[0] == 1
    assert np.isnan(top[1])
    assert top[2] == -np.inf
    for vocab in (7, 64, 1000, 151_936):
        flat = torch.zeros(3, vocab)
        flat[1, vocab // 2 :] = 1
        assert row_argmax(flat)[0].tolist() == [0, vocab // 2, 0]


@pytest.mark.parametrize("fields", [{}, {"top_k": 50}, {"top_p": 0.95}, {"min_p": 0.01}])
@pytest.mark.parametrize("temperature", [1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-12, 1e-300, 5e-324])
def test_very_small_temperatures_are_greedy_c33(temperature: float, fields: dict) -> None:
    torch.manual_seed(1)
    logits = torch.randn(320)
    logits[17] = 11.06
    tokens = sampled(logits, params(temperature=temperature, **fields), np.linspace(0, 1, 9, endpoint=False))
    assert tokens.tolist() == [17] * 9


def test_large_temperatures_and_logits_stay_finite_c33() -> None:
    logits = torch.tensor([-1e30, 3e38, 0.0, -3e38])
    assert sampled(logits, params(temperature=1e-6), np.array([0.999])).tolist() == [1]
    assert sampled(torch.randn(320), params(temperature=1e30), (np.arange(320) + 0.5) / 320).tolist() == list(
        range(320)
    )


def test_one_token_always_survives_and_ties_keep_the_lower_ids_c34() -> None:
    ties = torch.tensor([0.0, 2.0, 2.0, 2.0, 1.0])
    grid = np.linspace(0, 1, 50, endpoint=False)
    assert set(sampled(ties, params(top_k=2), grid)) == {1, 2}
    assert set(sampled(ties, params(top_p=0.3), grid)) == {1, 2}  # each of the three holds 0.279
    for fields in ({"top_p": 0.0}, {"top_p": 1e-9}, {"top_k": 1}, {"min_p": 1.0, "top_k": 1}):
        assert set(sampled(ties, params(**fields), grid)) == {1}
    assert set(sampled(ties, params(min_p=1.0), grid)) == {1, 2, 3}
    assert set(sampled(ties, params(top_k=5), np.linspace(0, 1, 500, endpoint=False))) == {0, 1, 2, 3, 4}


def test_the_last_token_with_weight_bounds_the_sample() -> None:
    """Tokens of probability 0 are never sampled, not at either end of [0, 1)."""
    for vocab in (5, 300, 1000):
        logits = torch.full((vocab,), -torch.inf)
        logits[[vocab // 3, vocab // 2]] = 0.0
        for fields in ({}, {"top_k": 4}, {"top_p": 0.999}):
            got = sampled(logits, params(**fields), np.array([0.0, 0.49, 0.51, 1 - 2.0**-53]))
            assert got.tolist() == [vocab // 3] * 2 + [vocab // 2] * 2


def test_uniform_numbers_are_splitmix64_and_distinct_per_seed_child_and_position() -> None:
    def oracle(seed: int, count: int) -> list[int]:
        out, state, full = [], seed, 2**64 - 1
        for _ in range(count):
            state = (state + 0x9E3779B97F4A7C15) & full
            z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & full
            z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & full
            out.append(z ^ (z >> 31))
        return out

    # the published first outputs of SplitMix64 for seed 1234567
    assert oracle(1234567, 2) == [6457827717110365317, 3203168211198807973]
    golden = 0x9E3779B97F4A7C15
    states = np.array([(1234567 + golden * (i + 1)) % 2**64 for i in range(5)], dtype=np.uint64)
    assert mix64(states).tolist() == oracle(1234567, 5)
    grid = np.array([(s, c, t) for s in (0, 1, 2**64 - 1) for c in range(8) for t in range(500)], dtype=np.uint64).T
    u = uniforms(grid[0], grid[1], grid[2])
    assert len(set(u.tolist())) == len(u)
    assert u.min() >= 0
    assert u.max() < 1
    counts = np.histogram(u, bins=20, range=(0, 1))[0]
    expected = len(u) / 20
    assert ((counts - expected) ** 2 / expected).sum() < 50.8  # chi-square, 19 degrees of freedom, p = 1e-4
    shifted = np.corrcoef(u[:-1], u[1:])[0, 1]
    assert abs(shifted) < 0.04
