"""`Checkpoint`: a folder of safetensors files, single or sharded, checked before any weight is read.

Nothing is loaded twice or kept: `tensor` maps the file for one tensor, and the mapping goes when that tensor does. (A
mapping of a whole shard would count as resident for as long as any of its tensors is used.)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from minipaged.errors import CheckpointError
from minipaged.model.config import ModelConfig, read_json
from minipaged.model.parameters import HEAD, Parameter, parameters

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
FLOATS = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
BASE_MODEL_NAMES = ("embed_tokens.", "layers.", "norm.")
"""How names begin in a checkpoint of the model without its head, as embedding models are saved."""
SHOWN = 8  # names listed in a message before "and N more"


class Checkpoint:
    """The tensors of a Hugging Face folder, by name. Reads headers only, until `tensor` is called.

    CheckpointError, which names files and tensors: no safetensors, a missing or damaged file, an index that disagrees
    with its shards, a tensor that occurs twice.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._types: dict[str, str] = {}
        self._files: dict[str, Path] = {}
        self._stored: dict[str, str] = {}  # the name in the file, where it differs
        self._unlisted: list[str] = []  # by the index
        self._opened: tuple[Path, Any] | None = None  # the file read last: opening it for every tensor takes 0.2 s
        weight_map = self._find_files()
        for path in self._paths:
            self._read_header(path)
        if weight_map is not None:
            self._compare_with_index(weight_map)

    @property
    def dtype(self) -> torch.dtype:
        """Of the embedding or, without one, of the first tensor: bfloat16, float16 or float32."""
        kind = self._types.get("model.embed_tokens.weight") or next(iter(self._types.values()), "F32")
        return FLOATS.get(kind, torch.float32)

    def tensor(self, name: str) -> Tensor:
        """The tensor as a view of its file: copy what is to be kept. KeyError for an unknown name."""
        path = self._files[name]
        if self._opened is None or self._opened[0] != path:
            self._opened = path, _open(path)
        tensor: Tensor = self._opened[1].get_tensor(self._stored.get(name, name))
        return tensor

    def check(self, config: ModelConfig) -> None:
        """Compare names, shapes and types with what `config` needs.

        CheckpointError that lists everything missing, unexpected, wrongly shaped or not a float at once. Buffers that
        are computed (`rotary_emb.inv_freq`) and the copy of a tied head are ignored. A bias that the config says is
        not there counts as unexpected: leaving it out would change the text in silence.
        """
        if config.num_hidden_layers > len(self.shapes):  # before their names are made: there may be any number of them
            raise CheckpointError(
                f"{self.folder} does not match its config.json: num_hidden_layers is {config.num_hidden_layers}, "
                f"and there are only {len(self.shapes)} tensors"
            )
        wanted = parameters(config)
        missing = [name for name in wanted if name not in self.shapes]
        unexpected = [name for name in self.shapes if name not in wanted and not _ignored(name, config)]
        shapes = [_shape_problem(want, self.shapes[name]) for name, want in wanted.items() if name in self.shapes]
        wrong = [problem for problem in shapes if problem]
        types = [f"{name} ({self._types[name]})" for name in wanted if self._types.get(name, "F32") not in FLOATS]
        unlisted = [f"{n} ({self._files[n].name})" for n in self._unlisted if not _ignored(n, config)]
        problems = [
            f"{what}: {_listing(names)}"
            for what, names in (
                ("missing tensors", missing),
                ("unexpected tensors", unexpected),
                ("wrong shapes", wrong),
                (f"tensors without an entry in {INDEX_FILE}", unlisted),
                ("unsupported types (bf16, fp16 and fp32 are supported)", types),
            )
            if names
        ]
        if problems:
            hint = ""
            if any(name.endswith(".bias") for name in missing + unexpected):
                hint = f" (config.json has attention_bias {str(config.attention_bias).lower()})"
            raise CheckpointError(f"{self.folder} does not match its config.json: {'; '.join(problems)}{hint}")

    def _find_files(self) -> dict[str, str] | None:
        """Set `_paths`, and return the index's weight map if there is an index. A single file wins over an index, as
        in transformers.
        """
        single, index = self.folder / SINGLE_FILE, self.folder / INDEX_FILE
        if single.is_file():
            self._paths = [single]
            return None
        if index.is_file():
            weight_map = read_json(index).get("weight_map")
            if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
                raise CheckpointError(f"{index} has no 'weight_map' from tensor names to file names")
            self._paths = [self.folder / shard for shard in sorted(set(weight_map.values()))]
            absent = [path.name for path in self._paths if not path.is_file()]
            if absent:
                raise CheckpointError(f"{self.folder} lacks files that {INDEX_FILE} names: {_listing(absent)}")
            return weight_map
        for path in (single, index):
            if path.exists() or path.is_symlink():
                raise CheckpointError(f"{path} is not a file" + " but a broken link" * (not path.exists()))
        others = sorted(path.name for path in self.folder.glob("*.safetensors"))
        if others:
            raise CheckpointError(f"{self.folder} has {_listing(others)} but neither {SINGLE_FILE} nor {INDEX_FILE}")
        pickled = sorted(
            path.name for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf") for path in self.folder.glob(pattern)
        )
        found = f" (found {_listing(pickled)}; only safetensors are read)" if pickled else ""
        raise CheckpointError(f"{self.folder} has no weights: neither {SINGLE_FILE} nor {INDEX_FILE}{found}")

    def _read_header(self, path: Path) -> None:
        with _open(path) as file:
            for stored in file.keys():  # noqa: SIM118 - not a dict
                name = stored
                if stored.startswith(BASE_MODEL_NAMES):
                    name = f"model.{stored}"
                    self._stored[name] = stored
                if name in self._files:
                    raise CheckpointError(
                        f"tensor {name} is in both {self._files[name].name} and {path.name} of {self.folder}"
                    )
                part = file.get_slice(stored)
                self._files[name] = path
                self.shapes[name] = tuple(part.get_shape())
                self._types[name] = part.get_dtype()

    def _compare_with_index(self, weight_map: Mapping[str, str]) -> None:
        actual = {self._stored.get(name, name): path for name, path in self._files.items()}
        absent = [f"{name} ({shard})" for name, shard in weight_map.items() if actual.get(name) != self.folder / shard]
        if absent:
            raise CheckpointError(
                f"{self.folder}: {INDEX_FILE} lists tensors that are not in the named file: {_listing(absent)}"
            )
        self._unlisted = [name for name in self._files if self._stored.get(name, name) not in weight_map]


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        size = path.stat().st_size if path.is_file() else 0
        raise CheckpointError(f"{path} ({size} bytes) is damaged or incomplete: {error}") from error


def _ignored(name: str, config: ModelConfig) -> bool:
    return name.endswith("rotary_emb.inv_freq") or (name == HEAD and config.tie_word_embeddings)


def _shape_problem(want: Parameter, found: tuple[int, ...]) -> str | None:
    return None if found == want.shape else f"{want.name} is {list(found)}, config.json needs {list(want.shape)}"


def _listing(names: Iterable[str]) -> str:
    listed = list(names)
    rest = f" and {len(listed) - SHOWN} more" if len(listed) > SHOWN else ""
    return ", ".join(listed[:SHOWN]) + rest
