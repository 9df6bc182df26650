"""`thinking_token_budget`: a thought that is still open after so many tokens is closed."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from minipaged.text.reasoning import CLOSE, OPEN, Thinking

if TYPE_CHECKING:
    from minipaged.server.guided import TokenMask
    from minipaged.text.tokenizer import Tokenizer

MOST_TOKENS_OF_A_TAG = 16
REMEMBERED = 64  # texts, at least one for each of a request's children


class ThinkingBudget:
    """A `token_mask` that allows nothing but `</think>` once a thought has taken `budget` tokens, the tag that opens it
    not counted, and everything, or what `inner` allows, before and afterwards.
    """

    def __init__(
        self, budget: int, thinking: Thinking, tokenizer: Tokenizer, vocab_size: int, inner: TokenMask | None
    ) -> None:
        """budget: at least 0. thinking: how the text begins. vocab_size: of the model. inner: another mask that holds
        as well."""
        self._budget = budget
        self._thinking = thinking
        self._tokenizer = tokenizer
        self._close = tokenizer.encode(CLOSE, add_special_tokens=False)
        self._vocab_size = vocab_size
        self.inner = inner
        self._is_open = lru_cache(maxsize=REMEMBERED)(self._still_thinks)

    def __call__(self, token_ids: list[int]) -> Any:
        """bool [vocabulary], or None for all."""
        token = self._forced(token_ids)
        if token is None:
            return None if self.inner is None else self.inner(token_ids)
        allowed = np.zeros(self._vocab_size, dtype=np.bool_)
        allowed[token] = True
        return allowed

    def _forced(self, token_ids: list[int]) -> int | None:
        start = self._start(token_ids)
        if start is None:
            return None
        end = start + self._budget
        written = len(token_ids) - end
        if not 0 <= written < len(self._close) or not self._is_open(tuple(token_ids[:end]), start):
            return None
        return self._close[written]

    def _start(self, token_ids: list[int]) -> int | None:
        """Where the thought begins, None while there is none."""
        if self._thinking is not Thinking.POSSIBLE:
            return 0 if self._thinking is Thinking.OPENED else None
        for length in range(1, min(len(token_ids), MOST_TOKENS_OF_A_TAG) + 1):
            text = self._text(token_ids[:length]).lstrip()
            if text.startswith(OPEN):
                return length
            if not OPEN.startswith(text):
                return None
        return None

    def _still_thinks(self, token_ids: tuple[int, ...], start: int) -> bool:
        return CLOSE not in self._text(list(token_ids[start:]))

    def _text(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)
