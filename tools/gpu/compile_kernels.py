"""Compile the Triton kernels ahead of time, without a GPU, and report what the assembler says of each.

    python tools/gpu/compile_kernels.py                      # the shipped configurations for sm_90
    python tools/gpu/compile_kernels.py --arch 80 90 100 --tuning-space

Exit status 1 if a shipped configuration does not compile or does not fit the shared memory of a processor, or spills
registers on sm_90, for which the default tiles were chosen. Elsewhere, and in the tuning space, spills are reported:
`minipaged tune` leaves such candidates behind. Not for a process that
set TRITON_INTERPRET=1.
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
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from minipaged.ops.triton_kernels import shipped, tuning
from minipaged.ops.triton_kernels.launch import INTERPRETED, Launch

# Shared memory that one program may have (CUDA C++ Programming Guide, technical specifications per compute capability).
SHARED_LIMIT = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
TYPE_NAMES = {
    torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.int32: "*i32", torch.int64: "*i64",
}  # fmt: skip


def source_of(launch: Launch) -> ASTSource:
    """What Triton would compile at this launch's first call: types, constants, and what divides by 16."""
    signature: dict[str, str] = {}
    constants = dict(launch.constants)
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for index, name in enumerate(launch.kernel.arg_names):
        value = launch.arguments.get(name)
        parameter = launch.kernel.params[index]
        special = not (parameter.do_not_specialize or parameter.do_not_specialize_on_alignment)
        if special and isinstance(value, int) and value == 1:  # a one becomes a constant by itself
            constants[name] = 1
        if name in constants:
            signature[name] = "constexpr"
        elif isinstance(value, Tensor):
            signature[name] = TYPE_NAMES[value.dtype]
        elif isinstance(value, int):
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
        else:
            signature[name] = "fp32"
        # torch allocates at multiples of 16 and more; Triton looks at pointers and integers alike.
        aligned = isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0)
        if special and aligned and name not in constants:
            attributes[(index,)] = [["tt.divisibility", 16]]
    return ASTSource(launch.kernel, signature, constexprs=constants, attrs=attributes)


def compile_launch(launch: Launch, arch: int) -> dict[str, Any]:
    """Registers per thread, shared memory and spilled bytes; `error` where it does not compile or fit."""
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages, "enable_fp_fusion": True}
    try:
        compiled = triton.compile(source_of(launch), target=GPUTarget("cuda", arch, 32), options=options)
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


def tuning_space() -> Iterator[tuple[str, Launch]]:
    """Every candidate of `minipaged tune`, for the shapes of the published models."""
    for head_dim, block_size, group in ((128, 16, 2), (128, 64, 4), (128, 16, 8)):
        for kind in ("decode", "varlen"):
            for tile in tuning.candidates(kind, head_dim, torch.bfloat16):
                if kind == "decode":
                    launch = shipped.decode(block_size, group, tile=tile)[0]
                else:
                    launch = shipped.varlen(block_size, group, tile=tile)
                yield f"{tuning.tile_key(kind, head_dim, torch.bfloat16, block_size, group)} {tile}", launch


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, nargs="+", default=[90], choices=sorted(SHARED_LIMIT))
    parser.add_argument("--tuning-space", action="store_true", help="also every candidate of `minipaged tune`")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    arguments = parser.parse_args()
    if INTERPRETED:
        parser.error("TRITON_INTERPRET=1 is set: kernels of this process cannot be compiled")
    rows: list[dict[str, Any]] = []
    for arch in arguments.arch:
        named: list[tuple[str, Launch, bool]] = [(name, make(), True) for name, make in shipped.SHIPPED.items()]
        if arguments.tuning_space:
            named += [(name, launch, False) for name, launch in tuning_space()]
        for name, launch, must in named:
            row = {"arch": f"sm_{arch}", "kernel": name, "shipped": must, **compile_launch(launch, arch)}
            row["ok"] = not row.get("error") and not row.get("spill_stores") and not row.get("spill_loads")
            rows.append(row)
            if not arguments.json:
                print(_line(row), flush=True)
    failed = [
        row for row in rows if row["shipped"] and (row.get("error") or (row["arch"] == "sm_90" and not row["ok"]))
    ]
    if arguments.json:
        print(json.dumps({"triton": triton.__version__, "kernels": rows, "failed": len(failed)}, indent=1))
    else:
        print(f"triton {triton.__version__}: {len(rows)} compiled, {len(failed)} shipped configurations failed")
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
