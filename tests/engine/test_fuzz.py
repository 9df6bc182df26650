"""Differential fuzz of engine, scheduler and block manager: random workloads on 16 blocks against "the same request
alone".

`MINIPAGED_FUZZ_SECONDS` sets how long `test_long_fuzz` runs (default 1800).
"""

from __future__ import annotations

import os
import time
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scenario import Rig, check_against_oracle, make_scenario


def play(rng: Random) -> tuple[int, Rig]:
    scenario = make_scenario(rng)
    rig = Rig(scenario)
    return check_against_oracle(scenario, rig.run()), rig


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.randoms(use_true_random=False))
def test_any_workload_gives_the_oracles_tokens(rng: Random) -> None:
    """C03, C05, C06, C07, C09, C10, C11, C13, C15: Hypothesis shrinks what it finds."""
    play(rng)


def fuzz(seconds: float, first_seed: int) -> None:
    end = time.monotonic() + seconds
    seed, tokens, preemptions, hits, copies = first_seed, 0, 0, 0, 0
    while time.monotonic() < end:
        try:
            compared, rig = play(Random(seed))
        except BaseException as error:
            error.args = (f"seed {seed}: {error.args[0] if error.args else ''}", *error.args[1:])
            raise
        stats = rig.engine.stats()
        tokens += compared
        preemptions += stats.preemptions
        hits += stats.prefix_hit_tokens
        copies += rig.runner.copies
        seed += 1
    # The fuzz must have been where it is meant to look.
    assert tokens > 100
    assert preemptions > 10
    assert hits > 100
    assert copies > 10


def test_fuzz_for_a_fixed_time() -> None:
    """As above, without Hypothesis' overhead: more workloads per second, reproducible by the seed in the message."""
    fuzz(float(os.environ.get("MINIPAGED_SHORT_FUZZ_SECONDS", "25")), 0)


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_long_fuzz() -> None:
    """`make test-full`: as long as MINIPAGED_FUZZ_SECONDS says, from a fresh seed."""
    fuzz(float(os.environ.get("MINIPAGED_FUZZ_SECONDS", "1800")), int(time.time()) << 20)
