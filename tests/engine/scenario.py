"""Random workloads on a small pool, and the check that nothing but the outputs of the oracle comes out of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from paged_stub import VOCAB, PagedMemory, PagedStubRunner, oracle

from minipaged.engine.config import EngineConfig
from minipaged.engine.engine import Engine
from minipaged.engine.plan import StepPlan
from minipaged.errors import RequestTooLargeError
from minipaged.kv import KVBlockManager
from minipaged.outputs import RequestOutput
from minipaged.sampling_params import SamplingParams

NUM_BLOCKS = 16


@dataclass
class Job:
    request_id: str
    prompt: list[int]
    params: SamplingParams
    arrival: int  # step
    abort: int | None  # step, possibly before the arrival or after the end
    salt: str | None


@dataclass
class Scenario:
    block_size: int
    max_num_seqs: int
    budget: int
    policy: str
    caching: bool
    eviction: str
    jobs: list[Job]
    failing_steps: set[int] = field(default_factory=set)
    bad_rows: set[int] = field(default_factory=set)  # steps in which the first sampling row is NaN


def make_scenario(rng: Random, *, faults: bool = True) -> Scenario:
    block_size = rng.choice([1, 3, 4, 16])
    pool = NUM_BLOCKS * block_size
    roots = [[rng.randrange(VOCAB) for _ in range(pool)] for _ in range(2)]
    jobs = []
    for number in range(rng.randint(1, 10)):
        shared = rng.randint(0, pool // 2)
        prompt = rng.choice(roots)[:shared] + [
            rng.randrange(VOCAB) for _ in range(rng.choice([0, 1, 2, block_size, 7]))
        ]
        prompt = prompt or [number]
        max_tokens = rng.randint(1, min(40, max(1, pool - len(prompt))))
        params = SamplingParams(
            n=rng.choice([1, 1, 1, 2, 3]),
            temperature=rng.choice([0.0, 1.0]),
            seed=rng.randint(0, 3),
            max_tokens=max_tokens,
            min_tokens=rng.choice([0, min(3, max_tokens)]),
            stop_token_ids=sorted(rng.sample(range(VOCAB), rng.choice([0, 10]))),
            prompt_logprobs=rng.choice([None, None, None, 0]),
            priority=rng.randint(0, 2),
        )
        arrival = rng.choice([0, 0, rng.randint(0, 60)])
        abort = rng.choice([None, None, None, rng.randint(0, 80)]) if faults else None
        jobs.append(Job(f"r{number}", prompt, params, arrival, abort, rng.choice([None, None, "a"])))
    return Scenario(
        block_size,
        rng.choice([1, 2, 3, 4, 8]),
        rng.choice([1, 2, 3, 5, 7, 16, 64, 512]),
        rng.choice(["fcfs", "priority"]),
        rng.choice([True, True, True, False]),
        rng.choice(["lru", "lfu"]),
        jobs,
        {rng.randint(0, 60) for _ in range(rng.choice([0, 0, 1, 3]))} if faults else set(),
        {rng.randint(0, 60) for _ in range(rng.choice([0, 0, 1, 3]))} if faults else set(),
    )


@dataclass
class Rig:
    """Engine, manager, memory and stub runner for one scenario."""

    scenario: Scenario
    memory: PagedMemory = field(init=False)
    manager: KVBlockManager = field(init=False)
    runner: PagedStubRunner = field(init=False)
    engine: Engine = field(init=False)

    def __post_init__(self) -> None:
        s = self.scenario
        self.memory = PagedMemory(NUM_BLOCKS, s.block_size)
        self.manager = KVBlockManager(
            NUM_BLOCKS,
            s.block_size,
            enable_prefix_caching=s.caching,
            eviction_policy=s.eviction,
            listener=self.memory.on_event,
        )
        self.runner = PagedStubRunner(self.memory, self.manager, fail=s.failing_steps.__contains__)
        self.runner.bad_row = self._bad_row
        self.runner.on_execute = self._check_limits
        config = EngineConfig(
            max_num_seqs=s.max_num_seqs,
            max_num_batched_tokens=s.budget,
            vocab_size=VOCAB,
            scheduling_policy=s.policy,
            check_invariants=True,
        )
        self.engine = Engine(self.runner, self.manager, config)
        self._plan: StepPlan | None = None

    def _bad_row(self, step: int, sequence_id: int) -> bool:
        rows = [row for row in self._plan.rows if row.sample_for]
        return step in self.scenario.bad_rows and rows and rows[0].sequence.sequence_id == sequence_id

    def _check_limits(self, plan: StepPlan) -> None:
        self._plan = plan
        assert plan.num_tokens <= self.scenario.budget + 1
        seats = sum(child.seats for child in self.engine.scheduler.running)
        assert seats <= self.scenario.max_num_seqs
        assert len(self.manager.sequences) == len(self.engine.scheduler.running)
        orders = [child.order for child in self.engine.scheduler.running]
        assert orders == sorted(orders)

    def run(self) -> dict[str, RequestOutput]:
        """Play the scenario to its end; returns the final outputs. Checks what must hold at every step."""
        engine, jobs = self.engine, self.scenario.jobs
        last: dict[str, RequestOutput] = {}
        accepted: set[str] = set()
        step, bound = 0, self.bound_on_steps()
        last_event = max([job.arrival for job in jobs] + [job.abort or 0 for job in jobs])
        while step <= last_event or engine.has_unfinished():
            for job in jobs:
                if job.abort == step:
                    engine.abort(job.request_id)
                if job.arrival == step:
                    try:
                        engine.add_request(job.request_id, job.prompt, job.params, cache_salt=job.salt)
                        accepted.add(job.request_id)
                    except RequestTooLargeError:
                        needed = -(-(len(job.prompt) + job.params.max_tokens - 1) // self.scenario.block_size)
                        assert needed > NUM_BLOCKS or job.params.n > self.scenario.max_num_seqs
            seen = set()
            for output in engine.step():
                assert output.request_id not in seen, "one output per request and step"
                seen.add(output.request_id)
                before = last.get(output.request_id)
                assert before is None or not before.finished
                for child in output.outputs:
                    known = before.outputs[child.index].token_ids if before else []
                    assert child.token_ids[: len(known)] == known, "outputs are cumulative"
                last[output.request_id] = output
            step += 1
            assert step <= bound + last_event, f"no end after {step} steps"
        assert set(last) == accepted
        assert all(output.finished for output in last.values())
        self.check_idle()
        return last

    def bound_on_steps(self) -> int:
        """The oldest request computes at least one token per turn, and has at most prompt + max_tokens to compute once
        it is oldest.
        """
        turns = -(-self.scenario.max_num_seqs // self.scenario.budget)
        return 10 + turns * sum(job.params.n * (len(job.prompt) + job.params.max_tokens) for job in self.scenario.jobs)

    def check_idle(self) -> None:
        """C05, C06: nothing of a request is left anywhere."""
        manager, engine = self.manager, self.engine
        assert manager.sequences == {}
        assert manager.num_free_blocks + manager.num_idle_blocks == NUM_BLOCKS
        assert not engine.scheduler.running
        assert not engine.scheduler.waiting
        assert not engine._live
        assert not engine._inbox
        stats = engine.stats()
        assert stats.blocks_in_use == stats.running == stats.waiting == stats.internal_fragmentation_tokens == 0


def check_against_oracle(scenario: Scenario, outputs: dict[str, RequestOutput]) -> int:
    """Each finished child equals the oracle, each aborted or failed one is the beginning of it; returns how many tokens
    were compared.
    """
    compared = 0
    for job in scenario.jobs:
        output = outputs.get(job.request_id)
        if output is None:
            continue
        assert [child.index for child in output.outputs] == list(range(job.params.n))
        for child in output.outputs:
            wanted = oracle(job.prompt, job.params, job.params.seed, child.index)
            compared += len(child.token_ids)
            if child.finish_reason in ("abort", "error"):
                assert child.token_ids == wanted[: len(child.token_ids)]
                assert (child.error is not None) == (child.finish_reason == "error")
            else:
                assert child.token_ids == wanted
                stopped = wanted[-1] in job.params.stop_token_ids and len(wanted) >= job.params.min_tokens
                assert child.finish_reason == ("stop" if stopped else "length")
        if job.params.prompt_logprobs is not None and output.outputs[0].finish_reason in ("stop", "length"):
            assert [next(iter(entry)) for entry in output.prompt_logprobs[1:]] == job.prompt[1:]
        if scenario.caching and output.num_cached_tokens:
            assert output.num_cached_tokens % scenario.block_size == 0
            assert output.num_cached_tokens < len(job.prompt)
    return compared
