"""Error figures, the rules that judge them, and what a verification hands back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

OP_TOLERANCE = 2e-4
"""float32: how far one operation, fed Hugging Face's own inputs, may be from its result: max |difference| of a token
over the largest magnitude of that token's result. Summation order alone costs about 1e-6."""
LOGIT_TOLERANCE = 3e-4
"""float32: the same figure for logits after all layers, where the differences of every layer have added up."""
ROUNDING = 1e-6
"""float32: error of what a layer hands on, relative to its RMS, that the order of summation alone explains."""
NOISE_FACTOR = 8.0
"""float32: logits may be this many times as far off as Hugging Face's get when each of its layers is shaken by
`ROUNDING`. It counts for ill-conditioned models only, whose layers amplify the last bit of everything."""
NEAR_TIE_MARGIN = 1e-3
"""float32: two engines may pick different tokens where Hugging Face's best two logits are at most this far apart."""
BFLOAT16_RATIO = 1.5
"""bfloat16: our error against Hugging Face in float32 may be this many times that of Hugging Face in bfloat16."""
BFLOAT16_FLOOR = 2.0**-12
"""bfloat16: relative errors below this (an eighth of the type's rounding step) are no evidence, whatever the ratio:
Hugging Face's own error is exactly zero where it computes in float32."""

Path = Literal["prefill", "chunk", "decode"]
Verdict = Literal["equal", "near tie", "bug"]


@dataclass(frozen=True, slots=True)
class ErrorFigures:
    """How far a tensor [T, n] is from its reference; NaN or infinity where only one side has it counts as infinite
    error."""

    max_abs: float
    relative_per_token: tuple[float, ...]
    """max |difference| of each token over the largest magnitude of that token's reference."""
    rms: float
    """|difference| / |reference| over the whole tensor (Frobenius norms)."""

    @property
    def max_relative(self) -> float:
        """The worst token's error relative to its result; 0 without tokens."""
        return max(self.relative_per_token, default=0.0)


def measure(ours: Tensor, reference: Tensor) -> ErrorFigures:
    """Figures for ours [T, ...] against reference [T, ...] (same shape up to flattening), in float64."""
    reference = reference.double().flatten(1)
    difference = (ours.to(reference.device).double().reshape(reference.shape) - reference).abs()
    difference = torch.where(torch.isfinite(difference), difference, math.inf)
    worst, scale = difference.amax(dim=1), reference.abs().amax(dim=1)
    relative = torch.where(worst > 0, worst / scale, 0.0)
    norm = float(reference.norm())
    rms = 0.0 if not worst.any() else float(difference.norm()) / norm if norm else math.inf
    return ErrorFigures(float(worst.max()), tuple(relative.tolist()), rms)


@dataclass(frozen=True, slots=True)
class OpResult:
    """One operation in one layer, reached through one path of the engine."""

    path: Path
    layer: int
    op: str
    figures: ErrorFigures
    error: float  # the judged figure: max_relative in float32, rms in bfloat16
    limit: float
    tokens: tuple[int, ...]  # numbers of the tokens that `figures.relative_per_token` describes

    @property
    def passed(self) -> bool:
        """Whether the error stays within its limit."""
        return self.error <= self.limit

    @property
    def first_bad_token(self) -> int:
        """The first token above the limit; the worst one if the rule is about the whole tensor."""
        relative = self.figures.relative_per_token
        index = next((i for i, value in enumerate(relative) if value > self.limit), None)
        return self.tokens[relative.index(max(relative)) if index is None else index]


def judge_op(
    path: Path, layer: int, op: str, ours: ErrorFigures, tokens: Sequence[int], peer: ErrorFigures | None = None
) -> OpResult:
    """float32 rule, or, given the figures of Hugging Face in bfloat16 (`peer`), the bfloat16 rule."""
    if peer is None:
        return OpResult(path, layer, op, ours, ours.max_relative, OP_TOLERANCE, tuple(tokens))
    return OpResult(path, layer, op, ours, ours.rms, max(BFLOAT16_RATIO * peer.rms, BFLOAT16_FLOOR), tuple(tokens))


@dataclass(frozen=True, slots=True)
class TokenResult:
    """One greedy token: Hugging Face's choice and ours after the same tokens."""

    prompt: int
    position: int  # in the sequence, prompt included
    expected: int
    chosen: int
    margin: float  # between Hugging Face's best two logits
    max_abs: float  # error of our logits
    relative: float  # max_abs over the largest magnitude of the reference row
    verdict: Verdict


def judge_token(
    prompt: int, position: int, reference: Tensor, ours: Tensor, chosen: int, *, margin_limit: float, error_limit: float
) -> TokenResult:
    """reference, ours: logits [V] after the same tokens; `chosen`: what our sampler took.

    A different token is a near tie where Hugging Face's margin is at most `margin_limit`. Logits further away than
    `error_limit` (relative to the largest one) are a bug even if the token is the same.
    """
    best = reference.topk(2)
    expected, margin = int(best.indices[0]), float(best.values[0] - best.values[1])
    figures = measure(ours[None], reference[None])
    same = chosen == expected
    if figures.max_relative > error_limit or not (same or margin <= margin_limit):
        verdict: Verdict = "bug"
    else:
        verdict = "equal" if same else "near tie"
    return TokenResult(prompt, position, expected, chosen, margin, figures.max_abs, figures.max_relative, verdict)


@dataclass(frozen=True, slots=True)
class Claim:
    """One line of the determinism table: logits of one variant against the plain run."""

    name: str
    detail: str
    rows_compared: int
    rows_identical: int
    max_abs: float
    limit: float  # 0 where bits must be equal
    evidence: str = ""  # what shows that the variant really took another path

    @property
    def passed(self) -> bool:
        """Something was compared and lies within the limit; a limit of 0 asks for the same bits."""
        return self.rows_compared > 0 and self.max_abs <= self.limit and (self.limit > 0 or self.identical)

    @property
    def identical(self) -> bool:
        """Whether every row has the same bits."""
        return self.rows_identical == self.rows_compared


@dataclass(frozen=True, slots=True)
class Bug:
    """Something that no rounding explains, and where it first shows."""

    kind: Literal["op", "logits", "token", "determinism"]
    message: str
    layer: int | None = None
    op: str | None = None
    prompt: int | None = None
    position: int | None = None
    paths: tuple[Path, ...] = ()


@dataclass(slots=True)
class Report:
    """Everything one run of `minipaged verify` found."""

    model: str
    backend: str
    dtype: str
    num_layers: int
    block_size: int
    prompts: list[list[int]]
    machine: dict[str, str]
    versions: dict[str, str]
    ops: list[OpResult] = field(default_factory=list)
    prompt_logits: ErrorFigures | None = None
    logits_limit: float = LOGIT_TOLERANCE
    tokens: list[TokenResult] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)
    other_bugs: list[Bug] = field(default_factory=list)
    seconds: float = 0.0

    def token_position(self, number: int) -> tuple[int, int]:
        """Token number over all prompts -> (prompt, position)."""
        for index, prompt in enumerate(self.prompts):
            if number < len(prompt):
                return index, number
            number -= len(prompt)
        raise IndexError(f"token number beyond the {sum(map(len, self.prompts))} tokens of the prompts")

    @property
    def errors_add_up(self) -> bool:
        """Whether operations were fed our own results (bfloat16): then the first error reaches everything behind it."""
        return self.dtype != "float32"

    @property
    def near_ties(self) -> list[TokenResult]:
        """Tokens that differ where Hugging Face's own margin is too small to decide."""
        return [token for token in self.tokens if token.verdict == "near tie"]

    @property
    def bugs(self) -> list[Bug]:
        """Wrong operations in execution order, then logits, tokens and broken promises. The first one is the place
        to look."""
        return [
            *self._op_bugs(),
            *self.other_bugs,
            *(_token_bug(token) for token in self.tokens if token.verdict == "bug"),
            *(_claim_bug(claim) for claim in self.claims if not claim.passed),
        ]

    def _op_bugs(self) -> list[Bug]:
        failures: dict[tuple[int, str], list[OpResult]] = {}
        for result in self.ops:
            if not result.passed:
                failures.setdefault((result.layer, result.op), []).append(result)
        bugs = []
        for (layer, op), results in failures.items():
            shown = results[0]
            prompt, position = self.token_position(shown.first_bad_token)
            paths = tuple(result.path for result in results)
            message = (
                f"layer {layer}, {op} ({', '.join(paths)}): error {shown.error:.1e} above {shown.limit:.1e}, "
                f"first at token {position} of prompt {prompt} (max abs {shown.figures.max_abs:.1e})"
            )
            bugs.append(Bug("op", message, layer, op, prompt, position, paths))
        if self.errors_add_up and len(bugs) > 1:
            first = bugs[0]
            return [replace(first, message=f"{first.message}; {len(bugs) - 1} later operations fail with it")]
        return bugs

    @property
    def passed(self) -> bool:
        """Whether no bug was found."""
        return not self.bugs

    def to_dict(self) -> dict[str, Any]:
        """The JSON object of `--json`: the fixed keys first, details after them; figures that are not finite are
        null."""
        return {
            "passed": self.passed,
            "layers": self.num_layers,
            "tokens_compared": len(self.tokens),
            "near_ties": len(self.near_ties),
            "bugs": len(self.bugs),
            "model": self.model,
            "backend": self.backend,
            "dtype": self.dtype,
            "block_size": self.block_size,
            "prompt_tokens": [len(prompt) for prompt in self.prompts],
            "bug_details": [
                {name: getattr(bug, name) for name in ("kind", "message", "layer", "op", "prompt", "position", "paths")}
                for bug in self.bugs
            ],
            "op_errors": [
                {
                    "path": result.path,
                    "layer": result.layer,
                    "op": result.op,
                    "max_abs": finite(result.figures.max_abs),
                    "max_relative": finite(result.figures.max_relative),
                    "rms_relative": finite(result.figures.rms),
                    "limit": result.limit,
                    "passed": result.passed,
                }
                for result in self.ops
            ],
            "prompt_logits_max_abs": finite(self.prompt_logits.max_abs) if self.prompt_logits else None,
            "logits_limit_relative": self.logits_limit,
            "tokens": [
                {
                    "prompt": token.prompt,
                    "position": token.position,
                    "expected": token.expected,
                    "chosen": token.chosen,
                    "margin": finite(token.margin),
                    "logits_max_abs": finite(token.max_abs),
                    "verdict": token.verdict,
                }
                for token in self.tokens
            ],
            "determinism": [
                {
                    "claim": claim.name,
                    "detail": claim.detail,
                    "rows_compared": claim.rows_compared,
                    "rows_identical": claim.rows_identical,
                    "max_abs": finite(claim.max_abs),
                    "limit": claim.limit,
                    "evidence": claim.evidence,
                    "passed": claim.passed,
                }
                for claim in self.claims
            ],
            "machine": self.machine,
            "versions": self.versions,
            "seconds": round(self.seconds, 2),
        }


def finite(value: float) -> float | None:
    """JSON has no NaN or infinity."""
    return value if math.isfinite(value) else None


def _token_bug(token: TokenResult) -> Bug:
    what = (
        f"chose {token.chosen}, Hugging Face {token.expected} with margin {token.margin:.1e}"
        if token.chosen != token.expected
        else "same token"
    )
    message = (
        f"prompt {token.prompt}, position {token.position}: {what}; "
        f"logits off by {token.max_abs:.1e} ({token.relative:.1e} relative)"
    )
    return Bug("token", message, prompt=token.prompt, position=token.position)


def _claim_bug(claim: Claim) -> Bug:
    if not claim.rows_compared:
        return Bug("determinism", f"{claim.name}: nothing could be compared")
    return Bug(
        "determinism",
        f"{claim.name} ({claim.detail}): {claim.rows_compared - claim.rows_identical} of {claim.rows_compared} rows of "
        f"logits differ, by up to {claim.max_abs:.1e} (allowed {claim.limit:.0e})",
    )
