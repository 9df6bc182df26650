"""What bounds and steers the engine, and its numbers; everything about the model itself lives in the runner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from minipaged.arguments import as_int

if TYPE_CHECKING:
    from minipaged.sampling_params import ModelDefaults

SchedulingPolicy = Literal["fcfs", "priority"]


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Numbers about an engine at one moment.

    running, waiting: sequences now (a waiting request counts once, whatever its n). preemptions, recomputed_tokens:
    since the start. Blocks now: free + idle + in_use = total; shared is the part of in_use that more than one sequence
    holds, saved is how many blocks more there would have to be without sharing. prefix_query_tokens, prefix_hit_tokens:
    prompt tokens looked up and found, since the start. internal_fragmentation_tokens: slots of blocks in use that hold
    no token, now. eviction_policy: the name of the one that serves; "lru (NAME failed: ...)" once one of the caller's
    own has failed.
    """

    running: int
    waiting: int
    preemptions: int
    recomputed_tokens: int
    blocks_total: int
    blocks_free: int
    blocks_idle: int
    blocks_in_use: int
    blocks_shared: int
    blocks_saved: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    internal_fragmentation_tokens: int
    eviction_policy: str


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Limits and policy of one engine. All lengths are in tokens.

    max_model_len: longest prompt + output of a request; None = what the block pool holds.
    model_max_len: positions of the model, which max_model_len cannot exceed; None = unknown. Only for messages.
    max_num_seqs: sequences that hold blocks at the same time (a request with n = 3 counts 3, from its admission).
    max_num_batched_tokens: tokens computed per step, decodes included. When decodes alone reach it, one prefill token
        per step is still granted; when there are more running sequences than this, they take turns.
    vocab_size: token ids must be below it; None = any that fit into 64 bits.
    scheduling_policy: "fcfs" (by arrival) or "priority" (`SamplingParams.priority`, smaller = sooner, with ageing).
    priority_ageing_steps: under "priority", how many engine steps of waiting are worth one level of priority.
    watermark: share of the pool that an admission leaves free while others run, so that they have room to grow.
    generation_defaults: the model's values for sampling parameters left at None, and its end-of-sequence ids; None =
        neutral values, no ids.
    """

    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    vocab_size: int | None = None
    scheduling_policy: SchedulingPolicy = "fcfs"
    priority_ageing_steps: int = 64
    watermark: float = 0.01
    generation_defaults: ModelDefaults | None = None
    seed: int = 0
    check_invariants: bool = False
    batch_invariant: bool = False
    model_max_len: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "priority_ageing_steps"):
            value = getattr(self, name)
            if value is not None or name != "max_model_len":
                number = as_int(value)
                if number is None or number < 1:
                    raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
                object.__setattr__(self, name, number)  # frozen: only while being created
        if not 0.0 <= self.watermark < 1.0:
            raise ValueError(f"watermark must be in [0, 1), got {self.watermark}")
        if self.scheduling_policy not in get_args(SchedulingPolicy):
            raise ValueError(
                f"scheduling_policy must be one of {get_args(SchedulingPolicy)}, got {self.scheduling_policy!r}"
            )
