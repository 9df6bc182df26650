"""Where the time of a step goes: a back end that passes every call on to another one and adds up seconds per class of
operation.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from minipaged.ops.backend import AttentionBatch, AttentionPlan, Backend, PackedLinear, RMSNorm, RotaryTable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from minipaged.bench.measure import Step
    from minipaged.engine.engine import Engine
    from minipaged.kv.paged_cache import PagedKVCache
    from minipaged.model.qwen3 import Qwen3Model

R = TypeVar("R")
REST, ENGINE = "sampling and rest of runner", "scheduler and outputs"
UNSEEN = "forward pass as one graph, not told apart, and sampling"
"""A decode step that was replayed as a CUDA graph makes no call of a back end that could be timed."""


class ProfilingBackend(Backend):
    """`inner` with a clock around each call. `names`: what to call each packed weight, by id()."""

    def __init__(
        self, inner: Backend, names: dict[int, str], clock: Callable[[], float], synchronise: Callable[[], None]
    ) -> None:
        self.inner, self.name, self.batch_invariant = inner, inner.name, inner.batch_invariant
        self.copies_weights, self.row_padding_bytes = inner.copies_weights, inner.row_padding_bytes
        self._names, self._clock, self._synchronise = names, clock, synchronise
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.calls: defaultdict[str, int] = defaultdict(int)

    def take(self) -> tuple[dict[str, float], dict[str, int]]:
        """Seconds and calls per class since the last `take`."""
        taken = dict(self.seconds), dict(self.calls)
        self.seconds.clear()
        self.calls.clear()
        return taken

    def _timed(self, name: str, call: Callable[..., R], *args: Any, **kwargs: Any) -> R:
        start = self._clock()
        result = call(*args, **kwargs)
        self._synchronise()
        self.seconds[name] += self._clock() - start
        self.calls[name] += 1
        return result

    def pack_linear(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        gated: bool = False,
        use: Literal["linear", "embed", "both"] = "linear",
    ) -> PackedLinear:
        """Not timed: it happens at load."""
        return self.inner.pack_linear(weight, bias, gated=gated, use=use)

    def linear(self, x: Tensor, w: PackedLinear, **options: Any) -> Tensor:
        """As "linear" and the weight's name."""
        return self._timed(self._names.get(id(w), "linear"), self.inner.linear, x, w, **options)

    def embed(self, token_ids: Tensor, w: PackedLinear, *, out: Tensor | None = None) -> Tensor:
        """As "embed"."""
        return self._timed("embed", self.inner.embed, token_ids, w, out=out)

    def rms_norm(self, x: Tensor, norm: RMSNorm, *, out: Tensor | None = None) -> Tensor:
        """As "rms_norm" where it is not fused into a linear."""
        return self._timed("rms_norm", self.inner.rms_norm, x, norm, out=out)

    def write_kv(self, key: Tensor, value: Tensor, cache: PagedKVCache, slot_mapping: Tensor) -> None:
        """As "write_kv"."""
        self._timed("write_kv", self.inner.write_kv, key, value, cache, slot_mapping)

    def qk_norm_rope_write(
        self,
        qkv: Tensor,
        q_norm: RMSNorm,
        k_norm: RMSNorm,
        rope: RotaryTable,
        positions: Tensor,
        cache: PagedKVCache,
        slot_mapping: Tensor,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """As "qk_norm_rope_write"."""
        call = self.inner.qk_norm_rope_write
        return self._timed(
            "qk_norm_rope_write", call, qkv, q_norm, k_norm, rope, positions, cache, slot_mapping, out=out
        )

    def plan(self, batch: AttentionBatch) -> AttentionPlan:
        """As "attention plan"."""
        return self._timed("attention plan", self.inner.plan, batch)

    def attention(
        self,
        query: Tensor,
        cache: PagedKVCache,
        plan: AttentionPlan,
        *,
        scale: float | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """As "attention"."""
        return self._timed("attention", self.inner.attention, query, cache, plan, scale=scale, out=out)

    def copy_blocks(self, caches: Sequence[PagedKVCache], pairs: Sequence[tuple[int, int]]) -> None:
        """As "copy_blocks"."""
        self._timed("copy_blocks", self.inner.copy_blocks, caches, pairs)


@dataclass(slots=True)
class StepProfile:
    """One step: its kind, its tokens, and where its time went."""

    prefill: bool
    tokens: int
    seconds: dict[str, float]
    calls: dict[str, int]


@dataclass(slots=True)
class Profile:
    """All steps of a run."""

    steps: list[StepProfile] = field(default_factory=list)

    def add(self, step: Step, seconds: dict[str, float], calls: dict[str, int]) -> None:
        """One step with the operations in it; what they leave over is the runner's and the engine's own time."""
        rest_of_runner = REST if seconds else UNSEEN
        rest = {rest_of_runner: step.runner_seconds - sum(seconds.values()), ENGINE: step.seconds - step.runner_seconds}
        self.steps.append(StepProfile(step.prefill, step.work.tokens, {**seconds, **rest}, calls))

    def per_class(self, *, prefill: bool) -> list[dict[str, Any]]:
        """Rows of a table over the steps of one kind, largest first: name, ms_per_step, share, calls_per_step."""
        steps = [step for step in self.steps if step.prefill == prefill]
        seconds: defaultdict[str, float] = defaultdict(float)
        calls: defaultdict[str, int] = defaultdict(int)
        for step in steps:
            for name, value in step.seconds.items():
                seconds[name] += value
            for name, count in step.calls.items():
                calls[name] += count
        total = sum(seconds.values())
        return [
            {
                "op": name,
                "ms_per_step": 1e3 * value / len(steps),
                "share": value / total,
                "calls_per_step": calls[name] / len(steps),
            }
            for name, value in sorted(seconds.items(), key=lambda item: -item[1])
        ]

    def to_dict(self) -> dict[str, Any]:
        """For JSON: the tables of decode and prefill steps, and how many steps each stands for."""
        return {
            kind: {
                "steps": sum(step.prefill == prefill for step in self.steps),
                "ops": self.per_class(prefill=prefill),
            }
            for kind, prefill in (("decode", False), ("prefill", True))
        }

    def notes(self) -> list[str]:
        """What the profile could not see."""
        unseen = sum(UNSEEN in step.seconds for step in self.steps)
        if not unseen:
            return []
        return [
            f"{unseen} of {len(self.steps)} profiled steps were replayed as CUDA graphs, in which operations cannot be "
            "timed: MINIPAGED_CUDA_GRAPHS=0 runs them one by one"
        ]


@contextmanager
def profiled(engine: Engine) -> Iterator[ProfilingBackend]:
    """The engine's model computes through a `ProfilingBackend` inside. TypeError for a runner that has no model."""
    import torch

    runner = engine.runner
    model: Qwen3Model | None = getattr(runner, "model", None)
    if model is None:
        raise TypeError(f"only an engine with a model can be profiled, this one has a {type(runner).__name__}")
    wait = torch.cuda.synchronize if model.device.type == "cuda" else _nothing
    proxy = ProfilingBackend(model.backend, _weight_names(model), time.perf_counter, wait)
    backends = model.backend, runner.backend  # type: ignore[attr-defined]
    model.backend = runner.backend = proxy  # type: ignore[attr-defined]
    try:
        yield proxy
    finally:
        model.backend, runner.backend = backends  # type: ignore[attr-defined]


def _weight_names(model: Qwen3Model) -> dict[int, str]:
    names = {id(model.head): "linear head"}
    for layer in model.layers:
        for name in ("qkv", "out", "gate_up", "down"):
            names[id(getattr(layer, name))] = f"linear {name}"
    return names


def _nothing() -> None:
    pass
