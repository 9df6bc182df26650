"""How one request is sampled and where it ends: the user's wishes, checked once, never changed afterwards."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Protocol

from minipaged.arguments import as_int, hinting

if TYPE_CHECKING:
    import numpy as np
    import torch

    TokenMask = Callable[[list[int]], "np.ndarray[Any, Any] | torch.Tensor | Sequence[bool] | None"]


class ModelDefaults(Protocol):
    """What a model's folder says about generating; None = nothing."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a text; empty if there are none."""
        ...

    @property
    def temperature(self) -> float | None:
        """None = not stated: 1, which changes nothing."""
        ...

    @property
    def top_p(self) -> float | None:
        """None = not stated: 1, which changes nothing."""
        ...

    @property
    def top_k(self) -> int | None:
        """None = not stated: every token may be drawn."""
        ...

    @property
    def min_p(self) -> float | None:
        """None = not stated: 0, which changes nothing."""
        ...

    @property
    def repetition_penalty(self) -> float | None:
        """None = not stated: 1, which changes nothing."""
        ...


NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
"""What the fields that a model's generation_config may fill in are without one."""
LARGEST_FLOAT32 = (2 - 2**-23) * 2.0**127
MOST_URGENT = 1 << 31  # a priority: far beyond any that waiting can make up for


@hinting
@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one request. ValueError on creation names the field, the value and the range.

    None means the model's generation_config, else the neutral value, for `temperature` (1), `top_p` (1), `top_k` (off),
    `min_p` (0) and `repetition_penalty` (1). Numbers may be numpy scalars; bools and strings are not numbers; what is
    not finite in float32, in which logits are computed, is refused.

    n: how many texts per prompt. Child i draws its own random numbers; under greedy decoding all n texts are equal.
    temperature: >= 0. 0 = greedy: the most likely token, the lowest id among equals.
    top_k: keep the k most likely tokens; 0, -1 or anything from the vocabulary's size on = off.
    top_p: 0..1, keep the smallest set of most likely tokens whose probabilities sum to at least top_p, never none: 1 =
        off and 0 = only the most likely token.
    min_p: 0..1, keep tokens at least min_p times as likely as the most likely one. Applied in the order temperature,
        top_k, top_p, min_p. Tokens of equal logits are ranked by id, so exactly top_k tokens survive, the lower ids at
        the border.
    seed: any integer (used modulo 2**64); equal seeds give equal texts. None = the engine chooses one.
    max_tokens: >= 1; None = as many as fit. min_tokens: no end-of-sequence, stop token or stop string before so many
        tokens.
    stop: up to any number of non-empty strings; the text ends before the one that is complete first (the longest of
        those that end at the same character), or after it with `include_stop_str_in_output`. stop_token_ids: further
        ids that end the text; they add to the model's end-of-sequence ids and hold even under `ignore_eos`.
    logprobs, prompt_logprobs: so many most likely tokens per position beside the token itself; 0 = only that one, -1 =
        all. Taken from the raw distribution: before bias, penalties, masks and temperature.
    logit_bias: token id -> number from -100 to 100 added to the logit before anything else.
    repetition_penalty: 1e-6..1e6, divides positive and multiplies negative logits of tokens in the prompt or output
        (CTRL, arXiv 1909.05858). Beyond these limits, far outside what anybody uses, a logit could leave float32.
    presence_penalty, frequency_penalty: -2..2, subtracted once / per occurrence from the logits of tokens in the
        output.
    token_mask: called with the list of generated ids before each token; returns a boolean array of at most the
        vocabulary's size (True = allowed, ids beyond its end are not) or None (all allowed). It must depend on nothing
        but its argument: the n children share it, and a preempted request calls it again. An exception, or a mask that
        allows nothing, fails the request.
    detokenize: False leaves `text` empty; stop strings then are an error. skip_special_tokens: leave special tokens out
        of the text.
    priority: smaller = sooner, under the priority policy.
    eos_token_ids is not an argument: `resolve` fills it in from the model.
    """

    n: int = 1
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float | None = None
    skip_special_tokens: bool = True
    detokenize: bool = True
    include_stop_str_in_output: bool = False
    token_mask: TokenMask | None = None
    beam_width: int | None = None
    length_penalty: float = 1.0
    priority: int = 0
    eos_token_ids: tuple[int, ...] = field(default=(), init=False, repr=False)

    def __post_init__(self) -> None:
        self._check_int("n", 1)
        self._check_float("temperature", 0.0, optional=True)
        self._check_float("top_p", 0.0, 1.0, optional=True)
        self._check_int("top_k", -1, optional=True)
        self._check_float("min_p", 0.0, 1.0, optional=True)
        self._check_int("seed", None, optional=True)
        self._check_int("max_tokens", 1, optional=True)
        self._check_int("min_tokens", 0)
        self._check_int("logprobs", -1, optional=True)
        self._check_int("prompt_logprobs", -1, optional=True)
        self._check_float("presence_penalty", -2.0, 2.0)
        self._check_float("frequency_penalty", -2.0, 2.0)
        self._check_float("repetition_penalty", 1e-6, 1e6, optional=True)
        self._check_float("length_penalty", -math.inf)
        self._check_int("priority", None)
        if abs(self.priority) > MOST_URGENT:
            raise ValueError(f"priority must be from {-MOST_URGENT} to {MOST_URGENT}, got {self.priority}")
        for name in ("ignore_eos", "skip_special_tokens", "detokenize", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        self._set("stop", self._checked_stop())
        self._set("stop_token_ids", self._checked_ids())
        self._set("logit_bias", self._checked_bias())
        if self.token_mask is not None and not callable(self.token_mask):
            raise ValueError(f"token_mask must be a function of the generated ids or None, got {self.token_mask!r}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens must be at most max_tokens = {self.max_tokens}, got {self.min_tokens}")
        if self.stop and not self.detokenize:
            raise ValueError(
                f"stop strings need text: stop = {self.stop!r} with detokenize = False; use stop_token_ids"
            )
        if self.beam_width is not None:
            raise ValueError(f"beam_width must be None, got {self.beam_width!r}: beam search does not exist yet; use n")
        if self.length_penalty != 1.0:
            raise ValueError(f"length_penalty = {self.length_penalty} needs beam search, which does not exist yet")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken (of resolved parameters)."""
        return self.temperature == 0.0

    @property
    def penalised(self) -> bool:
        """Whether earlier tokens change the logits."""
        return bool(self.presence_penalty or self.frequency_penalty) or self.repetition_penalty not in (None, 1.0)

    @property
    def edits_logits(self) -> bool:
        """Whether tokens are drawn from changed logits, beyond the first `min_tokens`."""
        return self.penalised or self.logit_bias is not None or self.token_mask is not None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as it is kept: a tuple, empty when there is none."""
        return self.stop if isinstance(self.stop, tuple) else ()

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """Every id that can end the text: the model's and the user's."""
        return (*self.eos_token_ids, *(self.stop_token_ids or ()))

    def resolve(self, defaults: ModelDefaults | None, max_len: int) -> SamplingParams:
        """A copy in which no field means "the default" any more, for one request.

        defaults: the model's generation_config; None = neutral values and no end-of-sequence ids.
        max_len: how many tokens this request may generate at most (room left by its prompt), the meaning of
        `max_tokens` None. ValueError if `min_tokens` does not fit, or if a default is out of range.
        """
        filled: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self) if f.init}
        for name, neutral in NEUTRAL.items():
            if filled[name] is None:
                default = getattr(defaults, name, None)
                filled[name] = neutral if default is None else default
        if filled["max_tokens"] is None:
            filled["max_tokens"] = max_len
        resolved = SamplingParams(**filled)
        resolved._set("eos_token_ids", tuple(defaults.eos_token_ids) if defaults is not None else ())
        return resolved

    def with_ends(self, token_ids: Iterable[int]) -> SamplingParams:
        """Resolved parameters in which these tokens end a text as the model's own do."""
        changed = replace(self)
        changed._set("eos_token_ids", tuple(dict.fromkeys((*self.eos_token_ids, *token_ids))))
        return changed

    def check_vocabulary(self, vocab_size: int) -> None:
        """ValueError if `logit_bias` or `stop_token_ids` names ids outside the vocabulary, or if more log-probabilities
        are asked for than it has."""
        for name in ("logit_bias", "stop_token_ids"):
            for token_id in getattr(self, name) or ():
                if token_id >= vocab_size:
                    raise ValueError(f"{name} holds token id {token_id}, outside the vocabulary of {vocab_size}")
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(self, name) or 0) > vocab_size:
                raise ValueError(
                    f"{name} must be at most the vocabulary's size {vocab_size}, got {getattr(self, name)}"
                )

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)  # frozen: only while being created

    def _check_int(self, name: str, low: int | None, *, optional: bool = False) -> None:
        value = getattr(self, name)
        if value is None and optional:
            return
        number = as_int(value)
        if number is None or (low is not None and number < low):
            wanted = (
                "an integer" + ("" if low is None else f" of at least {low}") + (" or left out" if optional else "")
            )
            raise ValueError(f"{name} must be {wanted}, got {value!r}")
        self._set(name, number)

    def _check_float(self, name: str, low: float, high: float = math.inf, *, optional: bool = False) -> None:
        value = getattr(self, name)
        if value is None and optional:
            return
        if not _is_number(value) or not low <= value <= high or abs(value) > LARGEST_FLOAT32:
            limits = [f"from {low:g}"] if low > -math.inf else []
            limits += [f"to {high:g}"] if high < math.inf else []
            wanted = " ".join(["a finite number", *limits]) + (" or left out" if optional else "")
            raise ValueError(f"{name} must be {wanted}, got {value!r}")
        self._set(name, float(value))

    def _checked_stop(self) -> tuple[str, ...]:
        given = self.stop
        strings = () if given is None else (given,) if isinstance(given, str) else given
        if not isinstance(strings, list | tuple) or not all(isinstance(s, str) and s for s in strings):
            raise ValueError(f"stop must be a non-empty string or a list of non-empty strings, got {given!r}")
        return tuple(strings)

    def _checked_ids(self) -> tuple[int, ...]:
        given = self.stop_token_ids
        if given is None:
            return ()
        listed = given.tolist() if hasattr(given, "tolist") else given
        whole = isinstance(listed, Sequence) and not isinstance(listed, str)
        ids = [as_int(token) for token in listed] if whole else [None]
        checked = tuple(token for token in ids if token is not None and token >= 0)
        if len(checked) < len(ids):
            raise ValueError(f"stop_token_ids must be a list of integers of at least 0, got {given!r}")
        return checked

    def _checked_bias(self) -> dict[int, float] | None:
        given = self.logit_bias
        if given is None:
            return None
        if not isinstance(given, Mapping):
            raise ValueError(f"logit_bias must map token ids to numbers, got {given!r}")
        checked: dict[int, float] = {}
        for token_id, bias in given.items():
            number = as_int(token_id)
            if number is None or number < 0:
                raise ValueError(f"logit_bias must have integers of at least 0 as token ids, got {token_id!r}")
            if not _is_number(bias) or not -100.0 <= bias <= 100.0:
                raise ValueError(f"logit_bias must have values from -100 to 100, got {bias!r} for token id {token_id}")
            checked[number] = float(bias)
        return checked or None


def _is_number(value: object) -> bool:
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(float(value))
    except OverflowError:  # an integer beyond any float
        return False
