"""From logits to tokens: one call per step for the whole batch, in which each row's result is that of the row alone."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from minipaged.engine.plan import SampledToken
from minipaged.engine.request import Sequence
from minipaged.ops.transfer import fetch, upload
from minipaged.sampling.device_sample import sample_on_device
from minipaged.sampling.logit_edits import TokenCounts, edit_logits
from minipaged.sampling.logprobs import token_logprobs
from minipaged.sampling.rng import uniforms
from minipaged.sampling.sample import Array, on_host, row_argmax, rows_of, sample

_UINT64 = (1 << 64) - 1
_NOTHING_LEFT = "no token is left to sample: token_mask, min_tokens and the model together exclude all of them"


class Sampler:
    """Samples one token per row. Keeps the token counts of sequences with penalties, which can always be rebuilt."""

    def __init__(self, vocab_size: int) -> None:
        if vocab_size < 1:
            raise ValueError(f"vocab_size must be at least 1, got {vocab_size}")
        self.vocab_size = vocab_size
        self._counts: dict[int, TokenCounts] = {}

    @torch.inference_mode()
    def sample(self, logits: Tensor, sequences: Seq[Sequence]) -> list[SampledToken]:
        """The next token of each sequence.

        logits: float32 [R, V], one row per sequence (siblings that share a prefill: the row repeated); not changed.
        Each sequence's `token_ids` end with the token whose logits these are, and its `params` are resolved. A row that
        holds NaN or +inf, in which nothing is left to sample, or whose parameters raise, gives a `SampledToken` with
        `error`; the others are not touched by it.
        """
        if logits.shape != (len(sequences), self.vocab_size):
            wanted = [len(sequences), self.vocab_size]
            raise ValueError(f"logits must have shape {wanted} (sequences, vocabulary), got {list(logits.shape)}")
        try:
            return self._sample(logits.detach().float(), sequences)
        except Exception as error:  # of one row, most likely: alone, each row gives what it gives in a batch
            if len(sequences) == 1:
                return [SampledToken(-1, error=f"sampling failed: {type(error).__name__}: {error}")]
            return [self.sample(logits[row : row + 1], [one])[0] for row, one in enumerate(sequences)]

    def _sample(self, logits: Tensor, sequences: Seq[Sequence]) -> list[SampledToken]:
        edited = [row for row, sequence in enumerate(sequences) if sequence.edits_logits]
        changed = set(edited)
        plain = [row for row, s in enumerate(sequences) if row not in changed and not s.params.greedy]
        sample_rows = self._sample_on_host if on_host(logits) else self._sample_on_device
        tokens, errors = sample_rows(logits, plain, edited, sequences)
        results = [SampledToken(token) for token in tokens.tolist()]
        for row, message in errors.items():
            results[row] = SampledToken(-1, error=message)
        with_logprobs = [row for row, s in enumerate(sequences) if s.params.logprobs is not None and row not in errors]
        self._add_logprobs(logits, with_logprobs, sequences, results)
        return results

    def release(self, sequence_ids: Iterable[int]) -> None:
        """Forget these sequences; unknown ids are ignored. One that comes back (after a preemption) is counted
        again."""
        for sequence_id in sequence_ids:
            self._counts.pop(sequence_id, None)

    def _sample_on_host(
        self, logits: Tensor, plain: list[int], edited: list[int], sequences: Seq[Sequence]
    ) -> tuple[Array, dict[int, str]]:
        """Token ids [R], and why some rows have none. plain: rows to sample as they are; edited: to change first."""
        tokens, top = row_argmax(logits)
        errors = _broken(top)
        plain, edited = ([row for row in rows if row not in errors] for rows in (plain, edited))
        if plain:
            tokens[plain] = _sampled(logits, top, plain, sequences)
        if edited:
            chosen = [sequences[row] for row in edited]
            work = logits.index_select(0, torch.tensor(edited))  # a copy
            problems = edit_logits(work, chosen, self._counts)
            best, top = row_argmax(work)
            for member in np.flatnonzero(~np.isfinite(top)).tolist():
                problems.setdefault(member, _NOTHING_LEFT)
            random = [member for member, s in enumerate(chosen) if member not in problems and not s.params.greedy]
            if random:
                best[random] = _sampled(work, top, random, chosen)
            tokens[edited] = best
            errors |= {edited[member]: text for member, text in problems.items()}
        return tokens, errors

    def _sample_on_device(
        self, logits: Tensor, plain: list[int], edited: list[int], sequences: Seq[Sequence]
    ) -> tuple[Array, dict[int, str]]:
        """As `_sample_on_host`, without a look at the device until all is sampled: a step's only wait. Rows that turn
        out to be broken were sampled in vain."""
        top, tokens = logits.max(dim=1)
        left = top
        errors: dict[int, str] = {}
        if plain:
            tokens = _put(tokens, plain, _sampled_there(logits, plain, sequences))
        if edited:
            chosen = [sequences[row] for row in edited]
            work = logits.index_select(0, upload(edited, logits.device))
            errors = {edited[member]: text for member, text in edit_logits(work, chosen, self._counts).items()}
            left_of, best = work.max(dim=1)
            random = [member for member, sequence in enumerate(chosen) if not sequence.params.greedy]
            if random:
                best = _put(best, random, _sampled_there(work, random, chosen))
            tokens, left = _put(tokens, edited, best), _put(left, edited, left_of)
        # float64 holds all of them exactly
        ids, top_, left_ = fetch(torch.stack([tokens.double(), top.double(), left.double()]))
        for row in np.flatnonzero(~np.isfinite(left_)).tolist():
            errors.setdefault(row, _NOTHING_LEFT)
        return ids.astype(np.int64), errors | _broken(top_.astype(np.float32))

    def _add_logprobs(
        self, logits: Tensor, rows: list[int], sequences: Seq[Sequence], results: list[SampledToken]
    ) -> None:
        by_count: dict[int, list[int]] = {}
        for row in rows:
            by_count.setdefault(sequences[row].params.logprobs or 0, []).append(row)
        for k, members in by_count.items():
            entries = token_logprobs(rows_of(logits, members), [results[row].token_id for row in members], k)
            for row, entry in zip(members, entries, strict=True):
                results[row].logprobs = entry
                results[row].logprob = entry[results[row].token_id].logprob


def _uniforms(sequences: Seq[Sequence]) -> Array:
    """Each sequence's number for its next token."""
    keys = np.array([[s.seed & _UINT64, s.index, len(s.token_ids)] for s in sequences], dtype=np.uint64).T
    return uniforms(keys[0], keys[1], keys[2])


def _broken(top: Array) -> dict[int, str]:
    """Rows whose largest logit is no number to sample by."""
    return {
        row: f"the model gave logits that cannot be sampled: their maximum is {top[row]}"
        for row in np.flatnonzero(~np.isfinite(top)).tolist()
    }


def _sampled(logits: Tensor, top: Array, rows: list[int], sequences: Seq[Sequence]) -> Array:
    """Token ids of these rows of `logits`, `top` (their largest logits) and `sequences`."""
    chosen = [sequences[row] for row in rows]
    return sample(rows_of(logits, rows), top[rows], [s.params for s in chosen], _uniforms(chosen))


def _sampled_there(logits: Tensor, rows: list[int], sequences: Seq[Sequence]) -> Tensor:
    """`_sampled` on the device of `logits`."""
    chosen = [sequences[row] for row in rows]
    return sample_on_device(rows_of(logits, rows), [s.params for s in chosen], _uniforms(chosen))


def _put(values: Tensor, rows: list[int], new: Tensor) -> Tensor:
    """`values` with `new` at `rows`, ascending."""
    return new if len(rows) == len(values) else values.index_copy(0, upload(rows, values.device), new)
