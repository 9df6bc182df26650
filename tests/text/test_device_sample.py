"""Sampling where the logits live, on CPU tensors: the rules of test_sample.py, and the sampler's way for a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from test_sample import cases, params, reference, sampled
from text_rig import sequence

from minipaged.sampling import sample as sample_module
from minipaged.sampling import sampler as sampler_module
from minipaged.sampling.device_sample import sample_on_device
from minipaged.sampling.sampler import Sampler
from minipaged.sampling_params import SamplingParams


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a second thread that waits for a busy processor costs more than it gives
    yield
    torch.set_num_threads(threads)


def sampled_there(logits: torch.Tensor, p: SamplingParams, uniform: np.ndarray) -> np.ndarray:
    rows = logits.expand(len(uniform), -1).contiguous()
    tokens = sample_on_device(rows, [p] * len(uniform), uniform)
    assert tokens.dtype == torch.int64
    return tokens.numpy()


@settings(max_examples=120, deadline=None)
@given(cases())
def test_samples_follow_the_exact_inverse_cdf_c34_c51(case: tuple[torch.Tensor, SamplingParams]) -> None:
    logits, p = case
    want, slack = reference(logits, p)
    uniform = np.concatenate([np.linspace(0, 1, 40, endpoint=False), [1 - 2.0**-53]])
    sums = np.cumsum(want)
    for u, token in zip(uniform, sampled_there(logits, p, uniform), strict=True):
        below = sums[token - 1] if token else 0.0
        assert below - slack <= u <= sums[token] + slack
        assert want[token] > 0 or slack > 1e-4 or p.top_p > 0.999


@pytest.mark.parametrize("fields", [{}, {"top_k": 20, "top_p": 0.95}, {"top_k": 5000, "min_p": 0.01}, {"top_p": 0.9}])
@pytest.mark.parametrize("shape", ["flat", "peaked", "equal", "bf16"])
def test_full_vocabulary_agrees_with_the_host(fields: dict[str, float], shape: str) -> None:
    """The same uniform numbers give the same tokens; ties at the border of top-k go to the lowest ids."""
    torch.manual_seed(0)
    logits = torch.randn(151_936) * {"flat": 0.05, "peaked": 4.0, "equal": 0.0, "bf16": 3.0}[shape]
    if shape == "bf16":
        logits = logits.bfloat16().float()
    p = params(temperature=0.6, **fields)
    uniform = (np.arange(20) + 0.37) / 20
    here, there = sampled(logits, p, uniform), sampled_there(logits, p, uniform)
    want, slack = reference(logits, p)
    sums = np.cumsum(want)
    same = here == there
    assert same.mean() > 0.5
    assert np.all(np.abs(sums[here] - sums[there])[~same] <= 2 * slack + want[here][~same])
    assert np.all(want[there] > 0)


def test_rows_of_different_parameters_are_independent() -> None:
    torch.manual_seed(1)
    logits = torch.randn(5, 700) * 3
    rows = [
        params(),
        params(top_k=7),
        params(top_p=0.5, temperature=0.4),
        params(min_p=0.2),
        params(top_k=50, top_p=0.8),
    ]
    uniform = np.array([0.1, 0.9, 0.5, 0.77, 0.33])
    together = sample_on_device(logits, rows, uniform).tolist()
    for row, p in enumerate(rows):
        one = slice(row, row + 1)
        assert sample_on_device(logits[one], [p], uniform[one]).tolist() == [together[row]]


def test_the_sampler_for_a_gpu_gives_what_the_one_for_the_cpu_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy, random, edited and broken rows in one batch; logits that hold NaN or inf fail their own row only."""
    torch.manual_seed(2)
    logits = torch.randn(7, 320) * 3
    logits[2, 5] = torch.nan
    logits[4, 9] = torch.inf
    fields: list[dict[str, object]] = [
        {"temperature": 0.0}, {"temperature": 0.7, "top_k": 20, "top_p": 0.9}, {"temperature": 1.0},
        {"temperature": 1.0, "logit_bias": {3: 100.0}}, {"temperature": 0.8}, {"temperature": 1.2, "logprobs": 2},
        {"temperature": 0.0, "repetition_penalty": 1.3},
    ]  # fmt: skip
    sequences = [sequence(prompt=(1, 2, 3 + n), **{"seed": n, **f}) for n, f in enumerate(fields)]
    wanted = Sampler(320).sample(logits, sequences)
    monkeypatch.setattr(sampler_module, "on_host", lambda tensor: False)
    monkeypatch.setattr(sample_module, "on_host", lambda tensor: False)
    got = Sampler(320).sample(logits, sequences)
    assert [s.token_id for s in got] == [s.token_id for s in wanted]
    assert [s.error is None for s in got] == [n not in (2, 4) for n in range(7)]
    assert got[5].logprobs == wanted[5].logprobs
    assert got[3].token_id == 3


def test_edited_rows_on_a_gpu_fail_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks that allow nothing or raise, and NaN under a mask: the same errors as on the host, other rows untouched."""
    torch.manual_seed(3)
    logits = torch.randn(5, 320)
    logits[3, 1] = torch.nan

    def broken(generated: list[int]) -> None:
        raise KeyError("grammar")

    fields: list[dict[str, object]] = [
        {"temperature": 1.0, "token_mask": lambda generated: np.zeros(320, dtype=bool)},
        {"temperature": 1.0, "token_mask": broken},
        {"temperature": 0.7, "token_mask": lambda generated: torch.arange(320) % 2 == 0},
        {"temperature": 0.7, "logit_bias": {7: 1.0}},
        {"temperature": 0.0, "min_tokens": 2, "stop_token_ids": [5]},
    ]
    sequences = [sequence(prompt=(1, 2), **{"seed": n, **f}) for n, f in enumerate(fields)]
    wanted = Sampler(320).sample(logits, sequences)
    monkeypatch.setattr(sampler_module, "on_host", lambda tensor: False)
    got = Sampler(320).sample(logits, sequences)
    assert [(s.token_id, s.error) for s in got] == [(s.token_id, s.error) for s in wanted]
    texts = [str(s.error) for s in got]
    assert "no token is left to sample" in texts[0]
    assert "token_mask failed: KeyError" in texts[1]
    assert "their maximum is nan" in texts[3]
    assert [s.error is None for s in got] == [False, False, True, False, True]
    assert got[2].token_id % 2 == 0
