"""Where the time of a step goes: a back end that passes every call on to another one and adds up seconds per class of
operation.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from minipaged.ops.forwarding import ForwardingBackend

if TYPE_CHECKING:
    from collections.abc import Iterator

    from minipaged.bench.measure import Step
    from minipaged.engine.engine import Engine
    from minipaged.model.qwen3 import Qwen3Model
    from minipaged.ops.backend import Backend

REST, ENGINE = "sampling and rest of runner", "scheduler and outputs"
UNSEEN = "forward pass as one graph, not told apart, and sampling"
"""A decode step that was replayed as a CUDA graph makes no call of a back end that could be timed."""


class ProfilingBackend(ForwardingBackend):
    """`inner` with a clock around each call of a step. `names`: what to call each packed weight, by id()."""

    def __init__(
        self, inner: Backend, names: dict[int, str], clock: Callable[[], float], synchronise: Callable[[], None]
    ) -> None:
        super().__init__(inner)
        self._names, self._clock, self._synchronise = names, clock, synchronise
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.calls: defaultdict[str, int] = defaultdict(int)

    def take(self) -> tuple[dict[str, float], dict[str, int]]:
        """Seconds and calls per class since the last `take`."""
        taken = dict(self.seconds), dict(self.calls)
        self.seconds.clear()
        self.calls.clear()
        return taken

    def call(self, name: str, *args: Any, **options: Any) -> Any:
        """Under the method's name, but a product under its weight's, and "attention plan"."""
        if name in ("pack_linear", "pack_rotary"):  # at load
            return super().call(name, *args, **options)
        start = self._clock()
        result = super().call(name, *args, **options)
        self._synchronise()
        label = self._names.get(id(args[1]), name) if name == "linear" else {"plan": "attention plan"}.get(name, name)
        self.seconds[label] += self._clock() - start
        self.calls[label] += 1
        return result


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
