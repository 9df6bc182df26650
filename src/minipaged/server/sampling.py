"""From the fields of a body to `SamplingParams`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from minipaged.engine import SamplingParams
from minipaged.server.errors import refused

if TYPE_CHECKING:
    from minipaged.server.protocol import GenerationBody

SAME_NAME = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "priority",
)


def sampling_params(
    body: GenerationBody,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    token_mask: Callable[[list[int]], Any] | None = None,
) -> SamplingParams:
    """The parameters that `body` asks for; what it leaves out, or null, is the model's or the neutral value.

    ValueError names the field that is out of range; ApiError 400 for a seed that is no int64.
    """
    if body.seed is not None and not -(2**63) <= body.seed < 2**63:
        raise refused(f"seed must be from {-(2**63)} to {2**63 - 1} (int64), got {body.seed}", "seed")
    fields = {name: getattr(body, name) for name in SAME_NAME if getattr(body, name) is not None}
    return SamplingParams(
        **fields,
        logit_bias=_logit_bias(body.logit_bias),
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        token_mask=token_mask,
    )


def _logit_bias(given: dict[str, float] | None) -> dict[int, float] | None:
    """JSON has strings as keys only."""
    if given is None:
        return None
    for key in given:
        if not (key.isascii() and key.isdigit()):
            raise refused(f"logit_bias must have token ids as keys, got {key!r}", "logit_bias")
    return {int(key): value for key, value in given.items()}


def prompt_alternatives(body: GenerationBody, limit: int) -> int | None:
    """The checked `prompt_logprobs`, None for nothing. 400 outside 0..limit, and in a stream, which has no place for
    them."""
    k = checked_logprobs("prompt_logprobs", body.prompt_logprobs, limit)
    if k is not None and body.stream:
        raise refused("prompt_logprobs needs stream to be false", "prompt_logprobs")
    return k


def checked_logprobs(name: str, value: int | None, limit: int) -> int | None:
    """A number of alternatives per token. 400 outside 0..limit."""
    if value is not None and not 0 <= value <= limit:
        raise refused(f"{name} must be from 0 to {limit}, got {value}", name)
    return value
