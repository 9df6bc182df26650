"""Writes a model folder for weights that exist only in memory, so that loading from a file can be measured without a
download.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from minipaged.model.parameters import parameters

if TYPE_CHECKING:
    from minipaged.model.source import ModelSource

KINDS = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
NOT_FIELDS = ("yarn", "eos_token_ids", "dtype")  # of config.json, which has other names for them


def write_checkpoint(source: ModelSource, folder: Path) -> None:
    """config.json and model.safetensors in an existing folder, one tensor in memory at a time; no tokenizer.

    The format is an 8-byte length, a JSON header of names, types, shapes and offsets, then the bytes (safetensors'
    own README).
    """
    fields = {name: value for name, value in asdict(source.config).items() if name not in NOT_FIELDS}
    dtype = str(source.dtype).removeprefix("torch.")
    described = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "dtype": dtype, **fields}
    (folder / "config.json").write_text(json.dumps(described, indent=1))
    entries: dict[str, Any] = {}
    end = 0
    for name, parameter in parameters(source.config).items():
        start, end = end, end + math.prod(parameter.shape) * source.dtype.itemsize
        entries[name] = {"dtype": KINDS[source.dtype], "shape": list(parameter.shape), "data_offsets": [start, end]}
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)  # the data stays aligned
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for name in entries:
            file.write(source.tensors.tensor(name).contiguous().view(torch.uint8).numpy().data)
