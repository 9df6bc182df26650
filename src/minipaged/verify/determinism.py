"""`verify --determinism`: the same requests in other company, other chunks, other places; are the logits the same bits?

A back end that calls itself `batch_invariant` must give identical bits; any other must stay within `PROMISE` in
float32. Every variant is teacher-forced with the tokens of the plain run, so that rows are compared after equal
tokens, and shows by a count that it really took the other way; one that did not happen is a failure, not a success.
"""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from minipaged.engine.config import EngineStats
from minipaged.kv.address import num_logical_blocks
from minipaged.model.qwen3 import Qwen3Model
from minipaged.model.weights import load_folder
from minipaged.ops.registry import get_backend
from minipaged.threads import set_threads
from minipaged.verify.decode import Outcome, Prompt, Setting, logits_of, run
from minipaged.verify.judge import Claim

PROMISE = 1e-4
"""float32: how far logits may move between ways of computing the same tokens, on back ends without equal bits
(absolute)."""

MIN_TOKENS = 8
"""Fewer tokens per request leave no room for a preemption."""

Logits = Mapping[Prompt, Tensor]


def check_determinism(
    model: Qwen3Model, folder: Path, prompts: Sequence[Sequence[int]], num_tokens: int, *, seed: int = 0
) -> list[Claim]:
    """One claim per way of computing the same tokens, against each request alone. `folder`: where `model` came from;
    other thread counts are tried on it in a process of their own."""
    num_tokens = max(num_tokens, MIN_TOKENS)
    keys = [tuple(prompt) for prompt in prompts]
    plain = _alone(model, keys, num_tokens, Setting())
    baseline = {prompt: logits_of(outcome, prompt) for prompt, outcome in plain.items()}
    scripts = {prompt: [taken.token for taken in outcome.taken[prompt]] for prompt, outcome in plain.items()}
    limit = _limit(model)
    return [
        _compare(name, detail, baseline, logits, evidence, limit)
        for name, detail, logits, evidence in (
            *_variants(model, keys, num_tokens, scripts, seed),
            *_threads(model, folder, keys, scripts),
        )
    ]


def _limit(model: Qwen3Model) -> float:
    if model.backend.batch_invariant:
        return 0.0
    return PROMISE if model.activation_dtype == torch.float32 else math.inf  # nothing is promised for bfloat16 there


Variant = tuple[str, str, Logits, str]  # claim, how, logits, evidence ("" = it did not happen)


def _variants(
    model: Qwen3Model, prompts: Sequence[Prompt], num_tokens: int, scripts: Mapping[Prompt, Sequence[int]], seed: int
) -> Iterator[Variant]:
    def together(setting: Setting, *, stagger: int = 0, repeat: int = 1) -> tuple[Logits, EngineStats]:
        outcome = run(model, prompts, num_tokens, setting=setting, scripts=scripts, stagger=stagger, repeat=repeat)
        return {prompt: logits_of(outcome, prompt) for prompt in prompts}, outcome.stats

    def alone(setting: Setting) -> tuple[Logits, int]:
        outcomes = _alone(model, prompts, num_tokens, setting, scripts)
        logits = {prompt: logits_of(outcome, prompt) for prompt, outcome in outcomes.items()}
        return logits, sum(outcome.steps[prompt] for prompt, outcome in outcomes.items())

    plain = Setting()
    company = f"{len(prompts)} requests" if len(prompts) > 1 else ""
    yield "in a batch", "all requests at once", together(plain)[0], company
    yield "in a batch", "a new request every 3 steps", together(plain, stagger=3)[0], company

    for chunk in (1, 5, 16):
        logits, steps = alone(Setting(max_num_batched_tokens=chunk))
        extra = steps - len(prompts) * num_tokens
        yield "chunked prefill", f"{chunk} tokens per step", logits, f"{extra} more steps" if extra else ""

    for block_size in (1, 3, 64):
        logits, _ = alone(Setting(block_size=block_size))
        yield "block size", f"{block_size} tokens instead of {plain.block_size}", logits, "each request alone"

    blocks = 2 * sum(num_logical_blocks(len(prompt) + num_tokens, plain.block_size) for prompt in prompts)
    order = random.Random(seed).sample(range(blocks), blocks)
    logits, _ = together(Setting(num_blocks=blocks, free_order=order))
    yield "placement", "blocks handed out in random order", logits, f"starting with {order[:3]}"

    logits, stats = together(Setting(prefix_caching=True, block_size=4), repeat=2)
    hits = stats.prefix_hit_tokens
    yield "prefix hit", "the same prompts a second time", logits, f"{hits} cached tokens" if hits else ""

    # Room for the longest request alone, and for every prompt, but not for what all of them grow to.
    needs = [num_logical_blocks(len(prompt) + num_tokens - 1, 4) for prompt in prompts]
    logits, stats = together(Setting(block_size=4, num_blocks=max(*needs, sum(needs) - num_tokens // 4)))
    count = stats.preemptions
    yield "preempted", "a pool too small for all of them", logits, f"happened {count} times" if count else ""


def _alone(
    model: Qwen3Model,
    prompts: Sequence[Prompt],
    num_tokens: int,
    setting: Setting,
    scripts: Mapping[Prompt, Sequence[int]] | None = None,
) -> dict[Prompt, Outcome]:
    """Each request in an engine of its own."""
    return {prompt: run(model, [prompt], num_tokens, setting=setting, scripts=scripts) for prompt in prompts}


def _compare(name: str, detail: str, baseline: Logits, logits: Logits, evidence: str, limit: float) -> Claim:
    if not evidence:
        return Claim(name, detail, 0, 0, 0.0, limit, "this did not happen")
    compared = identical = 0
    worst = 0.0
    for prompt, expected in baseline.items():
        difference = (logits[prompt] - expected).abs().amax(dim=1).nan_to_num(nan=math.inf)
        same = (logits[prompt].view(torch.int32) == expected.view(torch.int32)).all(dim=1)
        compared += len(expected)
        identical += int(same.sum())
        worst = max(worst, float(difference.max()))
    return Claim(name, detail, compared, identical, worst, limit, evidence)


# -- other thread counts: a process of its own, because the thread count belongs to the process


def _threads(
    model: Qwen3Model, folder: Path, prompts: Sequence[Prompt], scripts: Mapping[Prompt, Sequence[int]]
) -> Iterator[Variant]:
    if model.device.type != "cpu":
        return
    threads = torch.get_num_threads()
    for other in (1, 2):
        if other == threads:
            continue
        with tempfile.TemporaryDirectory() as exchange:
            file = Path(exchange) / "logits.pt"
            torch.save({"prompts": [(prompt, list(scripts[prompt])) for prompt in prompts]}, file)
            arguments = [
                str(folder),
                model.backend.name,
                str(model.activation_dtype).removeprefix("torch."),
                str(other),
                str(file),
            ]
            # This process's other settings hold there too; only OMP_NUM_THREADS would win over the argument.
            environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
            done = subprocess.run(
                [sys.executable, "-m", "minipaged.verify.determinism", *arguments],
                capture_output=True,
                text=True,
                check=False,
                env=environment,
            )
            if done.returncode != 0:
                raise RuntimeError(f"the run with {other} threads failed:\n{done.stderr.strip()}")
            answer = torch.load(file, weights_only=True)
        logits = dict(zip(prompts, answer["logits"], strict=True))
        used = int(answer["threads"])
        yield "threads", f"{other} for {threads}", logits, f"{used} in use" if used == other else ""


def main(folder: str, backend: str, dtype: str, threads: str, file: str) -> None:
    """Child process: each request alone with another thread count; prompts are read from `file`, logits written to
    it."""
    set_threads(int(threads))
    model = load_folder(folder, get_backend(backend), dtype=dtype, progress=False)
    requests = [(tuple(prompt), script) for prompt, script in torch.load(file, weights_only=True)["prompts"]]
    logits = []
    for prompt, script in requests:
        outcome = run(model, [prompt], len(script), scripts={prompt: script})
        logits.append(logits_of(outcome, prompt))
    torch.save({"logits": logits, "threads": torch.get_num_threads()}, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
