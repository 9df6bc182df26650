"""Safetensors folders, whole and damaged: what loads, and what each error names."""

from __future__ import annotations

import json
import os
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from driving import Driver
from safetensors.torch import load_file, save_file

from minipaged.errors import CheckpointError
from minipaged.model.checkpoint import INDEX_FILE, SINGLE_FILE, Checkpoint
from minipaged.model.config import ModelConfig
from minipaged.model.qwen3 import Qwen3Model
from minipaged.model.weights import load_folder, load_model
from minipaged.ops.backend import Backend, PackedLinear
from minipaged.ops.reference import ReferenceBackend
from minipaged.ops.torch.backend import TorchBackend
from minipaged.ops.torch.linear import TorchWeight
from tiny import edit_json, hf_logits, load_hf, make_tiny_folder, random_tokens

Q_BIAS = "model.layers.1.self_attn.q_proj.bias"


def load(folder: Path) -> Qwen3Model:
    return load_folder(folder, TorchBackend(), dtype="float32", progress=False)


def edit_tensors(folder: Path, changes: dict[str, torch.Tensor | None]) -> None:
    """Replace, add or (None) remove tensors of a single-file folder."""
    tensors = {**load_file(folder / SINGLE_FILE), **changes}
    save_file({name: t for name, t in tensors.items() if t is not None}, folder / SINGLE_FILE)


def assert_equals_hf(folder: Path, reference: Path | None = None) -> None:
    """Logits of our model in `folder` against transformers' in `reference` (default: the same folder)."""
    prompt = random_tokens(12)
    ours = Driver(load(folder), 4).step({0: prompt})
    assert float((ours - hf_logits(load_hf(reference or folder), prompt)).abs().max()) < 1e-4


def sharded(tmp_path: Path, **overrides: Any) -> Path:
    folder = make_tiny_folder(tmp_path, max_shard_size="100KB", **overrides)
    assert len(list(folder.glob("model-*-of-*.safetensors"))) >= 3
    assert not (folder / SINGLE_FILE).exists()
    return folder


def test_sharded_folder_equals_hugging_face(tmp_path: Path) -> None:
    assert_equals_hf(sharded(tmp_path))


def test_missing_shard_is_named(tmp_path: Path) -> None:
    folder = sharded(tmp_path)
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    (folder / shards[0]).unlink()
    (folder / shards[2]).unlink()
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    assert shards[0] in str(caught.value)
    assert shards[2] in str(caught.value)
    assert shards[1] not in str(caught.value)


def test_missing_index_is_named(tmp_path: Path) -> None:
    folder = sharded(tmp_path)
    (folder / INDEX_FILE).unlink()
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        load(folder)


def test_missing_index_entry_is_named(tmp_path: Path) -> None:
    folder = sharded(tmp_path)
    index = json.loads((folder / INDEX_FILE).read_text())
    del index["weight_map"]["model.layers.0.self_attn.q_norm.weight"]
    (folder / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"without an entry .*model\.layers\.0\.self_attn\.q_norm\.weight"):
        load(folder)


def test_index_entry_without_tensor_is_named(tmp_path: Path) -> None:
    folder = sharded(tmp_path)
    index = json.loads((folder / INDEX_FILE).read_text())
    shard = index["weight_map"]["model.norm.weight"]
    tensors = load_file(folder / shard)
    del tensors["model.norm.weight"]
    save_file(tensors, folder / shard)
    with pytest.raises(CheckpointError, match=rf"model\.norm\.weight \({shard}\)"):
        load(folder)


@pytest.mark.parametrize("weight_map", [None, [], {"model.norm.weight": 3}])
def test_index_without_map_is_named(tmp_path: Path, weight_map: Any) -> None:
    folder = sharded(tmp_path)
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match="weight_map"):
        load(folder)


def test_tensor_in_two_shards_is_named(tmp_path: Path) -> None:
    folder = sharded(tmp_path)
    index = json.loads((folder / INDEX_FILE).read_text())["weight_map"]
    other = next(shard for shard in sorted(set(index.values())) if shard != index["model.norm.weight"])
    tensors = load_file(folder / other)
    save_file({**tensors, "model.norm.weight": torch.ones(64)}, folder / other)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is in both"):
        load(folder)


@pytest.mark.parametrize("size", [0, 5, 1000, -1])
def test_truncated_file_is_named(tmp_path: Path, size: int) -> None:
    """-1: the last byte is missing, as after an interrupted download."""
    folder = make_tiny_folder(tmp_path)
    path = folder / SINGLE_FILE
    os.truncate(path, size if size >= 0 else path.stat().st_size + size)
    with pytest.raises(CheckpointError, match=r"model\.safetensors .* is damaged or incomplete"):
        load(folder)


def test_every_missing_unexpected_and_misshapen_tensor_is_named(tmp_path: Path) -> None:
    """C30: all of them in one message, with the shapes."""
    folder = make_tiny_folder(tmp_path)
    changes = {
        "model.layers.0.mlp.up_proj.weight": None,
        "model.layers.1.self_attn.k_norm.weight": None,
        "model.layers.2.mlp.up_proj.weight": torch.zeros(96, 64),
        "model.norm.weight": torch.zeros(63),
        "model.layers.0.self_attn.o_proj.weight": torch.zeros(128, 64),
    }
    edit_tensors(folder, changes)
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    for name in changes:
        assert name in str(caught.value)
    assert "[128, 64], config.json needs [64, 128]" in str(caught.value)


def test_long_lists_are_cut(tmp_path: Path) -> None:
    folder = make_tiny_folder(tmp_path, edit_config={"num_hidden_layers": 4, "layer_types": None})
    with pytest.raises(CheckpointError, match=r"model\.layers\.2\..* and 14 more"):
        load(folder)


@pytest.mark.parametrize("layers", [25, 10**6, 10**15])
def test_more_layers_than_tensors_are_refused_before_any_name_is_made(
    tmp_path: Path, layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_tiny_folder(tmp_path, edit_config={"num_hidden_layers": layers, "layer_types": None})
    monkeypatch.setattr("minipaged.model.checkpoint.parameters", None)
    with pytest.raises(CheckpointError, match=rf"num_hidden_layers is {layers}, and there are only 24 tensors"):
        load(folder)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("present", [True, False])
def test_output_head(tmp_path: Path, tied: bool, present: bool) -> None:
    """C29: tied uses the embedding, even beside a different lm_head; untied without lm_head is an error."""
    folder = make_tiny_folder(tmp_path, tie_word_embeddings=tied)
    torch.manual_seed(3)
    head = torch.randn(320, 64) * 0.3
    edit_tensors(folder, {"lm_head.weight": head if present else None})
    if not tied and not present:
        with pytest.raises(CheckpointError, match=r"missing tensors: lm_head\.weight"):
            load(folder)
        return
    model, prompt = load(folder), random_tokens(12)
    logits = Driver(model, 4).step({0: prompt})
    oracle = load_hf(folder)
    embedding = oracle.model.embed_tokens.weight
    with torch.no_grad():
        hidden = oracle.model(torch.tensor([prompt])).last_hidden_state[0]
        expected = hidden @ (embedding if tied else head).T
    assert float((logits - expected).abs().max()) < 1e-4
    assert (model.head is model.embedding) == tied


def test_attention_bias(tmp_path: Path) -> None:
    """C30: biases are used; left-over ones and a missing one are errors that name the tensor and the switch."""
    folder = make_tiny_folder(tmp_path, attention_bias=True)
    assert_equals_hf(folder)

    edit_json(folder / "config.json", {"attention_bias": False})
    with pytest.raises(CheckpointError, match=r"unexpected tensors: .*\.bias.*attention_bias false") as caught:
        load(folder)
    assert "model.layers.0.self_attn.k_proj.bias" in str(caught.value)

    edit_json(folder / "config.json", {"attention_bias": True})
    edit_tensors(folder, {Q_BIAS: None})
    with pytest.raises(CheckpointError, match=rf"missing tensors: {Q_BIAS} .*attention_bias true"):
        load(folder)


def test_computed_buffers_are_ignored(tmp_path: Path) -> None:
    folder = make_tiny_folder(tmp_path)
    edit_tensors(
        folder,
        {
            "model.rotary_emb.inv_freq": torch.zeros(16),
            "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(16),
        },
    )
    assert_equals_hf(folder)


def test_integer_weights_are_refused(tmp_path: Path) -> None:
    folder = make_tiny_folder(tmp_path)
    edit_tensors(folder, {"model.norm.weight": torch.ones(64, dtype=torch.int8)})
    with pytest.raises(CheckpointError, match=r"unsupported types .*model\.norm\.weight \(I8\)"):
        load(folder)


def test_weights_in_other_formats_are_pointed_out(tmp_path: Path) -> None:
    folder = make_tiny_folder(tmp_path)
    (folder / SINGLE_FILE).rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"no weights.*pytorch_model\.bin; only safetensors"):
        load(folder)


def test_dtype_of_a_config_that_states_none_is_the_files(tmp_path: Path) -> None:
    folder = make_tiny_folder(tmp_path, dtype=torch.bfloat16, edit_config={"dtype": None})
    assert ModelConfig.from_folder(folder).dtype is None
    assert Checkpoint(folder).dtype == torch.bfloat16


def test_fp16_checkpoint_runs_in_float32(tmp_path: Path) -> None:
    """C53: auto on a CPU."""
    folder = make_tiny_folder(tmp_path, dtype=torch.float16)
    model = load_folder(folder, TorchBackend(), progress=False)
    assert model.activation_dtype == torch.float32
    assert_equals_hf(folder)


class KeepingBackend(TorchBackend):
    """Keeps the very tensors it is given."""

    copies_weights = False

    def pack_linear(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, gated: bool = False, use: str = "linear"
    ) -> PackedLinear:
        data = TorchWeight(rows=weight, packed=None, bias=bias, dtype=weight.dtype)
        return PackedLinear(weight.shape[1], weight.shape[0], gated, "float32", data)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("make_backend", [TorchBackend, ReferenceBackend, KeepingBackend])
def test_no_weight_depends_on_the_file_after_loading(tmp_path: Path, make_backend: type[Backend], dtype: str) -> None:
    """The mapping is dropped and no buffer is shared: overwriting the file leaves the model as it is."""
    folder = make_tiny_folder(tmp_path, attention_bias=True, dtype=getattr(torch, dtype))
    prompt = random_tokens(12)
    model = load_folder(folder, make_backend(), dtype=dtype, progress=False)
    before = Driver(model, 4).step({0: prompt})
    assert float((before - hf_logits(load_hf(folder, model.activation_dtype), prompt)).abs().max()) < (
        1e-4 if dtype == "float32" else 0.5
    )
    path = folder / SINGLE_FILE
    size = path.stat().st_size
    with path.open("r+b") as file:  # in place: a mapping would see this
        file.write(b"\0" * size)
    assert torch.equal(Driver(model, 4).step({0: prompt}), before)


def test_at_most_one_layer_is_in_memory_beside_the_packed_weights(tmp_path: Path) -> None:
    """Tensors alive while loading: the source hands out one matrix's parts at a time, and nobody holds on to them."""
    folder = make_tiny_folder(tmp_path, num_hidden_layers=6)
    config, checkpoint = ModelConfig.from_folder(folder), Checkpoint(folder)
    handed_out: list[weakref.ref[torch.Tensor]] = []
    alive_at_once = []

    class Watching:
        def tensor(self, name: str) -> torch.Tensor:
            tensor = checkpoint.tensor(name)
            handed_out.append(weakref.ref(tensor))
            alive_at_once.append(sum(reference() is not None for reference in handed_out))
            return tensor

    load_model(config, Watching(), TorchBackend(), activation_dtype=torch.float32, progress=False)
    assert len(handed_out) == len(checkpoint.shapes) == 2 + 6 * 11
    assert max(alive_at_once) == 3  # q, k and v, which are stacked


def test_a_link_to_nowhere_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "gone")
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not a file but a broken link"):
        Checkpoint(tmp_path)


def shard(folder: Path, names: dict[str, list[str]], tensors: dict[str, torch.Tensor], listed: set[str]) -> None:
    """The tensors as shards with an index that lists `listed`; file names may lie in a subfolder."""
    (folder / "model.safetensors").unlink(missing_ok=True)
    for file, members in names.items():
        (folder / file).parent.mkdir(exist_ok=True)
        save_file({name: tensors[name] for name in members}, folder / file, metadata={"format": "pt"})
    weight_map = {name: file for file, members in names.items() for name in members if name in listed}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.mark.parametrize("kind", ["no prefix", "shards in a subfolder", "tied head in a shard", "no head_dim"])
def test_what_transformers_loads_loads_with_the_same_result(kind: str, tmp_path: Path) -> None:
    from driving import Driver

    from tiny import hf_logits, load_hf, make_tiny_folder

    shape = {"head_dim": 128} if kind == "no head_dim" else {}
    folder = make_tiny_folder(tmp_path / "model", **shape)
    tensors = load_file(folder / "model.safetensors")
    if kind == "no prefix":
        renamed = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
        save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
    elif kind == "no head_dim":
        edit_json(folder / "config.json", {"head_dim": None})
    else:
        names = sorted(tensors)
        if kind == "tied head in a shard":
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        where = "weights/" if kind == "shards in a subfolder" else ""
        files = {
            f"{where}a.safetensors": names[:9],
            f"{where}b.safetensors": [*names[9:], *sorted(set(tensors) - set(names))],
        }
        shard(folder, files, tensors, set(names))
    tokens = [5, 90, 17, 210, 4, 8]
    wanted = hf_logits(load_hf(folder), tokens)
    model = load_folder(folder, TorchBackend(), dtype="float32", progress=False)
    assert (Driver(model, 4).step({0: tokens}) - wanted).abs().max() < 1e-4


def test_a_tensor_that_the_index_does_not_list_is_still_refused(tmp_path: Path) -> None:
    folder = make_tiny_folder(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    shard(folder, {"a.safetensors": names}, tensors, set(names[1:]))
    with pytest.raises(CheckpointError, match=rf"without an entry in .*index.json: {names[0]} \(a.safetensors\)"):
        Checkpoint(folder).check(ModelConfig.from_folder(folder))
