"""What an engine is asked for, checked before it waits: prompts become token ids, parameters meet the limits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import TYPE_CHECKING, Any

from minipaged.arguments import as_int
from minipaged.errors import RequestTooLargeError
from minipaged.kv.address import request_blocks

if TYPE_CHECKING:
    from minipaged.engine.config import EngineConfig
    from minipaged.kv import KVBlockManager
    from minipaged.sampling_params import SamplingParams
    from minipaged.text.tokenizer import Tokenizer

ANY_ID = 1 << 63
"""The vocabulary of a model that does not say how large it is: token ids are kept in 64 bits."""


def tokenize(
    prompt: str | Iterable[int], tokenizer: Tokenizer | None, vocab_size: int | None
) -> tuple[str | None, list[int]]:
    """The prompt's text (None if it came as token ids) and its token ids. ValueError for what is no prompt."""
    text: str | None = None
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError("the prompt is a string, and this model has no tokenizer: give token ids")
        text, token_ids = prompt, list(tokenizer.encode(prompt))
    elif isinstance(prompt, bytes | bytearray | Mapping | Set) or not isinstance(prompt, Iterable):
        raise ValueError(f"a prompt is a string or a list of token ids, got {_short(prompt)}")
    else:
        token_ids = [_token_id(token) for token in prompt]
    if not token_ids:
        raise ValueError("the prompt is empty: at least one token is needed")
    low, high = min(token_ids), max(token_ids)
    if low < 0 or high >= (vocab_size or ANY_ID):
        wrong = low if low < 0 else high
        raise ValueError(f"token id {wrong} in the prompt is outside the vocabulary of {vocab_size} ids")
    return text, token_ids


def fit(
    prompt_len: int, params: SamplingParams, room: int, config: EngineConfig, manager: KVBlockManager
) -> SamplingParams:
    """Resolve the parameters and refuse what can never run: limits first, so that nothing waits in vain.

    room: how many tokens the engine's limits leave after such a prompt. RequestTooLargeError, or ValueError for ids
    outside the vocabulary.
    """
    if params.n > config.max_num_seqs:
        raise RequestTooLargeError(
            f"n = {params.n} sequences never fit in max_num_seqs = {config.max_num_seqs}: raise it"
        )
    params.check_vocabulary(config.vocab_size or ANY_ID)
    max_tokens = params.max_tokens if params.max_tokens is not None else max(1, room)
    if config.max_model_len is not None and prompt_len + max_tokens > config.max_model_len:
        raise RequestTooLargeError(
            f"context length exceeded: {prompt_len} prompt tokens + {max_tokens} new ones > max_model_len = "
            f"{config.max_model_len}; {_ways_out(prompt_len, config)}"
        )
    needed = request_blocks(prompt_len + max_tokens, manager.block_size)
    if needed > manager.num_physical_blocks:
        raise RequestTooLargeError(
            f"context length exceeded: {prompt_len} prompt tokens + {max_tokens} new ones need {needed} blocks of "
            f"{manager.block_size}, the pool has {manager.num_physical_blocks}: lower max_tokens, raise num_blocks "
            "or kv_cache_memory"
        )
    return params.resolve(config.generation_defaults, max_tokens)


def _ways_out(prompt_len: int, config: EngineConfig) -> str:
    """What to do about a request that is longer than max_model_len."""
    assert config.max_model_len is not None
    own = ["shorten the prompt", *(["lower max_tokens"] if prompt_len < config.max_model_len else [])]
    if config.model_max_len is None or config.max_model_len < config.model_max_len:
        return " or ".join([", ".join(own), f"raise max_model_len{_up_to(config.model_max_len)}"])
    return f"{' or '.join(own)} (the model has no more positions)"


def _up_to(limit: int | None) -> str:
    return "" if limit is None else f" (the model has {limit} positions)"


def _token_id(token: Any) -> int:
    number = as_int(token)
    if number is None:
        raise ValueError(f"a prompt is a string or a list of token ids, got an element {_short(token)}")
    return number


def _short(value: object) -> str:
    text = repr(value)
    return f"{text[:80]}{'...' if len(text) > 80 else ''} ({type(value).__name__})"
