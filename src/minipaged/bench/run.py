"""The benchmarks that run a whole model: workloads through the engine, and single steps without a scheduler."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from minipaged.bench.limits import Limits, StepWork
from minipaged.bench.measure import Run, Step, run_requests, warm_up
from minipaged.bench.probes import Probes
from minipaged.bench.profile import Profile, profiled
from minipaged.bench.report_header import Report, cache_note, case_part, report_header
from minipaged.bench.steps import seconds_per_step, step_plan, work_of
from minipaged.bench.trials import Trials, run_trials
from minipaged.bench.workloads import Workload, total_length
from minipaged.kv.address import num_logical_blocks

if TYPE_CHECKING:
    from minipaged.model.source import ModelSource

Progress = Callable[[str], object]
PROFILED_STEPS = 8  # executions of one plan under the profiler


class Bench:
    """A loaded engine next to the machine's limits; use it as a context manager. options: keywords of `LLM`.

    Errors as `LLM`.
    """

    def __init__(self, source: ModelSource, options: Mapping[str, Any], progress: Progress) -> None:
        from minipaged.llm.llm import LLM

        progress("loading the model")
        self.source, self.progress = source, progress
        self._llm = LLM(source, **options)
        loaded = self._llm.loaded
        self.engine, self.model, self.threads = loaded.engine, loaded.model, loaded.threads
        progress("measuring the machine's limits")
        self.probes = Probes(threads=self.threads, device=str(self.model.device))
        self.peak = self.probes.matrix_peak(self.model.activation_dtype)  # operations per second, and what reached them
        kv_itemsize = loaded.caches[0].key_cache.dtype.itemsize
        self.limits = Limits(self.model.config, self.model.activation_dtype.itemsize, kv_itemsize)

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self._llm.close()

    def report(self, benchmark: str, trials: Trials[Any]) -> Report:
        """The header, and the engine's start-up summary."""
        common = report_header(
            benchmark,
            self.source.name,
            trials,
            self.probes,
            self.peak,
            threads=self.threads,
            backend=self.model.backend.name,
            dtype=str(self.model.activation_dtype),
            device=str(self.model.device),
        )
        return {**common, "engine": self._llm.summary()}


def fitting(workload: Workload, source: ModelSource) -> Workload:
    """The workload with token ids that the model has. ValueError if its requests are longer than the model's
    context.
    """
    needed, positions = total_length(workload.requests), source.config.max_context
    if needed > positions:
        raise ValueError(
            f"{workload.name} needs {needed} positions, {source.name} has {positions}: choose another workload, "
            "shorten it with --prompt-tokens and --output-tokens, or take a larger model (--shape qwen3-0.6b)"
        )
    return workload.for_vocabulary(source.config.vocab_size)


def bench_workload(
    benchmark: str, bench: Bench, workload: Workload, *, rounds: int, profile: bool
) -> tuple[Report, Profile | None]:
    """ "latency", "throughput" or "prefill": one workload, `rounds` times, and once more under the profiler if wanted.

    `workload` is what `fitting` returned. The prefix cache, where it is on, is emptied before every run.
    """
    warm_up(bench.engine, workload.requests)
    numbers = itertools.count(1)

    def once() -> Run:
        bench.progress(f"{workload.name}: run {next(numbers)}")
        return run_requests(bench.engine, workload.requests)

    trials = run_trials(once, bench.probes.read_bandwidth, rounds=rounds)
    report = bench.report(benchmark, trials)
    report |= {
        "workload": workload.name,
        "description": workload.description,
        "requests": len(workload.requests),
        "prompt_tokens": workload.prompt_tokens,
        "output_tokens": workload.output_tokens,
        "prefix_caching": bench.engine.block_manager.enable_prefix_caching,
        **_figures(benchmark, trials, bench),
        "runs": [_run_part(trials, index) for index in range(len(trials.all))],
    }
    report["notes"] += cache_note(report["bytes_per_step"] or bench.limits.weight_bytes)
    if not profile:
        return report, None
    bench.progress(f"{workload.name}: run under the profiler")
    steps = Profile()
    with profiled(bench.engine) as backend:
        run_requests(bench.engine, workload.requests, on_step=lambda step: steps.add(step, *backend.take()))
    return {**report, "profile": steps.to_dict(), "notes": report["notes"] + steps.notes()}, steps


def _figures(benchmark: str, trials: Trials[Run], bench: Bench) -> Report:
    limits, bandwidth, peak = bench.limits, trials.probe, bench.peak[0]
    figures: Report = {}
    if benchmark == "throughput":
        figures["output_tok_s"] = trials.median(lambda r: r.output_tok_s)
    if benchmark == "prefill":
        figures["prefill_tok_s"] = trials.median(lambda r: r.prefill_tok_s)
        figures["share_of_matrix_peak"] = trials.median(lambda r: r.share_of_peak(limits, peak))
    else:
        figures["decode_tok_s"] = trials.median(lambda r: r.decode_tok_s)
    return figures | {
        "ttft_s": trials.median(lambda r: r.ttft_s),
        "total_s": trials.median(lambda r: r.seconds),
        "steps": int(trials.median(lambda r: len(r.steps))),
        "bytes_per_step": round(trials.median(lambda r: r.bytes_per_step(limits))),
        "share_of_bandwidth": trials.median(lambda r: r.share_of_bandwidth(limits, bandwidth)),
        "share_of_limit": trials.median(lambda r: r.share_of_limit(limits, bandwidth, peak)),
        "share_outside_runner": trials.median(lambda r: r.share_outside_runner),
        "preemptions": int(trials.median(lambda r: r.preemptions)),
        "cached_tokens": int(trials.median(lambda r: r.cached_tokens)),
    }


def _run_part(trials: Trials[Run], index: int) -> Report:
    trial = trials.all[index]
    run = trial.result
    return {
        "decode_tok_s": run.decode_tok_s,
        "output_tok_s": run.output_tok_s,
        "prefill_tok_s": run.prefill_tok_s,
        "ttft_s": run.ttft_s,
        "total_s": run.seconds,
        "other_cores": None if trial.load is None else trial.load.other_cores,
        "read_bandwidth_gb_s": [trial.before / 1e9, trial.after / 1e9],
        "counted": trial in trials.kept,
    }


StepCase = tuple[int, int, int]  # sequences, context, queries per sequence


def step_cases(
    source: ModelSource, *, sequences: Sequence[int], context: int, prefill: Sequence[int]
) -> dict[str, StepCase]:
    """Decode of so many sequences with `context` tokens each, and prefill of so many tokens, by name.

    ValueError if there is nothing to do, for numbers below 1, and for more tokens than the model has positions.
    """
    cases = {f"decode, {n} x {context}": (n, context, 1) for n in sequences}
    cases |= {f"prefill of {n}": (1, n, n) for n in prefill}
    if not cases or min(context, *sequences, *prefill) < 1:
        raise ValueError("step needs at least one number of sequences or prefill tokens, and all numbers above 0")
    longest = max(size for _, size, _ in cases.values())
    if longest > source.config.max_context:
        raise ValueError(
            f"{longest} tokens are more than the {source.config.max_context} positions of {source.name}: "
            "lower --context and --prefill-tokens, or take a larger model (--shape qwen3-0.6b)"
        )
    return cases


def step_options(cases: Mapping[str, StepCase], block_size: int) -> dict[str, Any]:
    """Keywords of `LLM` that make pool and buffers as large as the largest case needs."""
    return {
        "num_blocks": max(n * num_logical_blocks(size, block_size) for n, size, _ in cases.values()),
        "max_num_batched_tokens": max(n * queries for n, _, queries in cases.values()),
        "max_num_seqs": max(n for n, _, _ in cases.values()),
        "max_model_len": max(size for _, size, _ in cases.values()),
        "enable_prefix_caching": False,
    }


def bench_step(
    bench: Bench, cases: Mapping[str, StepCase], *, rounds: int, profile: bool
) -> tuple[Report, Profile | None]:
    """The cases of `step_cases`, each as one step without a scheduler; the first is the headline."""
    work: dict[str, StepWork] = {}

    def once() -> dict[str, float]:
        seconds = {}
        for name, (count, size, queries) in cases.items():
            bench.progress(name)
            with step_plan(bench.engine, sequences=count, context=size, queries=queries) as plan:
                work[name] = work_of(plan)
                seconds[name] = seconds_per_step(bench.engine, plan)
        return seconds

    once()  # buffers grow to their size
    trials = run_trials(once, bench.probes.read_bandwidth, rounds=rounds)
    rows = []
    for name, (count, _, queries) in cases.items():
        seconds = trials.median(lambda r: r[name])  # noqa: B023 - called here and now
        nbytes, flops = bench.limits.step_bytes(work[name]), bench.limits.step_flops(work[name])
        row = case_part(name, seconds, nbytes, flops, trials.probe, bench.peak[0])
        rows.append({**row, "tok_s": count * queries / seconds})
    first = rows[0]
    report = bench.report("step", trials) | {
        "headline": first["case"],
        "tok_s": first["tok_s"],
        "bytes_per_step": first["bytes"],
        "share_of_bandwidth": first["share_of_bandwidth"],
        "share_of_limit": first["share_of_limit"],
        "cases": rows,
    }
    report["notes"] += cache_note(first["bytes"])
    if not profile:
        return report, None
    steps = _profile_step(bench, next(iter(cases.values())))
    return {**report, "profile": steps.to_dict(), "notes": report["notes"] + steps.notes()}, steps


def _profile_step(bench: Bench, case: StepCase) -> Profile:
    sequences, context, queries = case
    steps = Profile()
    with (
        step_plan(bench.engine, sequences=sequences, context=context, queries=queries) as plan,
        profiled(bench.engine) as backend,
    ):
        for _ in range(PROFILED_STEPS):
            seconds = seconds_per_step(bench.engine, plan, least=0.0)
            steps.add(Step(seconds, seconds, work_of(plan), prefill=queries > 1), *backend.take())
    return steps
