"""merge_attention_states: attention over a union from attention over its parts."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minipaged.ops import merge_attention_states


def attend(scores: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """scores [H, L], values [L, D]; an empty L gives (0, -inf)."""
    if scores.shape[-1] == 0:
        return torch.zeros(scores.shape[0], values.shape[1]), torch.full((scores.shape[0],), -torch.inf)
    return torch.softmax(scores, -1) @ values, torch.logsumexp(scores, -1)


@settings(max_examples=100, deadline=None)
@given(
    cuts=st.lists(st.integers(0, 40), min_size=1, max_size=6),
    spread=st.sampled_from([0.1, 1.0, 30.0, 3000.0]),
    shift=st.sampled_from([-20000.0, 0.0, 20000.0]),
    seed=st.integers(0, 2**16),
)
def test_folding_parts_equals_one_pass(cuts: list[int], spread: float, shift: float, seed: int) -> None:
    """Any cut into parts, empty ones included, scores of any size; the fold from the right agrees as well."""
    rng = torch.Generator().manual_seed(seed)
    scores = torch.randn(3, 40, generator=rng, dtype=torch.float64) * spread + shift
    values = torch.randn(40, 8, generator=rng, dtype=torch.float64)
    expected_o, expected_lse = attend(scores, values)
    bounds = [0, *sorted(cuts), 40]
    parts = [attend(scores[:, a:b], values[a:b]) for a, b in pairwise(bounds)]
    for order in (parts, parts[::-1]):
        o, lse = order[0]
        for part in order[1:]:
            o, lse = merge_attention_states(o, lse, *part)
        torch.testing.assert_close(o.double(), expected_o, atol=1e-9, rtol=1e-9)
        torch.testing.assert_close(lse.double(), expected_lse, atol=1e-9, rtol=1e-12)


def test_c21_two_empty_states() -> None:
    o, lse = merge_attention_states(*(torch.zeros(2, 8), torch.full((2,), -torch.inf)) * 2)
    assert (o == 0).all()
    assert (lse == -torch.inf).all()


def test_c21_an_empty_state_changes_nothing_whatever_it_holds() -> None:
    o, lse = torch.randn(2, 8), torch.tensor([3.0, -200.0])
    empty = torch.full((2, 8), torch.nan), torch.full((2,), -torch.inf)
    for merged in (merge_attention_states(o, lse, *empty), merge_attention_states(*empty, o, lse)):
        assert torch.equal(merged[0], o)
        assert torch.equal(merged[1], lse)


def test_dtypes_and_shapes() -> None:
    o, lse = torch.randn(2, 3, 8).bfloat16(), torch.randn(2, 3)
    merged, merged_lse = merge_attention_states(o, lse, o, lse)
    assert merged.dtype == torch.bfloat16
    assert merged_lse.dtype == torch.float32
    torch.testing.assert_close(merged, o)
    torch.testing.assert_close(merged_lse, lse + torch.log(torch.tensor(2.0)))
    with pytest.raises(ValueError, match=r"\(2, 3, 8\), \(2, 3\), \(2, 3, 8\), \(3,\)"):
        merge_attention_states(o, lse, o, lse[0])
