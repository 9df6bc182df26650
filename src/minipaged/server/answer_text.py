"""One child's text, taken apart: thoughts, answer, calls of tools."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from minipaged.text.reasoning import CLOSE, OPEN, ReasoningSplitter, Thinking
from minipaged.text.tool_calls import ToolCall, ToolCallParser

if TYPE_CHECKING:
    from minipaged.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Thought:
    """A piece of what was thought."""

    text: str


Piece = Thought | ToolCall | str


class AnswerText:
    """Text in pieces of any size in; thoughts, text of the answer and calls, in order, out."""

    def __init__(self, thinking: Thinking, *, with_tools: bool = False, parallel: bool = True) -> None:
        """thinking: how the text begins. with_tools: look for calls; all but the first are dropped unless parallel."""
        self._splitter = ReasoningSplitter(thinking)
        self._parser = ToolCallParser() if with_tools else None
        self._parallel = parallel
        self.num_calls = 0

    def feed(self, text: str, *, end: bool) -> list[Piece]:
        """What a piece of text makes certain; `end` also gives out what was held back."""
        reasoning, content = self._splitter.feed(text)
        if end:
            more_reasoning, more_content = self._splitter.finish()
            reasoning, content = reasoning + more_reasoning, content + more_content
        pieces: list[Piece] = [Thought(reasoning)] if reasoning else []
        for piece in self._answer(content, end=end):
            if isinstance(piece, ToolCall):
                if self.num_calls and not self._parallel:
                    continue
                self.num_calls += 1
            if piece:
                pieces.append(piece)
        return pieces

    def _answer(self, content: str, *, end: bool) -> Sequence[str | ToolCall]:
        if self._parser is None:
            return [content]
        pieces = self._parser.feed(content)
        return [*pieces, *self._parser.finish()] if end else pieces


def thought_tokens(token_ids: Sequence[int], thinking: Thinking, tokenizer: Tokenizer) -> int:
    """How many of a text's tokens are of its thought, the tags included."""
    close = tokenizer.token_to_id(CLOSE)

    def text(length: int) -> str:
        return tokenizer.decode(token_ids[:length], skip_special_tokens=False)

    if thinking is Thinking.OFF:
        return 0
    if thinking is Thinking.POSSIBLE and not text(32).lstrip().startswith(OPEN):
        return 0
    if close is not None and close in token_ids:
        return token_ids.index(close) + 1
    lengths = range(1, len(token_ids) + 1)
    return min(len(token_ids), 1 + bisect.bisect_left(lengths, True, key=lambda length: CLOSE in text(length)))
