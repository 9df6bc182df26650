"""Build, check and time the GPU back end on this machine: one call, a table, and JSON.

    PYTHONPATH=src python benchmarks/gpu.py --json gpu.json            # needs torch, triton, numpy, safetensors, tqdm
    PYTHONPATH=src python benchmarks/gpu.py --only attention recipe
    TRITON_INTERPRET=1 PYTHONPATH=src python benchmarks/gpu.py --rehearse     # without a GPU: does the script run?

Order: ceilings (device copy, matrix product), checks against float64 (a failure ends the run with status 1 after
everything is reported), decode and prefill attention, whole models of the 0.6B and 4B shapes with random weights. A
section that raises is reported as a failure, and the others go on.
Every rate stands beside its ceiling, measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import triton

from gpu_sections import attention, model
from gpu_sections.measure import Rig
from minipaged import __version__
from minipaged.ops.triton.backend import TritonBackend, unavailable_reason
from minipaged.ops.triton.kernels import tuning

SECTIONS = ("check", "attention", "decode", "recipe")
MODELS = ("qwen3-0.6b", "qwen3-4b")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there, section by section")
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes on the CPU under TRITON_INTERPRET=1")
    arguments = parser.parse_args()
    rig = Rig(arguments.rehearse)
    reason = unavailable_reason(rig.device)
    if reason is not None:
        parser.error(f"the Triton back end cannot run on {rig.device.type}: {reason}")
    report: dict[str, Any] = {"about": about(rig), "rows": []}
    failed = 0
    for row in rows_of(rig, arguments.only, arguments.models, report):
        report["rows"].append(row)
        print("  ".join(f"{key}: {show(value)}" for key, value in row.items()), flush=True)
        failed += row.get("passed") is False
        if arguments.json:  # after every row: a run that is cut off leaves what it has
            arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    missed = [row for row in report["rows"] if row.get("must") and row["share_of_copy"] < row["must"]]
    print(f"{failed} checks failed, {len(missed)} of the rates are below what they must reach")
    return 1 if failed else 0


def rows_of(rig: Rig, only: list[str], models: list[str], report: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One row after the other, each a flat dictionary."""
    backend = TritonBackend()
    bandwidth, flops = rig.copy_bandwidth(), rig.product_flops()
    report["about"] |= {"copy_GB_s": bandwidth / 1e9, "product_TFLOP_s": flops / 1e12}
    print("  ".join(f"{key}: {show(value)}" for key, value in report["about"].items()), flush=True)
    if "check" in only:
        yield from guarded("check of attention", attention.check(rig, backend))
    if "attention" in only:
        yield from guarded("decode attention", attention.decode(rig, backend, bandwidth))
        yield from guarded("prefill attention", attention.prefill(rig, backend, flops))
    if not {"check", "decode", "recipe"} & set(only):
        return
    for name in models:
        yield from guarded(name, model_rows(rig, only, name, bandwidth))


def model_rows(rig: Rig, only: list[str], name: str, bandwidth: float) -> Iterator[dict[str, Any]]:
    start = time.perf_counter()
    loaded = model.load(rig, name)
    rig.synchronize()
    yield {"loaded": name, "seconds": time.perf_counter() - start, "GB": model.model_bytes(loaded) / 1e9}
    if "check" in only:
        yield from guarded(f"check of {name}", model.check(rig, loaded))
    if "decode" in only:
        yield from guarded(f"decode of {name}", model.decode_one(rig, name, loaded, bandwidth))
    if "recipe" in only:
        yield from guarded(f"recipe of {name}", model.recipe(rig, name, loaded))


def guarded(section: str, rows: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """`rows`; an exception in them becomes a last one that failed: time on a GPU is scarce."""
    try:
        yield from rows
    except Exception as error:
        traceback.print_exc()
        yield {"section": section, "passed": False, "error": f"{type(error).__name__}: {error}"[:500]}


def about(rig: Rig) -> dict[str, Any]:
    """The machine and the versions; whether the numbers mean anything."""
    facts: dict[str, Any] = {
        "minipaged": __version__, "python": platform.python_version(), "torch": torch.__version__,
        "triton": triton.__version__, "machine": platform.machine(),
    }  # fmt: skip
    if rig.rehearsal:
        return {**facts, "rehearsal": "interpreted on the CPU with tiny shapes: the numbers mean nothing"}
    properties = torch.cuda.get_device_properties(0)
    return {
        **facts, "gpu": properties.name, "processors": properties.multi_processor_count,
        "memory_GiB": properties.total_memory / 2**30, "cuda": torch.version.cuda,
        "tuning_table": str(tuning.table_path(properties.name)) if tuning.tuned() else "none: default tiles",
    }  # fmt: skip


def show(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
