"""Compile the Triton kernels ahead of time, without a GPU, and report what the assembler says of each.

    python tools/gpu/compile_kernels.py                      # the shipped configurations for sm_90
    python tools/gpu/compile_kernels.py --arch 80 90 100 --tuning-space

Exit status 1 if anything does not compile or does not fit the shared memory of a processor, or if a shipped
configuration or a tuning candidate spills registers. At the corners of the contract (--contract) spills are only
reported. Not for a process that set TRITON_INTERPRET=1.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas

from minipaged.ops.triton.kernels import shipped, tuning
from minipaged.ops.triton.kernels.launch import INTERPRETED, Launch

# Shared memory that one program may have (CUDA C++ Programming Guide, technical specifications per compute capability).
SHARED_LIMIT = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}


class NoGpu:
    """A Triton driver that knows which GPU is meant, and has none: kernels are compiled, and never started."""

    def __init__(self, arch: int) -> None:
        self._arch = arch

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._arch, 32)

    def get_current_device(self) -> int:
        return self._arch  # compiled kernels are kept by device

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_launch(launch: Launch, arch: int) -> dict[str, Any]:
    """Registers per thread, shared memory and spilled bytes; `error` where it does not compile or fit.

    Triton goes the way of a first call: it derives types and alignments from the very arguments, and compiles.
    """
    triton.runtime.driver.set_active(NoGpu(arch))
    try:
        compiled = launch.kernel.warmup(grid=launch.grid, **launch.keywords)
    except Exception as error:  # whatever the compiler raises belongs into the report
        return {"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
    ptx = compiled.asm["ptx"]
    report = assembler_report(ptx, arch)
    report["shared"] = compiled.metadata.shared
    units = {"wgmma": "wgmma.mma", "tcgen05": "tcgen05.mma", "mma": "mma.sync"}
    report["matrix"] = next((name for name, instruction in units.items() if instruction in ptx), "")
    report["asynchronous_copies"] = sum(map(ptx.count, ("cp.async.cg", "cp.async.ca", "cp.async.bulk.tensor")))
    if report["shared"] > SHARED_LIMIT[arch]:
        report["error"] = f"{report['shared']} bytes of shared memory are more than {SHARED_LIMIT[arch]}"
    return report


def assembler_report(ptx: str, arch: int) -> dict[str, Any]:
    """What `ptxas -v` says: Triton's own copy of the assembler, run once more on the text that Triton made."""
    suffix = "a" if arch >= 90 else ""
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "kernel.ptx"
        text.write_text(ptx)
        command = [
            get_ptxas(arch).path,
            "-v",
            f"--gpu-name=sm_{arch}{suffix}",
            str(text),
            "-o",
            str(text.with_suffix(".o")),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"error": f"ptxas: {done.stderr.strip()[:300]}"}
    numbers = {
        "registers": r"Used (\d+) registers",
        "spill_stores": r"(\d+) bytes spill stores",
        "spill_loads": r"(\d+) bytes spill loads",
    }
    found = {name: re.search(pattern, done.stderr) for name, pattern in numbers.items()}
    return {name: int(match[1]) if match else 0 for name, match in found.items()}


def tuning_space(arch: int) -> Iterator[tuple[str, Launch]]:
    """Every candidate of `minipaged tune`, for the shapes of the published models."""
    for head_dim, block_size, group in ((128, 16, 2), (128, 64, 4), (128, 16, 8)):
        for kind in ("decode", "varlen"):
            for tile in tuning.candidates(kind, head_dim, torch.bfloat16, arch):
                if kind == "decode":
                    launch = shipped.decode(block_size, group, tile=tile)[0]
                else:
                    launch = shipped.varlen(block_size, group, tile=tile)
                yield f"{tuning.tile_key(kind, head_dim, torch.bfloat16, block_size, group)} {tile}", launch


def contract_space(arch: int) -> Iterator[tuple[str, Launch]]:
    """Both attention kernels at the corners of what is promised: every type, head dimensions 16 to 256, block sizes 1
    to 256, odd groups; and a query of another type than the cache."""
    corners = ((16, 1, 1), (64, 16, 7), (80, 3, 7), (128, 256, 5), (128, 16, 16), (248, 7, 2), (256, 1, 4))
    types = ((torch.bfloat16, None), (torch.float16, None), (torch.float32, None))
    mixed = ((torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16))
    for head_dim, block_size, group in corners:
        for dtype, cache_dtype in (*types, *(mixed if head_dim in (128, 256) else ())):
            options = {"head_dim": head_dim, "dtype": dtype, "cache_dtype": cache_dtype}
            name = f"{dtype} query, {cache_dtype or dtype} cache, D={head_dim} Bs={block_size} group={group}"
            yield f"decode {name}".replace("torch.", ""), shipped.decode(block_size, group, **options)[0]
            yield f"varlen {name}".replace("torch.", ""), shipped.varlen(block_size, group, arch=arch, **options)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, nargs="+", default=[90], choices=sorted(SHARED_LIMIT))
    parser.add_argument("--tuning-space", action="store_true", help="also every candidate of `minipaged tune`")
    parser.add_argument("--contract", action="store_true", help="also the corners of the promised shapes and types")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    arguments = parser.parse_args()
    if INTERPRETED:
        parser.error("TRITON_INTERPRET=1 is set: kernels of this process cannot be compiled")
    rows: list[dict[str, Any]] = []
    for arch in arguments.arch:
        named = [(name, make(arch), "shipped") for name, make in shipped.SHIPPED.items()]
        if arguments.contract:
            named += [(name, launch, "contract") for name, launch in contract_space(arch)]
        if arguments.tuning_space:
            named += [(name, launch, "tuning") for name, launch in tuning_space(arch)]
        for name, launch, group in named:
            row = {"arch": f"sm_{arch}", "kernel": name, "group": group, **compile_launch(launch, arch)}
            row["ok"] = not row.get("error") and not row.get("spill_stores") and not row.get("spill_loads")
            rows.append(row)
            if not arguments.json:
                print(_line(row), flush=True)
    failed = [row for row in rows if row.get("error") or (row["group"] != "contract" and not row["ok"])]
    if arguments.json:
        print(json.dumps({"triton": triton.__version__, "kernels": rows, "failed": len(failed)}, indent=1))
    else:
        print(f"triton {triton.__version__}: {len(rows)} compiled, {len(failed)} failed")
    return 1 if failed else 0


def _line(row: dict[str, Any]) -> str:
    text = f"{row['arch']:7} {row['kernel']:44}"
    if row.get("error"):
        return f"{text} {row['error']}"
    spills = row["spill_stores"] + row["spill_loads"]
    return (
        f"{text} {row['registers']:4} registers {row['shared']:7} B shared {spills:5} B spilled  "
        f"{row['matrix']:7} {row['asynchronous_copies']:3} async copies"
    )


if __name__ == "__main__":
    sys.exit(main())
