"""Hugging Face's side of the comparison: every intermediate of eager attention, and greedy tokens with margins.

The only file of the package that imports transformers. A model is loaded, asked, and dropped: what stays are
plain tensors, so that only one copy of the weights is in memory at any time.
"""

from __future__ import annotations

import gc
import inspect
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

EMBEDDING_LAYER = -1
"""The layer number under which a trace keeps what comes before the first decoder layer."""


@dataclass(frozen=True, slots=True)
class Trace:
    """What one model computed for some prompts, tokens of all prompts one after the other: T in total.

    `values[layer, name]` is float32 [T, n]; per-head values are flattened to n = heads * head_dim. Layer -1 holds
    `embedding`; layer `num_layers` holds `final_norm`. `hidden_in`, `hidden_mid` and `hidden_out` are the residual
    stream before attention, between attention and MLP, and after the layer.
    """

    prompts: list[list[int]]
    num_layers: int
    values: dict[tuple[int, str], Tensor]
    logits: Tensor  # float32 [T, vocabulary]


@dataclass(frozen=True, slots=True)
class GreedyPath:
    """One prompt and its greedy continuation: tokens [n], the logits each was taken from [n, V], top-1/top-2 margins
    [n]."""

    prompt: list[int]
    tokens: list[int]
    logits: Tensor
    margins: list[float]


@contextmanager
def hf_model(folder: Path, dtype: torch.dtype) -> Iterator[Any]:
    """Hugging Face's model of a folder on the CPU, eager attention, evaluation mode; its memory is given back on
    exit."""
    transformers = _transformers()
    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    with _quiet(transformers):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            str(folder), attn_implementation="eager", **{"dtype" if version >= (4, 56) else "torch_dtype": dtype}
        )
    try:
        with torch.inference_mode():
            yield model.eval()
    finally:
        del model
        gc.collect()


def transformers_version() -> str:
    """The version that judges us."""
    return str(_transformers().__version__)


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ImportError(f"verify compares with Hugging Face: pip install 'transformers>=4.53' ({error})") from error
    return transformers


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Loading bars and advice of transformers would end up between our own lines."""
    logging = transformers.utils.logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def trace(model: Any, prompts: Sequence[Sequence[int]]) -> Trace:
    """Run each prompt alone through Hugging Face and keep what the layers computed."""
    records: defaultdict[tuple[int, str], list[Tensor]] = defaultdict(list)
    logits = []
    with _recording(model, records):
        for prompt in prompts:
            logits.append(model(input_ids=torch.tensor([list(prompt)]), use_cache=False).logits[0].float())
    return Trace(
        prompts=[list(prompt) for prompt in prompts],
        num_layers=len(model.model.layers),
        values={key: torch.cat(parts) for key, parts in records.items()},
        logits=torch.cat(logits),
    )


@contextmanager
def _recording(model: Any, records: dict[tuple[int, str], list[Tensor]]) -> Iterator[None]:
    """Forward hooks on every module that computes something we compare; batch of one, so [1, T, ...] -> [T, n]."""

    def keep(layer: int, name: str, value: Tensor) -> None:
        records[layer, name].append(value.detach()[0].float().reshape(value.shape[1], -1))

    def on_output(layer: int, name: str) -> Callable[[Any, Any, Any], None]:
        return lambda _module, _args, output: keep(layer, name, output[0] if isinstance(output, tuple) else output)

    def on_input(layer: int, name: str) -> Callable[[Any, Any], None]:
        return lambda _module, args: keep(layer, name, args[0])

    layers = model.model.layers
    handles = [
        model.model.embed_tokens.register_forward_hook(on_output(EMBEDDING_LAYER, "embedding")),
        model.model.norm.register_forward_hook(on_output(len(layers), "final_norm")),
    ]
    for index, layer in enumerate(layers):
        attention = layer.self_attn
        outputs = {
            "input_norm": layer.input_layernorm,
            "q_proj": attention.q_proj,
            "k_proj": attention.k_proj,
            "v_proj": attention.v_proj,
            "q_norm": attention.q_norm,
            "k_norm": attention.k_norm,
            "o_proj": attention.o_proj,
            "post_norm": layer.post_attention_layernorm,
            "mlp_down": layer.mlp.down_proj,
            "hidden_out": layer,
        }
        inputs = {
            "hidden_in": layer.input_layernorm,
            "attention": attention.o_proj,
            "hidden_mid": layer.post_attention_layernorm,
            "mlp_gate_up": layer.mlp.down_proj,
        }
        handles += [module.register_forward_hook(on_output(index, name)) for name, module in outputs.items()]
        handles += [module.register_forward_pre_hook(on_input(index, name)) for name, module in inputs.items()]

    # Rotated queries and keys leave no module, but Hugging Face hands them to its eager attention function: listen
    # there.
    modeling: Any = sys.modules[type(layers[0].self_attn).__module__]
    eager = modeling.eager_attention_forward

    def listening(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        keep(module.layer_idx, "q_rope", query.transpose(1, 2))
        keep(module.layer_idx, "k_rope", key.transpose(1, 2))
        return eager(module, query, key, value, *args, **kwargs)

    modeling.eager_attention_forward = listening
    try:
        yield
    finally:
        modeling.eager_attention_forward = eager
        for handle in handles:
            handle.remove()


def greedy(model: Any, prompt: Sequence[int], num_tokens: int) -> GreedyPath:
    """Hugging Face's greedy continuation, one token at a time through its own cache; end-of-text tokens do not stop
    it."""
    from transformers import DynamicCache

    cache = DynamicCache()
    cache_name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    tokens: list[int] = []
    rows: list[Tensor] = []
    step_input = list(prompt)
    for _ in range(num_tokens):
        output = model(input_ids=torch.tensor([step_input]), use_cache=True, **{cache_name: cache})
        rows.append(output.logits[0, -1].float().clone())
        tokens.append(int(rows[-1].argmax()))
        step_input = [tokens[-1]]
    return _path(prompt, tokens, rows)


def follow(model: Any, path: GreedyPath, *, jitter: float = 0.0) -> GreedyPath:
    """The logits at the positions of `path`, its tokens forced, in one pass: of another precision or a shaken model.

    jitter: standard deviation of random numbers added to what each layer hands on, relative to that token's RMS.
    """
    ids = torch.tensor([path.prompt + path.tokens[:-1]])
    with _shaken(model, jitter):
        logits = model(input_ids=ids, use_cache=False).logits[0].float()
    return _path(path.prompt, path.tokens, list(logits[len(path.prompt) - 1 :]))


@contextmanager
def _shaken(model: Any, jitter: float) -> Iterator[None]:
    generator = torch.Generator().manual_seed(0)

    def shake(_module: Any, _args: Any, output: Any) -> Any:
        hidden = output[0] if isinstance(output, tuple) else output
        rms = hidden.pow(2).mean(-1, keepdim=True).sqrt()
        hidden = hidden + jitter * rms * torch.randn(hidden.shape, generator=generator)
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

    handles = [layer.register_forward_hook(shake) for layer in model.model.layers] if jitter else []
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _path(prompt: Sequence[int], tokens: list[int], rows: list[Tensor]) -> GreedyPath:
    logits = torch.stack(rows)
    best = logits.topk(2, dim=-1).values
    return GreedyPath(list(prompt), tokens, logits, (best[:, 0] - best[:, 1]).tolist())
