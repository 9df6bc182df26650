"""`compare_layers`: right back ends pass on every shape, each broken one is found where it is broken, nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from broken_backends import (
    Coarse,
    CorruptWeight,
    NoQueryNorm,
    OneWrongSlot,
    RopeBeforeNorm,
    SkippedDecodeWrite,
    StaleDecode,
    StrayWrite,
    SwappedSlots,
    TiledHeads,
    UpperLeftMask,
)
from verify_sample import PROMPTS

from minipaged.model.weights import load_folder
from minipaged.ops.backend import Backend
from minipaged.ops.forwarding import ForwardingBackend
from minipaged.ops.reference import ReferenceBackend
from minipaged.ops.registry import available_backends, get_backend
from minipaged.ops.torch.backend import TorchBackend
from minipaged.verify.judge import OP_TOLERANCE, Bug, Report
from minipaged.verify.layers import compare_layers
from minipaged.verify.oracle import hf_model, trace
from tiny import make_tiny_folder

EVERY = ("prefill", "chunk", "decode")
RUNS_HERE = [name for name, reason in available_backends("cpu").items() if reason is None]


def report_of(sample: Any, backend: Backend, *, dtype: torch.dtype = torch.float32, block_size: int = 4) -> Report:
    model = load_folder(sample.folder, backend, dtype=dtype, progress=False)
    peer = None if dtype == torch.float32 else sample.peer
    report = Report("tiny", backend.name, str(dtype)[6:], 2, block_size, PROMPTS, {}, {})
    report.ops, report.prompt_logits = compare_layers(model, sample.reference, block_size=block_size, peer=peer)
    return report


def places(bugs: list[Bug]) -> list[tuple[int | None, str | None, tuple[str, ...]]]:
    return [(bug.layer, bug.op, bug.paths) for bug in bugs]


@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("name", RUNS_HERE)
def test_right_back_ends_pass(sample, name, block_size):
    report = report_of(sample, get_backend(name), block_size=block_size)
    assert report.bugs == []
    assert max(result.error for result in report.ops) < OP_TOLERANCE / 10  # room between right and wrong
    assert report.prompt_logits.max_relative < 1e-5


def test_every_operation_of_every_layer_is_compared_on_every_path(sample):
    seen = {(result.path, result.layer, result.op) for result in report_of(sample, TorchBackend()).ops}
    ops = [
        "input_norm",
        "q_proj",
        "k_proj",
        "v_proj",
        "q_norm",
        "k_norm",
        "q_rope",
        "k_rope",
        "kv_write",
        "attention",
        "o_proj",
        "hidden_mid",
    ]
    ops += ["post_norm", "mlp_gate_up", "mlp_down", "hidden_out"]
    expected = {(path, layer, op) for path in EVERY for layer in (0, 1) for op in ops}
    expected |= {(path, *last) for path in EVERY for last in ((-1, "embedding"), (2, "final_norm"), (2, "logits"))}
    assert seen == expected


@pytest.mark.parametrize(
    "overrides",
    [
        {"num_key_value_heads": 4},
        {"num_attention_heads": 8, "num_key_value_heads": 1, "tie_word_embeddings": False},
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
        {"head_dim": 80, "attention_bias": True},
    ],
    ids=["gqa1", "gqa8-untied", "yarn", "head-dim-80-bias"],
)
def test_shapes_pass(tmp_path, overrides):
    folder = make_tiny_folder(tmp_path, **overrides)
    with hf_model(folder, torch.float32) as model:
        reference = trace(model, PROMPTS)
    ours = load_folder(folder, TorchBackend(), dtype=torch.float32, progress=False)
    results, logits = compare_layers(ours, reference, block_size=3)
    assert all(result.passed for result in results)
    assert logits.max_relative < 1e-5


@pytest.mark.parametrize(
    ("broken", "expected", "first"),
    [
        (
            RopeBeforeNorm,
            [(0, "q_rope", EVERY), (0, "k_rope", EVERY), (1, "q_rope", EVERY), (1, "k_rope", EVERY)],
            (0, 1),
        ),
        (NoQueryNorm, [(layer, op, EVERY) for layer in (0, 1) for op in ("q_norm", "q_rope")], (0, 0)),
        (TiledHeads, [(0, "attention", EVERY), (1, "attention", EVERY)], (0, 0)),
        (UpperLeftMask, [(0, "attention", ("chunk",)), (1, "attention", ("chunk",))], (0, 11)),
        (StaleDecode, [(0, "attention", ("decode",)), (1, "attention", ("decode",))], (0, 21)),
        (OneWrongSlot, [(0, "kv_write", ("prefill", "chunk")), (1, "kv_write", ("prefill", "chunk"))], (0, 2)),
        (SwappedSlots, [(0, "kv_write", ("prefill", "chunk")), (1, "kv_write", ("prefill", "chunk"))], (0, 3)),
        (SkippedDecodeWrite, [(0, "kv_write", ("decode",)), (1, "kv_write", ("decode",))], (0, 21)),
        (StrayWrite, [(0, "kv_write", EVERY), (1, "kv_write", EVERY)], (0, 0)),
        (lambda: CorruptWeight(5), [(1, "q_proj", EVERY)], (0, 0)),
        (lambda: CorruptWeight(1, row=3 + 128), [(0, "k_proj", EVERY)], (0, 0)),
        (lambda: CorruptWeight(5, row=3 + 128 + 64), [(1, "v_proj", EVERY)], (0, 0)),
        (lambda: CorruptWeight(6), [(1, "o_proj", EVERY), (1, "hidden_mid", EVERY)], (0, 0)),
        (lambda: CorruptWeight(3), [(0, "mlp_gate_up", EVERY)], (0, 0)),
        (lambda: CorruptWeight(8), [(1, "mlp_down", EVERY), (1, "hidden_out", EVERY)], (0, 0)),
    ],
)
def test_broken_back_ends_are_found_where_they_are_broken(
    sample: Any, broken: Callable[[], Backend], expected: list[Any], first: tuple[int, int]
) -> None:
    """Only the broken operation is named, in each layer that has it, with the paths and first token that show it."""
    bugs = report_of(sample, broken()).bugs
    assert places(bugs) == expected
    assert (bugs[0].prompt, bugs[0].position) == first
    assert f"layer {expected[0][0]}, {expected[0][1]}" in bugs[0].message


def test_a_corrupt_embedding_is_found_where_its_token_occurs(sample):
    """The tied table is the embedding of token 3 and a column of the logits at the same time."""
    bugs = report_of(sample, CorruptWeight(0, row=PROMPTS[1][4])).bugs
    assert places(bugs)[:2] == [(-1, "embedding", ("prefill",)), (2, "logits", EVERY)]
    assert (bugs[0].prompt, bugs[0].position) == (1, 4)


@pytest.mark.parametrize("name", RUNS_HERE)
def test_bfloat16_passes_by_hugging_faces_own_error(sample, name):
    report = report_of(sample, get_backend(name), dtype=torch.bfloat16)
    assert report.bugs == []
    assert max(result.error for result in report.ops) > 1e-3  # it really is bfloat16


@pytest.mark.parametrize(
    ("broken", "op"), [(Coarse, "attention"), (RopeBeforeNorm, "q_rope"), (OneWrongSlot, "kv_write")]
)
def test_bfloat16_finds_what_is_worse_than_rounding(sample, broken, op):
    """Errors add up in bfloat16, so the first failing operation is the one named; a 3 % error hides in no rounding."""
    bugs = report_of(sample, broken(), dtype=torch.bfloat16).bugs
    assert len(bugs) == 1
    assert (bugs[0].layer, bugs[0].op) == (0, op)
    assert "later operations" in bugs[0].message


def test_an_observer_passes_on_everything_a_back_end_can_do():
    public = {name for name, value in vars(Backend).items() if callable(value) and not name.startswith("_")}
    assert public <= set(vars(ForwardingBackend))
    inner = ReferenceBackend()
    proxy = ForwardingBackend(inner)
    for attribute in Backend.__annotations__:
        assert getattr(proxy, attribute) == getattr(inner, attribute)
