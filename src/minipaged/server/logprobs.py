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


def token_logprobs(
    entries: Sequence[Entry], k: int, tokenizer: Tokenizer, *, as_ids: bool = False
) -> list[dict[str, Any]]:
    """Chats and responses: one object per token, with its k most likely alternatives. as_ids: `token` is
    "token_id:NUMBER"."""

    def named(token_id: int, logprob: Logprob) -> dict[str, Any]:
        name = f"token_id:{token_id}" if as_ids else tokenizer.token_text(token_id)
        raw = tokenizer.id_to_bytes(token_id)
        return {"token": name, "logprob": max(logprob.logprob, FLOOR), "bytes": list(raw)}

    def with_alternatives(entry: Entry) -> dict[str, Any]:
        chosen = next(iter(entry))
        top = sorted((lp.rank, token_id) for token_id, lp in entry.items() if lp.rank <= k)
        return {**named(chosen, entry[chosen]), "top_logprobs": [named(i, entry[i]) for _, i in top]}

    return [with_alternatives(entry) for entry in entries]


def prompt_logprobs(entries: Sequence[Entry | None] | None, k: int | None) -> list[dict[str, Any] | None] | None:
    """vLLM's: per token of the prompt, the token's id -> its log-probability, rank and text; None for the first one."""
    if k is None or entries is None:
        return None

    def shown(entry: Entry) -> dict[str, Any]:
        own = next(iter(entry))
        return {
            str(token_id): {
                "logprob": max(lp.logprob, FLOOR),
                "rank": lp.rank,
                "decoded_token": lp.decoded_token,
            }
            for token_id, lp in entry.items()
            if token_id == own or lp.rank <= k
        }

    return [None if entry is None else shown(entry) for entry in entries]


class CompletionLogprobs:
    """Completions: four parallel lists; text_offset counts characters of the text, with the prompt if it is echoed."""

    def __init__(self, tokenizer: Tokenizer | None, k: int, *, skip_special_tokens: bool, as_ids: bool = False) -> None:
        """k: alternatives per token. as_ids: tokens are called "token_id:NUMBER"."""
        self._tokenizer = tokenizer
        self._as_ids = as_ids
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
        if self._tokenizer is None or self._as_ids:
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
