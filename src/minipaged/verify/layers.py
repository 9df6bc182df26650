"""The layer-by-layer comparison: three ways through the engine, each operation beside Hugging Face's.

The K/V of a few prompts goes through a block manager with a shuffled pool, so that neither block tables nor slots
are in order, and everything that was not written is NaN.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from minipaged.kv import KVBlockManager, PagedKVCache
from minipaged.kv.address import num_logical_blocks
from minipaged.model.qwen3 import Qwen3Model
from minipaged.ops.backend import AttentionBatch
from minipaged.verify.judge import ErrorFigures, OpResult, Path, judge_op, measure
from minipaged.verify.observe import LayerObserver, observed
from minipaged.verify.oracle import Trace

Span = tuple[int, int]


def compare_layers(
    model: Qwen3Model, reference: Trace, *, block_size: int, peer: Trace | None = None, seed: int = 0
) -> tuple[list[OpResult], ErrorFigures]:
    """Every operation of every layer against `reference`, and the error of the logits that the whole model computes.

    "prefill" computes all tokens of all prompts in one step (attention for every query), "chunk" the second half of
    each behind a cached first half, "decode" the last token of each alone (attention for the last query). In float32
    each operation is fed Hugging Face's inputs. With `peer`, Hugging Face's own run in bfloat16, errors add up
    freely on both sides and the bfloat16 rule judges.
    """
    force = peer is None
    pool = _Pool(model, reference.prompts, block_size, seed)
    results: list[OpResult] = []
    spans: dict[Path, list[Span]] = {
        "prefill": [(0, len(prompt)) for prompt in reference.prompts],
        "chunk": [(len(prompt) // 2, len(prompt)) for prompt in reference.prompts],
        "decode": [(len(prompt) - 1, len(prompt)) for prompt in reference.prompts],
    }
    for path, wanted in spans.items():
        batch, tokens = pool.batch(wanted)
        observer = LayerObserver(model, reference, batch, tokens, force=force)
        with observed(model, observer):
            model.forward(pool.token_ids[tokens], model.backend.plan(batch), pool.caches)
        results += [
            judge_op(path, layer, op, figures, tokens.tolist(), _peer_figures(peer, reference, layer, op, tokens))
            for (layer, op), figures in observer.figures.items()
        ]
    batch, tokens = pool.batch(spans["prefill"])
    logits = model.forward(pool.token_ids, model.backend.plan(batch), pool.caches)
    return results, measure(logits, reference.logits)


def _peer_figures(peer: Trace | None, reference: Trace, layer: int, op: str, tokens: Tensor) -> ErrorFigures | None:
    """Hugging Face's bfloat16 error, of these tokens or of all, whichever is larger: two tokens alone are a small
    sample."""
    if peer is None or op == "kv_write":  # a copy is right or wrong in any precision
        return None
    if op == "logits":
        ours, theirs = peer.logits, reference.logits
    else:
        ours, theirs = peer.values[layer, op], reference.values[layer, op]
    return max(measure(ours, theirs), measure(ours[tokens], theirs[tokens]), key=lambda figures: figures.rms)


class _Pool:
    """Caches full of NaN, and prompts that own shuffled blocks of them."""

    def __init__(self, model: Qwen3Model, prompts: Sequence[Sequence[int]], block_size: int, seed: int) -> None:
        config, self._device = model.config, model.device
        # Half of the pool stays unused, and NaN.
        num_blocks = 2 * sum(num_logical_blocks(len(prompt), block_size) for prompt in prompts) + 1
        order = list(range(num_blocks))
        random.Random(seed).shuffle(order)
        self._manager = KVBlockManager(num_blocks, block_size, free_order=order)
        self._starts = [0]
        for index, prompt in enumerate(prompts):
            self._manager.create_sequence(index)
            self._starts.append(self._starts[-1] + len(prompt))
        for position in range(max(map(len, prompts))):  # in turns, so that the tables interleave
            for index, prompt in enumerate(prompts):
                if position < len(prompt):
                    self._manager.append_token(index)
        self.token_ids = torch.tensor([token for prompt in prompts for token in prompt], device=self._device)
        shape = num_blocks, config.num_key_value_heads, block_size, config.head_dim
        self.caches = [PagedKVCache(*shape, dtype=model.activation_dtype, device=self._device) for _ in model.layers]
        for cache in self.caches:
            cache.fill_(float("nan"))

    def batch(self, spans: Sequence[Span]) -> tuple[AttentionBatch, Tensor]:
        """A step that computes positions `start : end` of each prompt, everything before being cached; and which
        tokens of the trace these are."""
        positions = [position for span in spans for position in range(*span)]
        slots = [self._manager.slot_of(i, position) for i, span in enumerate(spans) for position in range(*span)]
        tokens = [self._starts[i] + position for i, span in enumerate(spans) for position in range(*span)]
        counts = [end - start for start, end in spans]
        starts = [0]
        for count in counts:
            starts.append(starts[-1] + count)
        rows = range(len(spans))
        batch = AttentionBatch(
            positions=torch.tensor(positions, device=self._device),
            slot_mapping=torch.tensor(slots, device=self._device),
            block_tables=self._manager.get_block_table_tensor(rows).to(self._device),
            seq_lens=torch.tensor([end for _, end in spans], dtype=torch.int32, device=self._device),
            query_start_loc=torch.tensor(starts, dtype=torch.int32, device=self._device),
            max_query_len=max(counts),
            max_seq_len=max(end for _, end in spans),
        )
        return batch, torch.tensor(tokens)
