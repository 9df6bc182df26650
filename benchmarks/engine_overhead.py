"""What the engine itself costs per step: everything but the model.

A stub model returns fixed logits (vocabulary 32,000), so that the time measured is that of scheduling, block
management, input batch, sampling, detokenising, stop matching and building outputs.

    python benchmarks/engine_overhead.py [--json]

"cpu ms" is the processor time of the engine's thread alone: what is left on a machine that others use too.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path

import torch

from minipaged import __version__
from minipaged.engine.config import EngineConfig
from minipaged.engine.engine import Engine
from minipaged.kv import FanOut, KVBlockManager
from minipaged.ops.backend import AttentionBatch, AttentionPlan
from minipaged.runner.input_batch import InputBatch
from minipaged.runner.model_runner import ModelRunner
from minipaged.sampling.sampler import Sampler
from minipaged.sampling_params import SamplingParams
from minipaged.text.tokenizer import Tokenizer
from minipaged.threads import set_threads

VOCAB = 32_000
BLOCK_SIZE = 16
AIMS_MS = {8: 0.5, 32: 1.5, 256: 8.0}
WORKLOADS = {
    "greedy": {"temperature": 0.0},
    "top-p 0.9": {"temperature": 1.0, "top_p": 0.9},
    "greedy, stop string": {"temperature": 0.0, "stop": ["never to be seen"]},
}


class StubModel:
    """Fixed logits, each row with another favourite; also stands in for the back end, whose plan it does not need."""

    def __init__(self, max_rows: int) -> None:
        self._logits = torch.randn(max_rows, VOCAB, generator=torch.Generator().manual_seed(0))

    def forward(self, token_ids, plan, caches, logits_rows=None):
        return self._logits[: len(logits_rows)]

    def plan(self, batch: AttentionBatch) -> AttentionPlan:
        return AttentionPlan(batch)

    def copy_blocks(self, caches, pairs) -> None:
        raise AssertionError("nothing is forked here")


def byte_level_tokenizer(folder: Path) -> Tokenizer:
    """32,000 tokens of one to three bytes, without training anything."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, *(a + b + c for a in "eatoinsr " for b in alphabet[:94] for c in alphabet[:94])][:VOCAB]
    backend = Backend(models.BPE(vocab={word: i for i, word in enumerate(dict.fromkeys(words))}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


def measure(tokenizer: Tokenizer, num_seqs: int, sampling: dict, *, steps: int, prompt_len: int = 128) -> dict:
    """Seconds per decode step with `num_seqs` sequences, each step timed; the first few are left out."""
    length = prompt_len + steps + 48
    blocks = num_seqs * -(-length // BLOCK_SIZE) + 8
    input_batch = InputBatch(
        max_tokens=4096,
        max_seqs=num_seqs,
        max_blocks=-(-length // BLOCK_SIZE),
        block_size=BLOCK_SIZE,
        num_slots=blocks * BLOCK_SIZE,
    )
    manager = KVBlockManager(
        blocks, BLOCK_SIZE, enable_prefix_caching=True, listener=FanOut(input_batch.tables.on_event)
    )
    model = StubModel(num_seqs)
    runner = ModelRunner(model, model, [], Sampler(VOCAB), input_batch)
    config = EngineConfig(max_num_seqs=num_seqs, max_num_batched_tokens=4096, vocab_size=VOCAB)
    engine = Engine(runner, manager, config, tokenizer=tokenizer)
    params = SamplingParams(max_tokens=steps + 40, ignore_eos=True, seed=1, **sampling)
    for number in range(num_seqs):
        engine.add_request(str(number), [(number * 131 + i) % VOCAB for i in range(prompt_len)], params)
    while len(engine.step()) < num_seqs:
        pass
    times, cpu_times = [], []
    for _ in range(steps):
        start, cpu_start = time.perf_counter(), time.thread_time()
        outputs = engine.step()
        times.append(time.perf_counter() - start)
        cpu_times.append(time.thread_time() - cpu_start)
        assert len(outputs) == num_seqs
    times, cpu_times = times[5:], cpu_times[5:]
    return {
        "sequences": num_seqs,
        "median_ms": 1e3 * statistics.median(times),
        "p90_ms": 1e3 * sorted(times)[int(0.9 * len(times))],
        "cpu_ms": 1e3 * statistics.median(cpu_times),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--steps", type=int, default=300)
    arguments = parser.parse_args()
    threads = set_threads()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = byte_level_tokenizer(Path(folder))
        for name, sampling in WORKLOADS.items():
            for num_seqs, aim in AIMS_MS.items():
                result = measure(tokenizer, num_seqs, sampling, steps=arguments.steps)
                results.append({"workload": name, "aim_ms": aim if name == "greedy" else None, **result})
    report = {
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs",
        "threads": threads,
        "versions": {"minipaged": __version__, "python": platform.python_version(), "torch": torch.__version__},
        "vocabulary": VOCAB,
        "results": results,
    }
    if arguments.json:
        print(json.dumps(report, indent=2))
        return
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    print(f"{report['machine']}, load average {load:.1f}, {threads} threads, {report['versions']}, vocabulary {VOCAB}")
    print(f"{'workload':<22} {'sequences':>9} {'median ms':>10} {'p90 ms':>8} {'cpu ms':>8} {'aim ms':>7}")
    for r in results:
        aim = "" if r["aim_ms"] is None else f"{r['aim_ms']:.1f}"
        print(
            f"{r['workload']:<22} {r['sequences']:>9} {r['median_ms']:>10.3f} {r['p90_ms']:>8.3f} {r['cpu_ms']:>8.3f} "
            f"{aim:>7}"
        )


if __name__ == "__main__":
    main()
