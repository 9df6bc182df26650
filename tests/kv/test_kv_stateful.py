"""Random histories, found and shrunk by Hypothesis, against the naive model of `kv_model`."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kv_model import Harness

TOKEN = st.sampled_from([1, 1, 1, 2])
SALT = st.sampled_from([None, None, "tenant"])


class BlockManagerMachine(RuleBasedStateMachine):
    harness: Harness

    @initialize(
        num_blocks=st.integers(1, 9),
        block_size=st.sampled_from([1, 3, 4]),
        policy=st.sampled_from(["lru", "lfu"]),
        caching=st.sampled_from([True, True, True, False]),
    )
    def start(self, num_blocks: int, block_size: int, policy: str, caching: bool) -> None:
        self.harness = Harness(num_blocks, block_size, policy, caching)

    def some_sequence(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.harness.seqs)), label="sequence")

    def any_live(self) -> bool:
        return bool(self.harness.seqs)

    @rule(salt=SALT)
    def create(self, salt: str | None) -> None:
        self.harness.create(salt)

    @rule(prompt=st.lists(TOKEN, min_size=1, max_size=14), salt=SALT, compute=st.booleans())
    def create_from_prefix(self, prompt: list[int], salt: str | None, compute: bool) -> None:
        """With `compute`, the prompt is prefilled and committed at once."""
        seq_id = self.harness.create_from_prefix(prompt, salt)
        done = len(self.harness.seqs[seq_id].tokens)
        if compute and self.harness.append(seq_id, prompt[done:]):
            self.harness.flush()
            self.harness.commit(seq_id, len(prompt) - done)

    @precondition(any_live)
    @rule(data=st.data(), tokens=st.lists(TOKEN, max_size=10), how=st.sampled_from(["token", "tokens", "tensor"]))
    def append(self, data: st.DataObject, tokens: list[int], how: str) -> None:
        self.harness.append(self.some_sequence(data), tokens, how)

    @precondition(any_live)
    @rule(data=st.data(), token=TOKEN)
    def append_batch(self, data: st.DataObject, token: int) -> None:
        live = sorted(self.harness.seqs)
        batch = data.draw(st.lists(st.sampled_from(live), unique=True, min_size=1), label="batch")
        self.harness.append_batch(batch, token)

    @precondition(any_live)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        self.harness.fork(self.some_sequence(data))

    @precondition(any_live)
    @rule(data=st.data(), count=st.integers(0, 12))
    def commit(self, data: st.DataObject, count: int) -> None:
        self.harness.commit(self.some_sequence(data), count)

    @precondition(any_live)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.harness.release(self.some_sequence(data))

    @rule()
    def flush(self) -> None:
        self.harness.flush()

    @rule()
    def allocate_block(self) -> None:
        self.harness.allocate_block()

    @precondition(lambda self: bool(self.harness.held))
    @rule(data=st.data())
    def free_block(self, data: st.DataObject) -> None:
        self.harness.free_block(data.draw(st.integers(0, len(self.harness.held) - 1), label="held"))

    @precondition(lambda self: bool(self.harness.cached))
    @rule()
    def reset_cache(self) -> None:
        self.harness.reset_cache()

    @invariant()
    def manager_equals_model(self) -> None:
        if hasattr(self, "harness"):
            self.harness.check()


def run(examples: int, steps: int) -> None:
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(
        BlockManagerMachine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )


def test_random_histories() -> None:
    run(examples=150, steps=40)


@pytest.mark.slow
@pytest.mark.timeout(1800)  # cut off by the clock, Hypothesis would call it flaky
def test_long_random_histories() -> None:
    run(examples=3000, steps=100)
