"""Changes to the logits before sampling, in this order: bias, penalties, minimum length, token mask. Only rows that ask
are touched."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from minipaged.engine.request import Sequence
from minipaged.ops.transfer import upload

_Array: TypeAlias = "np.ndarray[Any, Any]"


class TokenCounts:
    """The distinct ids of one sequence and how often each was generated (0 = only in the prompt), kept up to date token
    by token."""

    __slots__ = ("_column", "_counts", "_ids", "_num_seen")

    def __init__(self, sequence: Sequence) -> None:
        prompt = np.unique(np.asarray(sequence.token_ids[: sequence.num_prompt_tokens], dtype=np.int64))
        self._column = {token_id: column for column, token_id in enumerate(prompt.tolist())}
        self._ids = np.concatenate([prompt, np.zeros(64, dtype=np.int64)])
        self._counts = np.zeros(len(self._ids), dtype=np.float32)
        self._num_seen = sequence.num_prompt_tokens
        self.update(sequence)

    def update(self, sequence: Sequence) -> None:
        """Count the tokens that came since the last call."""
        for position in range(self._num_seen, len(sequence.token_ids)):
            token_id = sequence.token_ids[position]
            column = self._column.setdefault(token_id, len(self._column))
            if column == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[column] = token_id
            self._counts[column] += 1
        self._num_seen = len(sequence.token_ids)

    @property
    def ids(self) -> _Array:
        """int64 [distinct]; a view."""
        return self._ids[: len(self._column)]

    @property
    def counts(self) -> _Array:
        """float32 [distinct]: occurrences in the output; a view."""
        return self._counts[: len(self._column)]


def edit_logits(logits: Tensor, sequences: Seq[Sequence], counts: dict[int, TokenCounts]) -> dict[int, str]:
    """Change `logits` [R, V] in place, one row per sequence. Returns row -> why this row cannot be sampled.

    counts: sequence id -> its `TokenCounts`, filled and brought up to date here for sequences with penalties.
    """
    errors: dict[int, str] = {}
    _add_bias(logits, sequences)
    _apply_penalties(logits, sequences, counts, errors)
    _suppress_ends(logits, sequences)
    for row, sequence in enumerate(sequences):
        mask = sequence.params.token_mask
        if mask is not None:
            try:
                _apply_mask(logits[row], mask(sequence.token_ids[sequence.num_prompt_tokens :]))
            except Exception as error:  # the user's function: whatever it raises fails its own request only
                errors[row] = f"token_mask failed: {type(error).__name__}: {error}"
    return errors


def _flat(row: int, ids: Iterable[int] | _Array, vocab_size: int) -> _Array:
    """Positions in the flattened logits. Ids that the vocabulary does not have would reach into another row: they are
    left out."""
    array = ids if isinstance(ids, np.ndarray) else np.fromiter(ids, dtype=np.int64)
    return array[(array >= 0) & (array < vocab_size)] + row * vocab_size


def _to(array: _Array, logits: Tensor) -> Tensor:
    return upload(array, logits.device)


def _add_bias(logits: Tensor, sequences: Seq[Sequence]) -> None:
    vocab_size = logits.shape[1]
    index, amount = [], []
    for row, sequence in enumerate(sequences):
        for token_id, bias in (sequence.params.logit_bias or {}).items():
            if token_id < vocab_size:
                index.append(row * vocab_size + token_id)
                amount.append(bias)
    if index:
        where = _to(np.asarray(index), logits)
        logits.view(-1)[where] += _to(np.asarray(amount, dtype=np.float32), logits)


def _apply_penalties(
    logits: Tensor, sequences: Seq[Sequence], counts: dict[int, TokenCounts], errors: dict[int, str]
) -> None:
    """repetition r over prompt + output: l / r if l > 0, else l * r; then l - frequency * count - presence * [count >
    0] (OpenAI's API reference), counts over the output."""
    index, factor, amount = [], [], []
    for row, sequence in enumerate(sequences):
        params = sequence.params
        if not params.penalised:
            continue
        state = counts.get(sequence.sequence_id)
        if state is None:
            state = counts[sequence.sequence_id] = TokenCounts(sequence)
        else:
            state.update(sequence)
        where = _flat(row, state.ids, logits.shape[1])
        if len(where) < len(state.ids):
            errors[row] = f"penalties: the sequence holds token ids outside the vocabulary of {logits.shape[1]}"
            continue
        index.append(where)
        factor.append(np.full(len(state.ids), params.repetition_penalty, dtype=np.float32))
        presence, frequency = np.float32(params.presence_penalty), np.float32(params.frequency_penalty)
        amount.append(frequency * state.counts + presence * (state.counts > 0).astype(np.float32))
    if index:
        flat = _to(np.concatenate(index), logits)
        repetition = _to(np.concatenate(factor), logits)
        old = logits.view(-1)[flat]
        scaled = torch.where(old > 0, old / repetition, old * repetition)
        logits.view(-1)[flat] = scaled - _to(np.concatenate(amount), logits)


def _suppress_ends(logits: Tensor, sequences: Seq[Sequence]) -> None:
    index = [
        _flat(row, sequence.params.end_token_ids, logits.shape[1])
        for row, sequence in enumerate(sequences)
        if sequence.num_generated < sequence.params.min_tokens
    ]
    if index:
        logits.view(-1)[_to(np.concatenate(index), logits)] = -torch.inf


def _apply_mask(row: Tensor, given: _Array | Tensor | Seq[bool] | None) -> None:
    if given is None:
        return
    allowed = given if isinstance(given, Tensor) else torch.from_numpy(np.array(given))
    if allowed.dtype != torch.bool or allowed.ndim != 1 or len(allowed) > len(row):
        raise ValueError(
            f"it must return booleans of shape [n], n at most the vocabulary's size {len(row)}, "
            f"got {allowed.dtype} of shape {list(allowed.shape)}"
        )
    row[: len(allowed)].masked_fill_(~upload(allowed, row.device), -torch.inf)
    row[len(allowed) :] = -torch.inf
