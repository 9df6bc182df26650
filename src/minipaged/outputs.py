"""What a request gives back. All of it is cumulative except where `LLM.stream` says otherwise."""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import attrgetter
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(slots=True)
class Logprob:
    """Natural logarithm of a token's probability in the raw distribution.

    rank: 1 = the most likely token; tokens of equal logits are ranked by id. decoded_token: the token's text alone
    (U+FFFD where it is a part of a character), None without a tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(slots=True)
class RequestMetrics:
    """Times in seconds of the engine's clock, None = not yet; how often the request was preempted and what that
    cost."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0

    def snapshot(self) -> RequestMetrics:
        """A copy that stays as it is now. (`dataclasses.replace` takes four times as long, per request and step.)"""
        return RequestMetrics(*_METRICS(self))


_METRICS = attrgetter(*RequestMetrics.__slots__)


@dataclass(slots=True)
class CompletionOutput:
    """One generated text of a request.

    index: which of the n. token_ids: generated ids, the one that ended the text included. text: without that one, and
    without the stop string unless `include_stop_str_in_output`. cumulative_logprob, logprobs (one dict per token, id ->
    Logprob): None unless asked for. finish_reason: None while running, else "stop", "length", "abort" or "error".
    stop_reason: the stop string or stop token id that ended it, None for an end-of-sequence token. error: what failed,
    when the reason is "error".
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None

    @property
    def finished(self) -> bool:
        """Whether nothing will be added."""
        return self.finish_reason is not None

    def __repr__(self) -> str:
        parts = [f"index={self.index}", f"text={self.text!r}", f"token_ids={_shortened(self.token_ids)}"]
        for name in ("cumulative_logprob", "finish_reason", "stop_reason", "error"):
            if getattr(self, name) is not None:
                parts.append(f"{name}={getattr(self, name)!r}")
        if self.logprobs is not None:
            parts.append(f"logprobs=[{len(self.logprobs)} dicts]")
        return f"CompletionOutput({', '.join(parts)})"


@dataclass(slots=True)
class RequestOutput:
    """The state of one request.

    prompt: its text, None if it came as token ids. prompt_logprobs: None unless asked for, else one dict per prompt
    token, the first None. outputs: n of them, by index. num_cached_tokens: prompt tokens found in the prefix cache at
    the first admission, None before.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    num_cached_tokens: int | None = None
    metrics: RequestMetrics | None = None

    def __repr__(self) -> str:
        outputs = "".join(f"\n  {output!r}," for output in self.outputs)
        return (
            f"RequestOutput(request_id={self.request_id!r}, finished={self.finished}, prompt={self.prompt!r}, "
            f"prompt_token_ids={_shortened(self.prompt_token_ids)}, num_cached_tokens={self.num_cached_tokens}, "
            f"outputs=[{outputs}\n])"
        )


def _shortened(token_ids: list[int]) -> str:
    if len(token_ids) <= 16:
        return repr(token_ids)
    return f"[{', '.join(map(str, token_ids[:8]))}, ... {len(token_ids)} in all]"
