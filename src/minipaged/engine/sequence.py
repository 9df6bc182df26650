"""The engine's view of one token stream: what the scheduler, the runner and the sampler share."""

from __future__ import annotations

from dataclasses import dataclass

from minipaged.sampling_params import SamplingParams


@dataclass(slots=True, eq=False)
class Sequence:
    """One child of a request: prompt tokens, then generated ones. The block manager knows it by `sequence_id`."""

    sequence_id: int  # unique in the engine, never reused
    index: int  # which of the n children
    token_ids: list[int]  # prompt, then generated tokens; only ever appended to
    num_prompt_tokens: int
    params: SamplingParams  # resolved: no field that means "the model's default" is left None
    seed: int  # of the request; the sampler mixes in `index` and the position
    num_computed: int = 0  # tokens whose K/V is in the cache (0 again after a preemption)

    @property
    def num_generated(self) -> int:
        """Tokens after the prompt."""
        return len(self.token_ids) - self.num_prompt_tokens
