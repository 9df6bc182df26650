"""The forward pass equals transformers in float32: prefill, chunks, batches, decode; every shape of the rig."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from driving import Driver

from minipaged.model.weights import load_folder
from minipaged.ops.backend import Backend
from minipaged.ops.registry import available_backends, get_backend
from minipaged.ops.torch.backend import TorchBackend
from tiny import clear_positions, hf_logits, load_hf, make_tiny_folder, random_tokens

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
SHAPES: dict[str, dict[str, Any]] = {
    "gqa1": {"num_key_value_heads": 4},
    "gqa2": {},
    "gqa4": {"num_attention_heads": 8, "num_key_value_heads": 2},
    "gqa8": {"num_attention_heads": 8, "num_key_value_heads": 1},
    "untied": {"tie_word_embeddings": False},
    "bias": {"attention_bias": True},
    "untied-bias-gqa4": {"tie_word_embeddings": False, "attention_bias": True, "num_key_value_heads": 1},
    "yarn": {"rope_parameters": YARN},
    "theta-1e6": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "head-dim-16": {"head_dim": 16},  # here heads * head_dim == hidden_size
    "head-dim-64": {"head_dim": 64},
    "head-dim-80": {"head_dim": 80},
    "head-dim-128": {"head_dim": 128},
}
# The reference back end loops over tokens in Python: one block size is enough for it here.
RUNS = (("torch", 1), ("torch", 3), ("torch", 4), ("torch", 16), ("reference", 3))
TOLERANCE = 1e-4


@pytest.fixture(params=["torch", "reference"])
def backend(request: pytest.FixtureRequest) -> Backend:
    return get_backend(request.param)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    """Each shape's folder and transformers' model, made once."""
    made = {}
    for name, overrides in SHAPES.items():
        folder = make_tiny_folder(tmp_path_factory.mktemp(name), **overrides)
        made[name] = (folder, load_hf(folder))
    return made


def error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    assert ours.shape == theirs.shape
    assert torch.isfinite(ours).all()
    return float((ours - theirs).abs().max())


@pytest.mark.parametrize(("backend", "block_size"), RUNS, indirect=["backend"])
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_equal_hugging_face(
    folders: dict[str, tuple[Path, Any]], backend: Backend, shape: str, block_size: int
) -> None:
    """C19, C22, C26, C27: one-shot prefill, the same prompt in chunks beside another sequence, and decode, against
    uncached HF.
    """
    folder, oracle = folders[shape]
    model = load_folder(folder, backend, progress=False)
    driver = Driver(model, block_size)
    first, second = random_tokens(35, seed=1), random_tokens(53, seed=2)
    prompt, other = first[:23], second[:41]
    expected = hf_logits(oracle, first)
    expected_other = hf_logits(oracle, second)
    assert error(driver.step({0: prompt}), expected[:23]) < TOLERANCE

    # Sequence 1 is the same prompt in growing chunks; sequence 2 shares one of those steps.
    start, chunked = 0, []
    for size in (1, 2, 3, 4, 5, 7, 1):
        pieces: dict[int, list[int]] = {1: prompt[start : start + size]}
        if size == 5:
            pieces[2] = other
        chunked.append(driver.step(pieces)[:size])
        start += size
    assert start == len(prompt)
    assert error(torch.cat(chunked), expected[:23]) < TOLERANCE

    # All three decode together, each from its own length.
    compared = 0
    for i in range(12):
        logits = driver.step({0: [first[23 + i]], 1: [first[23 + i]], 2: [second[41 + i]]})
        theirs = torch.stack([expected[23 + i], expected[23 + i], expected_other[41 + i]])
        assert error(logits, theirs) < TOLERANCE
        clear = clear_positions(theirs)
        assert torch.equal(logits.argmax(-1)[clear], theirs.argmax(-1)[clear])
        compared += int(clear.sum())
    assert compared >= 30  # of 36: a margin below 1e-3 is rare


def test_greedy_text_equals_generate(folders: dict[str, tuple[Path, Any]], backend: Backend) -> None:
    """The tokens we choose ourselves are those of transformers' cached generate."""
    folder, oracle = folders["gqa2"]
    driver = Driver(load_folder(folder, backend, progress=False), 4)
    prompt = random_tokens(9, seed=5)
    theirs = oracle.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False, eos_token_id=None)[0].tolist()
    ours, piece = list(prompt), prompt
    for _ in range(40):
        piece = [int(driver.step({0: piece})[-1].argmax())]
        ours += piece
    assert ours == theirs
    assert int(clear_positions(hf_logits(oracle, theirs)).sum()) >= 45


def test_only_wanted_rows_go_through_the_head(folders: dict[str, tuple[Path, Any]], backend: Backend) -> None:
    folder, oracle = folders["untied"]
    prompt = random_tokens(11, seed=3)
    model = load_folder(folder, backend, progress=False)
    every = Driver(model, 4).step({0: prompt})
    rows_through_head = []
    linear = backend.linear

    def counting(x: torch.Tensor, w: Any, **kwargs: Any) -> torch.Tensor:
        if w is model.head:
            rows_through_head.append(x.shape[0])
        return linear(x, w, **kwargs)

    backend.linear = counting  # type: ignore[method-assign]
    some = Driver(model, 4).step({0: prompt}, rows=[10, 3])
    none = Driver(model, 4).step({0: prompt}, rows=[])
    assert rows_through_head == [2]
    assert none.shape == (0, 320)
    assert error(some, every[[10, 3]]) < 1e-5
    assert error(some, hf_logits(oracle, prompt)[[10, 3]]) < TOLERANCE


def test_buffers_are_reused_and_grow(folders: dict[str, tuple[Path, Any]], backend: Backend) -> None:
    """A second decode step allocates no new buffers; a larger step after smaller ones is still right."""
    folder, oracle = folders["gqa4"]
    model = load_folder(folder, backend, progress=False, max_tokens=4)
    driver = Driver(model, 4)
    tokens = random_tokens(70, seed=4)
    addresses = set()
    for token in tokens[:3]:
        driver.step({0: [token]})
        addresses.add((model._buffers.views(1).hidden.data_ptr(), model._buffers.logits(1).data_ptr()))
    assert len(addresses) == 1
    logits = driver.step({0: tokens[3:]})
    assert error(logits, hf_logits(oracle, tokens)[3:]) < TOLERANCE


@pytest.mark.parametrize("padding", [64, 192])
def test_padded_rows_change_nothing(folders: dict[str, tuple[Path, Any]], padding: int) -> None:
    """A back end may ask for padded activation rows: every buffer is then a strided view."""
    folder, oracle = folders["head-dim-128"]  # query rows of 4 * 128 floats: a stride of 2048 bytes; qkv: 4096

    class Padded(TorchBackend):
        row_padding_bytes = padding

    model = load_folder(folder, Padded(), progress=False)
    assert model._buffers.views(2).qkv.stride(0) == 1024 + padding // 4
    prompt = random_tokens(30, seed=6)
    assert error(Driver(model, 4).step({0: prompt}), hf_logits(oracle, prompt)) < TOLERANCE


def test_yarn_beyond_its_original_context(folders: dict[str, tuple[Path, Any]], backend: Backend) -> None:
    """YaRN at positions far past `original_max_position_embeddings`, where interpolated frequencies differ most."""
    folder, oracle = folders["yarn"]
    model = load_folder(folder, backend, progress=False)
    tokens = random_tokens(200, seed=7)
    assert error(Driver(model, 16).step({0: tokens}), hf_logits(oracle, tokens)) < TOLERANCE


@pytest.mark.parametrize("shape", ["gqa2", "untied-bias-gqa4"])
def test_bf16_is_as_close_as_hugging_face_bf16(
    folders: dict[str, tuple[Path, Any]], backend: Backend, tmp_path: Path, shape: str
) -> None:
    """bf16 errs no more than 1.5 times as much as transformers' bf16 does, both against float32 on the same rounded
    weights.
    """
    folder = make_tiny_folder(tmp_path, dtype=torch.bfloat16, **SHAPES[shape])
    model = load_folder(folder, backend, dtype="bfloat16", progress=False)
    assert model.activation_dtype == torch.bfloat16
    prompt = random_tokens(60, seed=8)
    exact = hf_logits(load_hf(folder), prompt)
    theirs = (hf_logits(load_hf(folder, torch.bfloat16), prompt) - exact).square().mean().sqrt()
    ours = (Driver(model, 4).step({0: prompt}) - exact).square().mean().sqrt()
    assert 0 < ours <= 1.5 * theirs


def test_bf16_checkpoint_in_float32_equals_hugging_face(backend: Backend, tmp_path: Path) -> None:
    """C53: what "auto" does on a CPU without bf16 instructions."""
    folder = make_tiny_folder(tmp_path, dtype=torch.bfloat16)
    model = load_folder(folder, backend, dtype="float32", progress=False)
    prompt = random_tokens(40, seed=9)
    assert error(Driver(model, 4).step({0: prompt}), hf_logits(load_hf(folder), prompt)) < TOLERANCE


@pytest.mark.parametrize("name", [n for n in ("reference", "torch", "cpu") if available_backends()[n] is None])
@pytest.mark.parametrize(
    ("activations", "kv", "allowed"), [("float32", torch.bfloat16, 0.1), ("bfloat16", torch.float32, 0.4)]
)
def test_kv_of_another_type(
    folders: dict[str, tuple[Path, Any]], name: str, activations: str, kv: torch.dtype, allowed: float
) -> None:
    """K/V is rounded to its own type and nothing else is, by every back end alike."""
    folder, oracle = folders["gqa2"]
    model = load_folder(folder, get_backend(name), dtype=activations, progress=False)
    assert (model.weight_form, str(model.activation_dtype)) == (activations, f"torch.{activations}")
    prompt = random_tokens(40, seed=11)
    driver = Driver(model, 4, kv_dtype=kv)
    logits = torch.cat([driver.step({0: prompt[:25]}), driver.step({0: prompt[25:39]}), driver.step({0: prompt[39:]})])
    assert {cache.dtype for cache in driver.caches} == {kv}
    assert logits.dtype == torch.float32
    same = Driver(load_folder(folder, get_backend("reference"), dtype=activations, progress=False), 4, kv_dtype=kv)
    assert error(logits, same.step({0: prompt})) < (1e-2 if activations == "float32" else allowed)
    assert error(logits, hf_logits(oracle, prompt)) < allowed
    if activations == "float32":  # the K/V of the whole prompt, read back, is what float32 gives, rounded once
        exact = Driver(model, 4)
        exact.step({0: prompt})
        for ours, wide in zip(driver.caches, exact.caches, strict=True):
            for rounded, value in zip(ours.gather(driver.tables[0], 40), wide.gather(exact.tables[0], 40), strict=True):
                assert rounded.dtype == torch.bfloat16
                assert error(rounded.float(), value) < 0.05
        assert error(logits, exact.step({1: prompt})) > 1e-4
