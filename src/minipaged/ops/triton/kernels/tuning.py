"""Tile sizes of the attention kernels: a table that `minipaged tune` measured on this GPU, else a default.

Serving only ever reads. Tile sizes change speed, and the last bits of results; they never change what is right.
"""

from __future__ import annotations

import json
import math
import os
import re
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

LOG2_E = 1 / math.log(2)  # scores times this: 2^x is what the hardware computes

TABLE_VARIABLE = "MINIPAGED_TUNING"
"""Environment variable: the table to read instead of the user's own."""


@dataclass(frozen=True, slots=True)
class Tile:
    """rows of the query matrix (0: given by the heads), keys at a time, and what Triton is told."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


def tile_key(kind: str, head_dim: int, dtype: torch.dtype, block_size: int, group: int) -> str:
    """The name of one kernel shape in a table. kind: "decode" or "varlen"; group: query heads per kv head."""
    return f"{kind} {str(dtype).removeprefix('torch.')} head_dim={head_dim} block_size={block_size} group={group}"


@cache
def arch_of(device: torch.device) -> int:
    """80, 90 or 100: whose tile sizes suit this device. 90 where there is no GPU; 80 for GPUs that multiply as it does.

    The difference is registers: from 9.0 on, the matrix units take K and V from shared memory.
    """
    if device.type != "cuda":
        return 90
    return {9: 90, 10: 100}.get(torch.cuda.get_device_capability(device)[0], 80)


def decode_tile(head_dim: int, dtype: torch.dtype, block_size: int, group: int) -> Tile:
    """Memory-bound: enough bytes in flight, small programs. dtype: that of the products."""
    row = head_dim * dtype.itemsize  # bytes
    default = Tile(0, 64 if row <= 256 else 32 if row <= 512 else 16, 4, 3 if dtype.itemsize == 2 else 2)
    return tuned().get(tile_key("decode", head_dim, dtype, block_size, group), default)


def varlen_tile(head_dim: int, dtype: torch.dtype, block_size: int, group: int, arch: int = 90) -> Tile:
    """Compute-bound: the largest matrices that registers and shared memory hold. dtype: that of the products."""
    if dtype.itemsize == 4:
        # Exact float32 products: no matrix units, many registers.
        default = Tile(16, 32 if head_dim <= 128 else 16, 4, 1)
    elif head_dim <= 128:
        default = Tile(128, 32 if arch == 80 else 64, 8, 3)
    else:
        default = Tile(64, 32, 8, 2)
    return tuned().get(tile_key("varlen", head_dim, dtype, block_size, group), default)


SPILLING = {
    80: {
        (64, 64, 4),
        (64, 128, 4),
        (64, 128, 8),
        (128, 32, 4),
        (128, 64, 4),
        (128, 64, 8),
        (128, 128, 4),
        (128, 128, 8),
    },
    90: {(0, 32, 8), (0, 128, 4), (64, 128, 4), (128, 32, 4), (128, 64, 4), (128, 128, 4)},
    100: {(0, 128, 4), (64, 128, 4), (128, 32, 4), (128, 32, 8), (128, 64, 4), (128, 128, 4)},
}
"""By architecture, (rows, keys, warps) of tiles whose registers do not suffice at head_dim 128, as the assembler said
(`make gpu-aot`, triton 3.6 or 3.9)."""


def candidates(kind: str, head_dim: int, dtype: torch.dtype, arch: int = 90) -> list[Tile]:
    """What `minipaged tune` tries; not all of it fits every GPU."""
    rows = (0,) if kind == "decode" else (64, 128)
    keys = (32, 64, 128)
    tiles = [Tile(r, k, w, s) for r in rows for k in keys for w in (4, 8) for s in (2, 3, 4)]
    limit = 96 << 10  # of shared memory for K and V; more leaves one program per processor
    return [
        t
        for t in tiles
        if 2 * t.keys * head_dim * dtype.itemsize * (t.num_stages - 1) <= limit
        and (t.rows, t.keys, t.num_warps) not in SPILLING[arch]
    ]


def table_path(device_name: str) -> Path:
    """Where the table of this GPU lives: `TABLE_VARIABLE`, or a file in the user's cache."""
    given = os.environ.get(TABLE_VARIABLE)
    if given:
        return Path(given)
    cache_home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache_home / "minipaged" / "tuning" / (re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-") + ".json")


def save_table(path: Path, tiles: dict[str, Tile], about: dict[str, Any]) -> None:
    """Write a table; `about` says where it was measured, for people."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"about": about, "tiles": {key: asdict(tile) for key, tile in sorted(tiles.items())}}
    path.write_text(json.dumps(content, indent=1) + "\n")


def load_table(path: Path) -> dict[str, Tile]:
    """Read a table. ValueError, naming the file, if it is not one."""
    try:
        return {key: Tile(**tile) for key, tile in json.loads(path.read_text())["tiles"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} is not a tuning table ({error!r}): run `minipaged tune` again or remove it"
        ) from error


@cache
def tuned() -> dict[str, Tile]:
    """The table of the GPU that this process uses; empty without a GPU or without a table. Read once."""
    if not torch.cuda.is_available():
        return {}
    path = table_path(torch.cuda.get_device_name())
    return load_table(path) if path.is_file() else {}
