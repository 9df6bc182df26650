"""A proxy around the back end sees every value inside a layer: `verify` needs no hook in the forward pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from driving import Driver
from torch import Tensor

from minipaged.model.weights import load_folder
from minipaged.ops.backend import PackedLinear
from minipaged.ops.torch.backend import TorchBackend
from tiny import load_hf, make_tiny_folder, random_tokens


class Observer(TorchBackend):
    """Records, per layer, the names that transformers' modules have; computes what fused calls hide a second time."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: list[dict[str, Tensor]] = []

    def linear(self, x: Tensor, w: PackedLinear, **kwargs: Any) -> Tensor:
        is_out = bool(self.layers) and "o_proj" not in self.layers[-1] and kwargs.get("residual") is not None
        if is_out:
            self.layers[-1]["o_proj"] = super().linear(x, w)  # without the residual, before `out` is overwritten
        return super().linear(x, w, **kwargs)

    def qk_norm_rope_write(
        self, qkv: Any, rotary: Any, cache: Any, positions: Any, slot_mapping: Any, **kw: Any
    ) -> Tensor:
        Hkv, D = cache.num_kv_heads, cache.head_dim
        query, key, value = qkv.unflatten(1, (-1, D)).split([qkv.shape[1] // D - 2 * Hkv, Hkv, Hkv], dim=1)
        self.layers.append(
            {
                "q_proj": query.flatten(1).clone(),
                "k_proj": key.flatten(1).clone(),
                "v_proj": value.flatten(1).clone(),
                "q_norm": self.rms_norm(query, rotary.q_norm),
                "k_norm": self.rms_norm(key, rotary.k_norm),
            }
        )
        rotated = super().qk_norm_rope_write(qkv, rotary, cache, positions, slot_mapping, **kw)
        self.layers[-1]["query"] = rotated.clone()
        block, offset = slot_mapping // cache.block_size, slot_mapping % cache.block_size
        self.layers[-1]["key"] = cache.key_cache[block, :, offset].clone()
        return rotated

    def attention(self, query: Tensor, cache: Any, plan: Any, **kwargs: Any) -> Tensor:
        context = super().attention(query, cache, plan, **kwargs)
        self.layers[-1]["context"] = context.flatten(1).clone()
        return context


def test_proxy_sees_what_transformers_computes(tmp_path: Path) -> None:
    """C27: projections, QK-norm, rotated q and k, attention and output projection of every layer."""
    folder = make_tiny_folder(tmp_path, attention_bias=True)
    oracle, observer, prompt = load_hf(folder), Observer(), random_tokens(17)
    theirs: list[dict[str, Tensor]] = [{} for _ in oracle.model.layers]

    def record(layer: int, name: str) -> Any:
        def hook(_module: Any, _inputs: Any, output: Tensor) -> None:
            theirs[layer][name] = output[0]

        return hook

    for index, layer in enumerate(oracle.model.layers):
        for name in ("q_proj", "k_proj", "v_proj", "q_norm", "k_norm", "o_proj"):
            getattr(layer.self_attn, name).register_forward_hook(record(index, name))
        layer.self_attn.o_proj.register_forward_pre_hook(
            lambda _module, inputs, index=index: theirs[index].__setitem__("context", inputs[0][0])
        )
    with torch.no_grad():
        cache = oracle(torch.tensor([prompt]), use_cache=True).past_key_values

    Driver(load_folder(folder, observer, progress=False), 4).step({0: prompt})
    assert len(observer.layers) == len(theirs) == 2
    for index, (ours, expected) in enumerate(zip(observer.layers, theirs, strict=True)):
        expected["key"] = cache.layers[index].keys[0].transpose(0, 1)
        assert set(expected) == set(ours) - {"query"}
        for name, value in expected.items():
            assert float((ours[name] - value).abs().max()) < 1e-4, (index, name)
