"""How often a step waits for the device: once, for its token ids.

The stand-in for a GPU is torch's "meta" device: nothing on it has values, so whatever looks at one raises, and every
copy towards it is seen by a dispatch mode. Kernels are not run, ids are made up; the engine, the model, the sampler and
the buffers are the real ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from minipaged.engine.config import EngineConfig
from minipaged.engine.engine import Engine
from minipaged.kv import KVBlockManager, PagedKVCache
from minipaged.model.config import ModelConfig
from minipaged.model.random_weights import RandomWeights
from minipaged.model.weights import load_model
from minipaged.ops import transfer
from minipaged.ops.triton.backend import TritonBackend
from minipaged.ops.triton.kernels.launch import Launch
from minipaged.runner import input_batch as input_batch_module
from minipaged.runner.graph_runner import GraphRunner
from minipaged.runner.input_batch import InputBatch
from minipaged.runner.warm_up import warm_up
from minipaged.sampling import sampler as sampler_module
from minipaged.sampling.sampler import Sampler
from minipaged.sampling_params import SamplingParams

META = torch.device("meta")
VOCAB = 96
CONFIG = ModelConfig(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=128, rms_norm_eps=1e-6, tie_word_embeddings=True,
    rope_theta=1e6, dtype="float32",
)  # fmt: skip


class Traffic(TorchDispatchMode):
    """Notes every copy to the device that the host would wait for, and every value that leaves it."""

    def __init__(self, pinned: set[int]) -> None:
        super().__init__()
        self._pinned = pinned
        self.uploads = 0
        self.waits: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        tensors = [a for a in args if isinstance(a, Tensor)]
        on_device = [t for t in tensors if t.device == META]
        gives = [r for r in (result if isinstance(result, tuple | list) else [result]) if isinstance(r, Tensor)]
        name = str(func)
        if name.startswith(("aten._to_copy", "aten.to.", "aten.copy_")):
            source = args[1] if name.startswith("aten.copy_") else args[0]
            target = gives[0]
            if source.device != META and target.device == META and source.dim():
                self.uploads += 1
                free = kwargs.get("non_blocking") or (name.startswith("aten.copy_") and args[2:3] == (True,))
                if not free or source.untyped_storage().data_ptr() not in self._pinned:
                    self.waits.append(f"{name} of {tuple(source.shape)} is not pinned, or not asynchronous")
            elif source.device == META and target.device != META:
                self.waits.append(f"{name}: values leave the device")
        elif on_device and (not gives or any(r.device != META for r in gives)) and not name.startswith("prim.device"):
            self.waits.append(name)
        return result


class Constructors(TorchFunctionMode):
    """Sees `torch.tensor(values, device=...)`, whose copy is made below the dispatcher."""

    def __init__(self, waits: list[str]) -> None:
        super().__init__()
        self._waits = waits

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.tensor, torch.as_tensor) and not isinstance(args[0], Tensor) and result.device == META:
            self._waits.append(f"torch.{func.__name__} of values")
        return result


@contextmanager
def traffic_of(device: Device) -> Iterator[Traffic]:
    traffic = Traffic(device.pinned)
    with traffic, Constructors(traffic.waits):
        yield traffic


class NoEvent:
    """torch.cuda.Event where there is no CUDA."""

    def record(self, stream: object) -> None:
        """Nothing to record."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


@dataclass
class Device:
    """What the fixtures count: arrays fetched, and the storages that were pinned."""

    fetched: list[tuple[int, ...]] = field(default_factory=list)
    pinned: set[int] = field(default_factory=set)
    keep: list[Tensor] = field(default_factory=list)
    launched: set[str] = field(default_factory=set)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    seen = Device()

    def pin(tensor: Tensor) -> Tensor:
        copy = tensor.clone()
        seen.keep.append(copy)  # alive, so that its address stays its own
        seen.pinned.add(copy.untyped_storage().data_ptr())
        return copy

    def fetch(tensor: Tensor) -> np.ndarray:
        assert tensor.device == META
        seen.fetched.append(tuple(tensor.shape))
        return np.ones(tensor.shape)

    def run(launch: Launch) -> None:
        tensors = [value for value in launch.arguments.values() if isinstance(value, Tensor)]
        assert all(tensor.device == META for tensor in tensors), launch.kernel
        seen.launched.add(launch.kernel.fn.__name__)

    monkeypatch.setattr(transfer, "pin", pin)
    monkeypatch.setattr(input_batch_module, "pin", pin)
    monkeypatch.setattr(sampler_module, "fetch", fetch)
    monkeypatch.setattr(Launch, "run", run)
    monkeypatch.setattr(torch.cuda, "Event", NoEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    return seen


def make_engine() -> Engine:
    backend = TritonBackend()
    weights = RandomWeights(CONFIG, dtype=torch.float32)
    model = load_model(
        CONFIG,
        weights,
        backend,
        activation_dtype=torch.float32,
        device=META,
        max_model_len=64,
        max_tokens=17,
        progress=False,
    )
    warm_up(model, num_tokens=17, num_seqs=8, block_size=4)
    caches = [PagedKVCache(64, 2, 4, 16, dtype=torch.float32, device=META) for _ in range(2)]
    input_batch = InputBatch(max_tokens=17, max_seqs=8, max_blocks=16, block_size=4, num_slots=256, device=META)
    runner = GraphRunner(
        model,
        backend,
        caches,
        Sampler(VOCAB),
        input_batch,
        max_seqs=8,
        max_model_len=64,
        capture=lambda compute: compute,
    )
    manager = KVBlockManager(64, 4, listener=input_batch.tables.on_event)
    settings = EngineConfig(max_model_len=64, max_num_seqs=8, max_num_batched_tokens=16, vocab_size=VOCAB)
    return Engine(runner, manager, settings)


def only_even(generated: list[int]) -> np.ndarray:
    return np.arange(VOCAB) % 2 == 0


MIXES: dict[str, list[dict[str, Any]]] = {
    "greedy": [{"temperature": 0.0}] * 3,
    "drawn, of different parameters": [{"top_k": 5, "top_p": 0.9}, {"top_k": 0, "top_p": 1.0}, {"min_p": 0.1}],
    "some drawn, some greedy": [{"temperature": 0.0}, {"temperature": 0.7}, {"temperature": 0.0}],
    "siblings with copied blocks": [{"n": 3}, {"temperature": 0.0}],
    "edited logits": [
        {"temperature": 0.0, "repetition_penalty": 1.3}, {"presence_penalty": 0.5, "logit_bias": {3: 1.0}},
        {"token_mask": only_even}, {"min_tokens": 3, "stop_token_ids": [9]}, {},
    ],
}  # fmt: skip


@pytest.mark.parametrize("mix", MIXES)
def test_a_step_waits_once(device: Device, mix: str) -> None:
    """Prefills in chunks, mixed steps, replayed decodes: one fetch of the drawn ids each, every upload asynchronous."""
    engine = make_engine()
    for number, fields in enumerate(MIXES[mix]):
        params = SamplingParams(**{"temperature": 1.0, "max_tokens": 6, "ignore_eos": True, **fields})
        engine.add_request(str(number), list(range(1, 8 + 5 * number)), params)
    steps = drawing_steps = 0
    while engine.has_unfinished():
        before = len(device.fetched)
        with traffic_of(device) as traffic:
            outputs = engine.step()
        assert all(child.error is None for output in outputs for child in output.outputs), outputs
        assert traffic.waits == []
        assert traffic.uploads > 0
        fetches = len(device.fetched) - before
        assert fetches <= 1
        drawing_steps += fetches
        steps += 1
    assert steps >= 6
    assert drawing_steps >= 6
    runner = engine.runner
    assert isinstance(runner, GraphRunner)
    assert runner.num_replays >= 4
    assert {"decode_attention_kernel", "varlen_attention_kernel", "qk_norm_rope_write_kernel"} <= device.launched
    if "siblings" in mix:
        assert "copy_blocks_kernel" in device.launched


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: torch.tensor([1, 2], device=META), lambda x: x.copy_(torch.ones(3)),
        lambda x: torch.ones(3).to(META, non_blocking=True),
    ],
)  # fmt: skip
@pytest.mark.parametrize("inference", [True, False])
def test_the_counter_sees_copies_that_wait(wait: Callable[[Tensor], Any], inference: bool) -> None:
    with torch.inference_mode(inference), traffic_of(Device()) as traffic:
        wait(torch.empty(3, device=META))
    assert len(traffic.waits) == 1, traffic.waits


@pytest.mark.parametrize("look", [lambda x: x[0].item(), lambda x: x.nonzero(), lambda x: bool(x.any()), Tensor.cpu])
def test_the_stand_in_has_no_values(look: Callable[[Tensor], Any]) -> None:
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        look(torch.empty(3, device=META))
