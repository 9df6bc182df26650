"""From token ids to text as it comes, and when it ends: constant cost per token whatever was generated before."""

from __future__ import annotations

import codecs
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from minipaged.outputs import FinishReason, Logprob
from minipaged.sampling_params import SamplingParams
from minipaged.text.reasoning import AnswerStart, Thinking
from minipaged.text.stop_strings import StopMatcher
from minipaged.text.tokenizer import Tokenizer


class Appended(NamedTuple):
    """What one token brought: new text, and why the sequence ended with it (None: it goes on)."""

    delta: str
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


@dataclass(frozen=True, slots=True)
class ChatText:
    """What is different about the text of a chat, for those who split it into thoughts, calls and answer afterwards.

    visible: special tokens that stay in the text although special tokens are skipped. thinking: stop strings count in
    the answer only, and this is how the text begins; None = everywhere. end_token_ids: of a turn, beside the model's.
    """

    visible: frozenset[int] = frozenset()
    thinking: Thinking | None = None
    end_token_ids: tuple[int, ...] = ()


class Detokenizer:
    """The text of one child of a request, and the check of everything that ends it.

    Text is given out as soon as it is certain: not while a character is incomplete, nor while it may still become a
    stop string. The deltas together are `Tokenizer.decode` of all ids, cut where the text ends.
    """

    def __init__(self, params: SamplingParams, tokenizer: Tokenizer | None, chat: ChatText | None = None) -> None:
        """params: resolved. ValueError for stop strings without a tokenizer, since there is no text then."""
        if params.stop and tokenizer is None:
            raise ValueError(f"stop strings need a tokenizer, which this model does not have: stop = {params.stop!r}")
        self._params = params
        # The reason to report per id; an end-of-sequence id that the user lists as well counts as the model's.
        self._ends: dict[int, int | None] = {token_id: token_id for token_id in params.stop_token_ids or ()}
        if not params.ignore_eos:
            self._ends.update(dict.fromkeys(params.eos_token_ids))
        self._stream: TextStream | None = None
        if tokenizer is not None and params.detokenize:
            hidden = tokenizer.special_ids if params.skip_special_tokens else frozenset()
            self._stream = text_stream(tokenizer, hidden - chat.visible if chat else hidden)
        self._matcher = StopMatcher(params.stop_strings) if params.stop else None
        self._answer: AnswerStart | None = None
        if self._matcher is not None and chat is not None and chat.thinking is not None:
            self._answer = AnswerStart(chat.thinking)
        self._parts: list[str] = []
        self.num_tokens = 0
        self.finished = False

    @property
    def text(self) -> str:
        """All text given out so far."""
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""

    def append(self, token_id: int) -> Appended:
        """Take the next generated token. Nothing but `max_tokens` ends the text before `min_tokens`.

        Reasons: "stop" with None for the model's end-of-sequence ids, with the id for `stop_token_ids`, with the string
        for `stop`; "length" at `max_tokens`. The text of an id that ends it is left out, unless
        `include_stop_str_in_output`.
        """
        self.num_tokens += 1
        params = self._params
        may_stop = self.num_tokens >= params.min_tokens
        ends = may_stop and token_id in self._ends
        reason: FinishReason | None = "stop" if ends else None
        stop_reason: int | str | None = self._ends[token_id] if ends else None
        delta = ""
        if self._stream is not None and (not ends or params.include_stop_str_in_output):
            delta = self._stream.push(token_id)
            if self._matcher is not None and delta:
                before, answer = ("", delta) if self._answer is None else self._answer.feed(delta)
                delta, matched = self._matcher.feed(answer, may_match=may_stop)
                delta = before + delta
                if matched is not None:
                    if params.include_stop_str_in_output:
                        delta += matched
                    self.finished = True
                    return self._give(delta, "stop", matched)
        if reason is None and params.max_tokens is not None and self.num_tokens >= params.max_tokens:
            reason = "length"
        return self._give(delta + self._rest() if reason else delta, reason, stop_reason)

    def finish(self) -> str:
        """The text still held back, when the sequence ends for a reason that is not in its tokens (abort). Later calls
        give ""."""
        return self._give("" if self.finished else self._rest()).delta

    def _rest(self) -> str:
        self.finished = True
        held = self._matcher.flush() if self._matcher is not None else ""
        held += self._answer.flush() if self._answer is not None else ""
        return held + (self._stream.flush() if self._stream is not None else "")

    def _give(self, delta: str, reason: FinishReason | None = None, stop_reason: int | str | None = None) -> Appended:
        if delta:
            self._parts.append(delta)
        return Appended(delta, reason, stop_reason)


def name_tokens(entry: dict[int, Logprob], tokenizer: Tokenizer | None) -> None:
    """Fill in `decoded_token` of one position's log-probabilities; without a tokenizer it stays None."""
    if tokenizer is not None:
        for token_id, logprob in entry.items():
            logprob.decoded_token = tokenizer.token_text(token_id)


class TextStream(Protocol):
    """Token ids in, text out; what `push` and `flush` return together is `Tokenizer.decode` of the ids."""

    def push(self, token_id: int) -> str:
        """The text that is certain after this token."""

    def flush(self) -> str:
        """The rest, at the end: U+FFFD for an incomplete character."""


def text_stream(tokenizer: Tokenizer, hidden: frozenset[int]) -> TextStream:
    """The stream that suits the tokenizer. hidden: tokens that leave nothing in the text."""
    kind = ByteStream if tokenizer.is_byte_level else WindowStream
    return kind(tokenizer, hidden)


class ByteStream:
    """For byte-level tokenizers: each token is its bytes, read by an incremental UTF-8 decoder. Exact."""

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The text that is certain after this token."""
        if token_id in self._hidden:
            return ""
        return self._decoder.decode(self._tokenizer.id_to_bytes(token_id))

    def flush(self) -> str:
        """The rest, at the end: U+FFFD for an incomplete character."""
        return self._decoder.decode(b"", final=True)


class WindowStream:
    """For any other decoder: the difference that a token makes to the text of the few tokens before it.

    Equal to the full decode if the decoder looks back no further than that, as decoders of whole characters do. Byte
    fallback does not where a text ends inside a character: the full decode then spoils complete characters before.
    After `_MAX_WINDOW` tokens that end inside a character, their bytes are taken to be invalid and given out.
    """

    _MAX_WINDOW = 16

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._ids: list[int] = []  # the window: context, whose text is out, then pending tokens
        self._context = 0

    def push(self, token_id: int) -> str:
        """The text that is certain after this token."""
        if token_id in self._hidden:
            return ""
        self._ids.append(token_id)
        text = self._decode(self._ids)
        if text.endswith("\ufffd") and len(self._ids) - self._context < self._MAX_WINDOW:
            return ""
        return self._advance(text)

    def flush(self) -> str:
        """The rest, at the end, incomplete characters included."""
        return self._advance(self._decode(self._ids))

    def _advance(self, text: str) -> str:
        delta = text[len(self._decode(self._ids[: self._context])) :]
        self._ids = self._ids[self._context :]
        self._context = len(self._ids)
        return delta

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)
