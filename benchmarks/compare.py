"""Runs minipaged and other engines on the same workloads, interleaved, and writes a table of ratios.

    BENCH_HOME=DIR benchmarks/rivals/setup.sh hf openvino llamacpp          # once; vllm is the fourth
    python benchmarks/compare.py --home DIR                                 # all of it: about an hour on two cores
    python benchmarks/compare.py --home DIR --only W1 --engines ours,llamacpp --rounds 1

Every measurement is a process of its own (engine, workload, round): nobody else's threads or memory are there while
it runs, and an engine's state never outlives a run. The price is a load per run, 2 to 6 s (vLLM: 100 s). Memory
bandwidth is probed before, between and after; the engines take turns within a round, starting with another one each
time. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from comparison import EXTRAS, WORKLOADS, summarise, to_markdown
from minipaged.bench.machine import machine_facts, slug, versions
from minipaged.bench.noise import QUIET
from minipaged.bench.probes import Probes
from minipaged.bench.trials import STEADY
from minipaged.threads import set_threads

HERE = Path(__file__).resolve().parent
SOURCES = HERE.parent / "src"
MODEL = "models/qwen3-0.6b-random"
SHOWN = ("decode_tok_s", "output_tok_s", "prefill_tok_s", "ttft_s", "gb_s", "own_s")
LONG = ("W3", "W5")  # one round is enough for what takes minutes


@dataclass(frozen=True)
class Rival:
    """Where an engine lives below the home folder, which model it runs, and what its environment needs."""

    script: str
    environment: str | None  # None = this interpreter
    model: str = MODEL
    variables: dict[str, str] = field(default_factory=dict)

    def python(self, home: Path) -> Path:
        """Its interpreter."""
        return Path(sys.executable) if self.environment is None else home / self.environment / "bin" / "python"


RIVALS = {
    "ours": Rival("run_minipaged.py", None),
    "hf": Rival("run_hf.py", "hf"),
    "openvino": Rival("run_openvino.py", "openvino", "models/ov-bf16"),
    "llamacpp": Rival("run_llamacpp.py", "llamacpp", "models/q3-bf16.gguf"),
    "vllm": Rival("run_vllm.py", "vllm"),
}


def main() -> None:
    arguments = _arguments()
    home: Path = arguments.home
    engines = _engines(arguments)
    if "ours" in engines:
        require_backend(arguments.backend)
    set_threads(arguments.threads)
    probes = Probes(threads=arguments.threads)
    plan = list(schedule(engines, arguments.only, arguments.rounds))
    print(f"{len(plan)} measurements; read probe: {probes.method}", flush=True)
    runs: list[dict[str, Any]] = []
    before = probes.read_bandwidth()
    for number, (round_number, workload, engine) in enumerate(plan, 1):
        for attempt in range(1 + arguments.retries):
            result = measure(engine, workload, home, arguments)
            after = probes.read_bandwidth()
            steady = abs(after - before) <= STEADY * min(before, after)
            quiet = steady and (result.get("other_cores") or 0.0) <= QUIET
            run = {"engine": engine, "workload": workload, "round": round_number, "attempt": attempt, "quiet": quiet}
            runs.append({**run, "read_bandwidth": [before, after], **result})
            before = after
            print(f"[{number}/{len(plan)}] {_line(runs[-1])}", flush=True)
            if quiet or "error" in result:
                break
    report = {
        "when": time.strftime("%Y-%m-%d %H:%M:%S"),
        "machine": machine_facts(),
        "versions": versions(),
        "threads": arguments.threads,
        "read_probe": probes.method,
        "summary": summarise(runs),
        "runs": runs,
    }
    text = to_markdown(report)
    print("\n" + text)
    if not arguments.dry:
        write_report(arguments.results, report, text)
    if any("error" in run for run in runs):
        sys.exit(1)


def require_backend(name: str) -> None:
    """Exit unless our back end `name` runs here: another one that would serve in its place is not what is compared."""
    from minipaged.ops.registry import available_backends

    known = available_backends()
    if name not in known:
        sys.exit(f"--backend {name} is unknown: choose from {', '.join(known)}")
    if known[name] is not None:
        sys.exit(f"back end {name!r} cannot run here: {known[name]}; `python tools/build_native.py` builds it")


def schedule(engines: list[str], workloads: list[str], rounds: int) -> Iterator[tuple[int, str, str]]:
    """(round, workload, engine) in order. Each round starts with another engine, so that a drift favours nobody."""
    for round_number in range(rounds):
        turn = round_number % len(engines)
        for workload in workloads:
            if workload in LONG and round_number > 0:
                continue
            for engine in engines[turn:] + engines[:turn]:
                if workload not in EXTRAS or engine == "ours":
                    yield round_number, workload, engine


def measure(engine: str, workload: str, home: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run one process; its figures, or {"error": its last words}."""
    rival = RIVALS[engine]
    environment = {**os.environ, "OMP_NUM_THREADS": str(arguments.threads), **rival.variables}
    model = home / rival.model
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        if workload in EXTRAS:
            options = EXTRAS[workload].arguments
            command = [sys.executable, "-m", "minipaged", "bench", *options, "--rounds", "3", "--json"]
            command += ["--threads", str(arguments.threads), "--backend", arguments.backend]
            if workload == "startup":
                command.insert(5, str(model))
        else:
            command = [str(rival.python(home)), str(HERE / "rivals" / rival.script), "--workload", workload]
            command += ["--model", str(model), "--out", str(out), "--threads", str(arguments.threads)]
            if engine == "ours":
                command += ["--options", json.dumps({"backend": arguments.backend, **json.loads(arguments.options)})]
            environment["PYTHONPATH"] = str(SOURCES)
            if engine == "vllm":
                environment |= vllm_variables(home, arguments.threads)
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=arguments.timeout, check=False
            )
        except subprocess.TimeoutExpired:
            return {"error": f"not finished after {arguments.timeout} s"}
        if done.returncode != 0:
            last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-3:]
            return {"error": f"exit status {done.returncode}: {' | '.join(last)}"}
        result: dict[str, Any] = json.loads(done.stdout if workload in EXTRAS else out.read_text())
        return result


def write_report(folder: Path, report: dict[str, Any], text: str, *, kind: str = "") -> None:
    """The report as JSON and as the page `text`, named after day, kind and machine."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / f"{time.strftime('%Y-%m-%d')}-{kind}{slug(report['machine'])}"
    stem.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    stem.with_suffix(".md").write_text(text)
    print(f"written: {stem}.json and .md")


def vllm_variables(home: Path, threads: int) -> dict[str, str]:
    """Both cores, tcmalloc and libiomp: vLLM's own advice for the CPU."""
    found = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True, check=False).stdout.splitlines()
    tcmalloc = next((line.split()[-1] for line in found if "libtcmalloc_minimal.so.4" in line), None)
    if tcmalloc is None:
        print("vllm: libtcmalloc_minimal.so.4 is not installed; it will be slower", file=sys.stderr)
    preload = [path for path in (tcmalloc, str(home / "vllm" / "lib" / "libiomp5.so")) if path and Path(path).exists()]
    return {"LD_PRELOAD": ":".join(preload), "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}"}


def _engines(arguments: argparse.Namespace) -> list[str]:
    """The engines that were asked for; by default all that are installed, with a line about those that are not."""
    wanted = arguments.engines or list(RIVALS)
    missing = [name for name in wanted if not RIVALS[name].python(arguments.home).exists()]
    if arguments.engines and missing:
        sys.exit(
            f"not installed in {arguments.home}: {', '.join(missing)} (benchmarks/rivals/setup.sh {' '.join(missing)})"
        )
    if missing:
        print(f"not installed, left out: {', '.join(missing)}")
    return [name for name in wanted if name not in missing]


def _line(run: dict[str, Any]) -> str:
    figures = {
        name: run[name]
        for name in ("decode_tok_s", "output_tok_s", "prefill_tok_s", "ttft_s", "gb_s", "own_s")
        if name in run
    }
    shown = run.get("error") or ", ".join(f"{name} {value:.3f}" for name, value in figures.items())
    probes = " -> ".join(f"{value / 1e9:.1f}" for value in run["read_bandwidth"])
    return f"{run['workload']} {run['engine']}: {shown}; read {probes} GB/s{'' if run['quiet'] else ' (noisy)'}"


def list_of(known: tuple[str, ...]) -> Any:
    def parse(text: str) -> list[str]:
        names = text.split(",")
        unknown = [name for name in names if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: choose from {', '.join(known)}")
        return names

    return parse


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    workloads = (*WORKLOADS, *EXTRAS)
    parser.add_argument("--home", type=Path, default=os.environ.get("BENCH_HOME"), help="folder of rivals/setup.sh")
    parser.add_argument("--engines", type=list_of(tuple(RIVALS)), help="comma-separated; default: all installed")
    parser.add_argument("--only", type=list_of(workloads), default=list(workloads), help="comma-separated workloads")
    parser.add_argument("--rounds", type=int, default=3, help="of W1, W2, W4 (W3 and W5: one)")
    parser.add_argument("--retries", type=int, default=1, help="repetitions of a noisy run")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=1800, help="seconds per run")
    parser.add_argument("--backend", default="cpu", help="of ours; the comparison stops if it cannot run here")
    parser.add_argument("--options", default="{}", help="JSON object: keywords of our LLM")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--dry", action="store_true", help="print the table, write no files")
    arguments = parser.parse_args()
    if arguments.home is None:
        parser.error("give --home or set BENCH_HOME: the folder in which rivals/setup.sh installed the engines")
    arguments.home = Path(arguments.home).absolute()  # not resolved: a virtual environment's python is a link
    return arguments


if __name__ == "__main__":
    main()
