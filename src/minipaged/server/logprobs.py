"""Log-probabilities in OpenAI's two shapes. Values are of the raw distribution; -inf, unknown to JSON, is -9999."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minipaged.engine import Logprob
    from minipaged.text.tokenizer import Tokenizer

Entry = dict[int, "Logprob"]  # the token itself first, then the most likely ones

FLOOR = -9999.0


def chat_logprobs(entries: Sequence[Entry], k: int, tokenizer: Tokenizer) -> dict[str, Any]:
    """Chat: one object per token, with its k most likely alternatives."""
    return {"content": [_chat_entry(entry, k, tokenizer) for entry in entries], "refusal": None}


def _chat_entry(entry: Entry, k: int, tokenizer: Tokenizer) -> dict[str, Any]:
    chosen = next(iter(entry))
    top = sorted((lp.rank, token_id) for token_id, lp in entry.items() if lp.rank <= k)
    alternatives = [_token(token_id, entry[token_id], tokenizer) for _, token_id in top]
    return {**_token(chosen, entry[chosen], tokenizer), "top_logprobs": alternatives}


def _token(token_id: int, logprob: Logprob, tokenizer: Tokenizer) -> dict[str, Any]:
    raw = tokenizer.id_to_bytes(token_id)
    return {"token": tokenizer.token_text(token_id), "logprob": max(logprob.logprob, FLOOR), "bytes": list(raw)}


class CompletionLogprobs:
    """Completions: four parallel lists; text_offset counts characters of the text, with the prompt if it is echoed."""

    def __init__(self, tokenizer: Tokenizer | None, k: int, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._k = k
        self._skip = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def add(self, token_ids: Sequence[int], entries: Sequence[Entry | None]) -> dict[str, Any]:
        """The lists for the tokens that follow those of earlier calls. An entry of None: the first prompt token."""
        lists: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token_id, entry in zip(token_ids, entries, strict=True):
            lists["tokens"].append(self._name(token_id))
            lists["text_offset"].append(self._offset)
            self._offset += self._characters(token_id)
            if entry is None:
                lists["token_logprobs"].append(None)
                lists["top_logprobs"].append(None)
                continue
            lists["token_logprobs"].append(max(entry[token_id].logprob, FLOOR))
            shown = {token_id: entry[token_id], **{i: lp for i, lp in entry.items() if lp.rank <= self._k}}
            lists["top_logprobs"].append({self._name(i): max(lp.logprob, FLOOR) for i, lp in shown.items()})
        return lists

    def _name(self, token_id: int) -> str:
        """Its text; bytes for a part of a character, as OpenAI writes them, so that two of them are not one key."""
        if self._tokenizer is None:
            return f"token_id:{token_id}"
        raw = self._tokenizer.id_to_bytes(token_id)
        try:
            return raw.decode("utf-8") or f"token_id:{token_id}"
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def _characters(self, token_id: int) -> int:
        if self._tokenizer is None or (self._skip and self._tokenizer.is_special(token_id)):
            return 0
        return len(self._decoder.decode(self._tokenizer.id_to_bytes(token_id)))
