"""The sampler as a whole: edits, penalties, masks, seeds, batches. CASES C15, C31, C35, C36, C38."""

from __future__ import annotations

import math
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from text_rig import sequence
from transformers.generation.logits_process import MinNewTokensLengthLogitsProcessor, RepetitionPenaltyLogitsProcessor

from minipaged.engine.plan import SampledToken
from minipaged.engine.request import Sequence
from minipaged.sampling import sample as sample_module
from minipaged.sampling import sampler as sampler_module
from minipaged.sampling.logit_edits import edit_logits
from minipaged.sampling.logprobs import token_logprobs
from minipaged.sampling.sampler import Sampler
from minipaged.sampling_params import SamplingParams

V = 320


def with_eos(params: SamplingParams, eos: tuple[int, ...]) -> SamplingParams:
    class Defaults:
        eos_token_ids = eos
        temperature = top_p = top_k = min_p = repetition_penalty = None

    return params.resolve(Defaults(), 1000)


def edited(logits: torch.Tensor, seq: Sequence) -> torch.Tensor:
    work = logits[None].clone()
    assert edit_logits(work, [seq], {}) == {}
    return work[0]


def test_penalties_count_exactly_the_right_tokens_c35() -> None:
    logits = torch.zeros(V)
    seq = sequence(prompt=(3, 3), output=(5, 5, 6), frequency_penalty=0.5, presence_penalty=0.2)
    got = edited(logits, seq)
    want = torch.zeros(V)
    want[5], want[6] = -1.2, -0.7
    assert torch.allclose(got, want, atol=1e-6)
    logits[3], logits[5] = 4.0, -1.0
    got = edited(logits, sequence(prompt=(3, 3), output=(5,), repetition_penalty=2.0))
    assert (got[3].item(), got[5].item(), got[-1].item()) == (2.0, -2.0, 0.0)


def test_repetition_penalty_equals_hugging_face() -> None:
    torch.manual_seed(0)
    logits = torch.randn(V) * 3
    prompt, output = (3, 3, 200), (5, 319, 0)
    want = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([[*prompt, *output]]), logits[None].clone())[0]
    assert torch.allclose(
        edited(logits, sequence(prompt=prompt, output=output, repetition_penalty=1.3)), want, rtol=1e-6
    )


def test_penalties_touch_only_who_asks_beside_a_longer_neighbour_c35() -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, V)
    asking = sequence(prompt=(3,), output=(5, 5), frequency_penalty=2.0, sequence_id=1)
    longer = sequence(prompt=tuple(range(50)), output=tuple(range(100)), repetition_penalty=1.5, sequence_id=2)
    before = logits.clone()
    result = Sampler(V).sample(logits, [sequence(), asking, longer])
    assert torch.equal(logits, before)
    assert result[0].token_id == logits[0].argmax()
    assert result[1].token_id == edited(logits[1], asking).argmax()
    assert result[2].token_id == edited(logits[2], longer).argmax()


def test_counts_follow_incrementally_and_after_a_preemption_c35() -> None:
    """The state kept token by token gives what a fresh one gives, with more ids than its first buffer holds."""
    rng = np.random.default_rng(0)
    torch.manual_seed(0)
    sampler = Sampler(V)
    seq = sequence(
        prompt=(1, 2, 2), frequency_penalty=0.3, presence_penalty=0.1, repetition_penalty=1.2, temperature=1.0
    )
    for step in range(200):
        logits = torch.randn(1, V)
        got = sampler.sample(logits, [seq])[0].token_id
        assert got == Sampler(V).sample(logits, [seq])[0].token_id
        naive = torch.zeros(V)
        for token in seq.token_ids[3:]:
            naive[token] += 1
        seen = torch.zeros(V, dtype=torch.bool)
        seen[seq.token_ids] = True
        x = torch.where(seen, torch.where(logits[0] > 0, logits[0] / 1.2, logits[0] * 1.2), logits[0])
        x = x - 0.3 * naive - 0.1 * (naive > 0)
        assert torch.allclose(edited(logits[0], seq), x, atol=1e-5)
        seq.token_ids.append(int(rng.integers(0, V)))
        if step == 120:
            sampler.release([seq.sequence_id, 999])
    assert sampler._counts.keys() == {seq.sequence_id}
    sampler.release([seq.sequence_id])
    assert not sampler._counts


def test_bias_comes_before_the_penalties_and_min_tokens_after_c38() -> None:
    logits = torch.zeros(V)
    seq = sequence(prompt=(7,), repetition_penalty=2.0, logit_bias={7: 4.0, 8: -100.0})
    got = edited(logits, seq)
    assert (got[7].item(), got[8].item()) == (2.0, -100.0)
    params = with_eos(SamplingParams(temperature=0, min_tokens=2, stop_token_ids=[9], logit_bias={9: 100.0}), (300,))
    got = edited(logits, sequence(params, output=(1,)))
    assert got[9] == got[300] == -math.inf


def test_no_end_before_min_tokens_with_several_eos_ids_c38() -> None:
    params = with_eos(SamplingParams(temperature=0, min_tokens=5, stop_token_ids=[7]), (300, 301, 151_645))
    logits = torch.zeros(1, V)
    logits[0, [301, 300, 7, 12]] = torch.tensor([9.0, 8.0, 7.0, 6.0])
    for generated in range(7):
        seq = sequence(params, output=(1,) * generated)
        got = Sampler(V).sample(logits, [seq])[0].token_id
        assert got == (12 if generated < 5 else 301)
        hf = MinNewTokensLengthLogitsProcessor(2, 5, [300, 301, 7], device="cpu")
        assert got == hf(torch.tensor([seq.token_ids]), logits.clone()).argmax()


def test_ids_beyond_the_vocabulary_never_reach_the_next_row() -> None:
    """An end-of-sequence id that the model does not have would be another row's token in flat addressing."""
    params = with_eos(SamplingParams(temperature=0, min_tokens=5, stop_token_ids=[V + 3]), (V + 4,))
    logits = torch.zeros(2, V)
    logits[1, 3:5] = 5.0
    assert Sampler(V).sample(logits, [sequence(params), sequence(logit_bias={V + 5: 50.0})])[1].token_id == 3


def test_token_mask_allows_only_what_it_says_and_sees_the_output() -> None:
    seen: list[list[int]] = []

    def mask(token_ids: list[int]) -> np.ndarray:
        seen.append(token_ids)
        allowed = np.zeros(100, dtype=bool)  # shorter than the vocabulary: the rest is forbidden
        allowed[[11, 22]] = True
        return allowed

    logits = torch.zeros(3, V)
    logits[:, 22], logits[:, 200], logits[:, 50] = 1.0, 9.0, 8.0
    result = Sampler(V).sample(
        logits,
        [
            sequence(token_mask=mask, output=(4, 5)),
            sequence(token_mask=lambda _: None),
            sequence(token_mask=lambda _: torch.arange(V) == 50),
        ],
    )
    assert [r.token_id for r in result] == [22, 200, 50]
    assert seen == [[4, 5]]


def test_a_mask_that_fails_or_allows_nothing_fails_its_own_row_only() -> None:
    def broken(_: list[int]) -> None:
        raise RuntimeError("no grammar")

    logits = torch.randn(6, V)
    masks = [broken, lambda _: [False] * V, lambda _: [True] * (V + 1), lambda _: [1] * V, lambda _: [[True]], None]
    result = Sampler(V).sample(logits, [sequence(token_mask=m, logprobs=2, temperature=1.0) for m in masks])
    for got, word in zip(result, ["no grammar", "no token is left", "320", "bool", "bool", None], strict=True):
        assert (got.error is None) == (word is None)
        assert word is None or word in str(got.error)
        assert (got.logprobs is None) == (word is not None)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_bad_logits_fail_their_own_row_only(bad: float) -> None:
    torch.manual_seed(0)
    logits = torch.randn(5, V)
    fields = [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.5}, {"frequency_penalty": 1.0}, {"logprobs": 3}]
    sequences = [sequence(**f, output=(5,), sequence_id=i, seed=i) for i, f in enumerate(fields)]
    good = Sampler(V).sample(logits, sequences)
    for row in range(5):
        broken = logits.clone()
        broken[row, 77] = bad
        got = Sampler(V).sample(broken, sequences)
        assert "cannot be sampled" in str(got[row].error)
        assert [r for i, r in enumerate(got) if i != row] == [r for i, r in enumerate(good) if i != row]
    empty = logits.clone()
    empty[2] = -math.inf
    assert "-inf" in str(Sampler(V).sample(empty, sequences)[2].error)


@st.composite
def rows(draw: st.DrawFn) -> dict[str, object]:
    fields: dict[str, object] = {"temperature": draw(st.sampled_from([0.0, 0.0, 1e-6, 0.7, 1.0, 3.0]))}
    optional = {
        "top_k": st.sampled_from([0, 1, 5, 40, 200, 10_000]),
        "top_p": st.sampled_from([0.0, 0.3, 0.9, 0.99999, 1.0]),
        "min_p": st.sampled_from([0.01, 0.3]),
        "frequency_penalty": st.sampled_from([0.7, -1.0]),
        "repetition_penalty": st.just(1.3),
        "logit_bias": st.just({0: 5.0, 5: -3.0}),
        "logprobs": st.sampled_from([-1, 0, 1, 7]),
        "min_tokens": st.sampled_from([1, 9]),
        "token_mask": st.just(lambda ids: np.arange(100) % 3 != len(ids) % 3),
    }
    for name, values in optional.items():
        if draw(st.integers(0, 2)) == 0:
            fields[name] = draw(values)
    return fields


@settings(max_examples=60, deadline=None)
@given(st.lists(rows(), min_size=2, max_size=8), st.sampled_from([4, 100, 127, 320, 1031, 4096]), st.integers(0, 2**32))
def test_a_row_alone_is_bit_identical_to_the_row_in_any_batch(fields: list[dict], vocab: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy((rng.normal(size=(len(fields), vocab)) * 4).astype(np.float32))
    sequences = [
        sequence(
            **f, sequence_id=i, seed=seed + i % 2, index=i % 3, output=tuple(rng.integers(0, vocab, size=i).tolist())
        )
        for i, f in enumerate(fields)
    ]
    together = Sampler(vocab).sample(logits, sequences)
    backwards = Sampler(vocab).sample(logits.flip(0), sequences[::-1])[::-1]
    alone = [Sampler(vocab).sample(logits[i : i + 1].clone(), [s])[0] for i, s in enumerate(sequences)]
    assert together == backwards == alone  # floats of log-probabilities included


@settings(max_examples=40, deadline=None)
@given(
    st.lists(rows(), min_size=1, max_size=5), st.sampled_from([127, 320, 4096]), st.integers(0, 2**32), st.booleans()
)
def test_the_device_path_samples_what_the_host_path_samples(
    fields: list[dict], vocab: int, seed: int, ties: bool
) -> None:
    """The branches for tensors that numpy cannot reach, run here on the CPU."""
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy((rng.normal(size=(len(fields), vocab)) * 4).astype(np.float32))
    logits = logits.round() if ties else logits
    sequences = [sequence(**f, sequence_id=i, seed=seed, output=(5, 7)) for i, f in enumerate(fields)]
    host = Sampler(vocab).sample(logits, sequences)
    with mock.patch.object(sample_module, "on_host", return_value=False):
        assert Sampler(vocab).sample(logits, sequences) == host


def test_unresolved_parameters_are_an_error() -> None:
    token = Sampler(V).sample(torch.zeros(1, V), [Sequence(0, 0, [1], 1, SamplingParams(), 0)])[0]
    assert token.error is not None
    assert "must be resolved" in token.error


class Raises:
    """A value of a request that nobody looked at: whatever is done with it raises."""

    def __getattr__(self, name: str) -> object:
        raise OverflowError(f"no {name}")


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "logit_bias", "min_tokens", "frequency_penalty"])
def test_a_row_that_raises_ends_alone_d20(field: str, on_host: bool) -> None:
    """The exception becomes that row's error; the others get the tokens and log-probabilities of a batch without it."""
    torch.manual_seed(5)
    logits = torch.randn(4, V)
    fields: list[dict] = [
        {"temperature": 0.9, "logprobs": 2},
        {"temperature": 1.0, "top_p": 0.8},
        {"repetition_penalty": 1.3, "temperature": 0.7},
        {"temperature": 0.0},
    ]
    sequences = [sequence(**f, sequence_id=i, seed=i, output=(5, 7)) for i, f in enumerate(fields)]
    bad = sequence(temperature=0.8, sequence_id=9, logit_bias={1: 0.5})
    object.__setattr__(bad.params, field, Raises())
    with mock.patch.object(sampler_module, "on_host", return_value=on_host):
        wanted = Sampler(V).sample(logits, sequences)
        got = Sampler(V).sample(torch.cat([logits[:2], logits[:1], logits[2:]]), [*sequences[:2], bad, *sequences[2:]])
        alone = Sampler(V).sample(logits[:1], [bad])
    assert got[:2] + got[3:] == wanted
    assert all(token.error is None for token in wanted)
    for failed in (got[2], alone[0]):
        assert failed.token_id == -1
        assert failed.error is not None
        assert failed.error.startswith("sampling failed: ")


def test_children_of_one_prefill_draw_differently_and_repeatably_c15() -> None:
    torch.manual_seed(0)
    row = torch.randn(1, V)

    def children(seed: int, **fields: object) -> list[int]:
        siblings = [sequence(temperature=1.0, seed=seed, index=i, **fields) for i in range(8)]
        return [r.token_id for r in Sampler(V).sample(row.expand(8, V), siblings)]

    assert len(set(children(7))) > 2
    assert children(7) == children(7)
    assert children(7) != children(8)
    assert children(-1) == children(2**64 - 1)
    assert len(set(children(7, top_k=1))) == 1
    greedy = [sequence(index=i) for i in range(3)]
    assert {r.token_id for r in Sampler(V).sample(row.expand(3, V), greedy)} == {int(row.argmax())}


def test_samples_follow_the_distribution() -> None:
    """Chi-square over positions and seeds: p < 1e-6 for a right sampler."""
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5, -3.0])
    want = torch.softmax(logits.double() / 0.8, 0).numpy()
    rows = 4000
    sequences = [sequence(temperature=0.8, seed=i // 100, prompt=(0,) * (1 + i % 100)) for i in range(rows)]
    tokens = [r.token_id for r in Sampler(6).sample(logits.expand(rows, 6), sequences)]
    expected = want * rows
    assert ((np.bincount(tokens, minlength=6) - expected) ** 2 / expected).sum() < 35.9


@pytest.mark.parametrize("ties", [False, True])
def test_logprobs_are_of_the_raw_distribution_with_the_sampled_token_c36(ties: bool) -> None:
    torch.manual_seed(0)
    logits = torch.randn(8, V) * 2
    if ties:
        logits = logits.round()
    ks = [0, 1, 5, V, -1, 3, 0, None]
    fields = [{"temperature": 1.5, "top_p": 0.3}, {"logit_bias": {4: 100.0}}, {"temperature": 3.0}, {}, {}, {}, {}, {}]
    sequences = [sequence(logprobs=k, seed=i, **f) for i, (k, f) in enumerate(zip(ks, fields, strict=True))]
    result = Sampler(V).sample(logits, sequences)
    assert (result[7].logprobs, result[7].logprob) == (None, None)
    oracle = torch.log_softmax(logits.double(), -1)
    assert result[1].token_id == 4
    for row, k in enumerate(ks[:7]):
        got, token = result[row].logprobs, result[row].token_id
        assert got is not None
        order = np.argsort(-logits[row].numpy(), kind="stable")
        top = order[: V if k == -1 else k].tolist()
        assert set(got) == {token, *top}
        assert next(iter(got)) == token
        assert result[row].logprob == got[token].logprob
        for token_id, entry in got.items():
            assert entry.logprob == pytest.approx(oracle[row, token_id].item(), abs=2e-6)
            assert entry.rank == 1 + order.tolist().index(token_id)
            assert entry.decoded_token is None


def test_prompt_logprobs_give_one_entry_per_next_token_c18() -> None:
    torch.manual_seed(0)
    logits = torch.randn(5, V)
    tokens = [3, 319, 0, 7, 7]
    got = token_logprobs(logits, tokens, 2)
    oracle = torch.log_softmax(logits.double(), -1)
    for row, (token, entry) in enumerate(zip(tokens, got, strict=True)):
        assert set(entry) == {token, *logits[row].topk(2).indices.tolist()}
        assert entry[token].logprob == pytest.approx(oracle[row, token].item(), abs=2e-6)
    assert [len(e) for e in token_logprobs(logits, tokens, -1)] == [V] * 5
    assert token_logprobs(logits[:0], [], 3) == []
    with pytest.raises(ValueError, match="4 token ids for 5 rows"):
        token_logprobs(logits, tokens[:4], 1)


def test_impossible_tokens_have_minus_infinity_and_a_rank() -> None:
    logits = torch.zeros(1, V)
    logits[0, 5] = -math.inf
    entry = token_logprobs(logits, [5], 1)[0]
    assert (entry[5].logprob, entry[5].rank) == (-math.inf, V)


def test_shapes_are_checked_and_an_empty_batch_is_fine() -> None:
    assert Sampler(V).sample(torch.zeros(0, V), []) == []
    with pytest.raises(ValueError, match=r"\[1, 320\].*got \[1, 319\]"):
        Sampler(V).sample(torch.zeros(1, 319), [sequence()])
    with pytest.raises(ValueError, match="vocab_size"):
        Sampler(0)
    assert Sampler(V).sample(torch.ones(1, V, dtype=torch.bfloat16), [sequence()]) == [SampledToken(0)]
