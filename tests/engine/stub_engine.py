"""An engine over the paged stub runner, for tests that drive it step by step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paged_stub import VOCAB, PagedMemory, PagedStubRunner

from minipaged.engine.config import EngineConfig
from minipaged.engine.engine import Engine
from minipaged.kv import KVBlockManager
from minipaged.outputs import RequestOutput
from minipaged.sampling_params import SamplingParams


class StubEngine:
    """`engine`, `manager`, `runner` and `memory`, and what has come out so far in `last` (final or latest output per
    request).
    """

    def __init__(
        self,
        num_blocks: int = 16,
        block_size: int = 4,
        *,
        caching: bool = True,
        tokenizer: Any = None,
        clock: Callable[[], float] = lambda: 0.0,
        **config: Any,
    ) -> None:
        self.memory = PagedMemory(num_blocks, block_size)
        self.manager = KVBlockManager(
            num_blocks, block_size, enable_prefix_caching=caching, listener=self.memory.on_event
        )
        self.runner = PagedStubRunner(self.memory, self.manager)
        self.runner.keep_plans = True
        config = {"vocab_size": VOCAB, "check_invariants": True, **config}
        self.engine = Engine(self.runner, self.manager, EngineConfig(**config), tokenizer=tokenizer, clock=clock)
        self.last: dict[str, RequestOutput] = {}
        self.finish_order: list[str] = []

    def add(self, request_id: str, prompt: list[int], *, salt: str | None = None, **params: Any) -> None:
        params = {"temperature": 0.0, "max_tokens": 8, "seed": 0, **params}
        self.engine.add_request(request_id, prompt, SamplingParams(**params), cache_salt=salt)

    def step(self, count: int = 1) -> list[RequestOutput]:
        outputs: list[RequestOutput] = []
        for _ in range(count):
            outputs = self.engine.step()
            for output in outputs:
                self.last[output.request_id] = output
                if output.finished:
                    self.finish_order.append(output.request_id)
        return outputs

    def run(self, limit: int = 2000) -> dict[str, RequestOutput]:
        for _ in range(limit):
            if not self.engine.has_unfinished():
                return self.last
            self.step()
        raise AssertionError(f"unfinished after {limit} steps: {self.engine.stats()}")

    def rows(self) -> dict[int, tuple[int, int]]:
        """Of the last plan: sequence id -> (start, number of tokens)."""
        return {row.sequence.sequence_id: (row.start, row.num_tokens) for row in self.runner.plans[-1].rows}

    def tokens(self, request_id: str, child: int = 0) -> list[int]:
        return self.last[request_id].outputs[child].token_ids

    def reason(self, request_id: str, child: int = 0) -> str | None:
        return self.last[request_id].outputs[child].finish_reason

    def is_idle(self) -> bool:
        """C05, C06: every block is free or idle, and no request is known."""
        stats = self.engine.stats()
        return (
            stats.blocks_free + stats.blocks_idle == stats.blocks_total
            and stats.running == stats.waiting == stats.blocks_in_use == 0
            and not self.manager.sequences
            and not self.engine.has_unfinished()
        )


def alone(prompt: list[int], *, block_size: int = 4, **params: Any) -> list[list[int]]:
    """The outputs of the same request in an engine of its own, with a large pool, no cache, and the prompt in one
    piece.
    """
    stub = StubEngine(256, block_size, caching=False, max_num_batched_tokens=4096)
    stub.add("alone", prompt, **params)
    return [child.token_ids for child in stub.run()["alone"].outputs]
