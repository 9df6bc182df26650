"""The network, its regularisation, its optimizers, and its loss."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Qwen3Config, Qwen3ForCausalLM

from demo_model.text import CONTEXT, EOT, IGNORE, IM_END, VOCAB_SIZE


def make_config(tokenizer: Tokenizer) -> Qwen3Config:
    """3.3 M parameters. ``head_dim`` is not ``hidden_size / num_attention_heads``, as in most Qwen3."""
    return Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=576,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.token_to_id(IM_END),
        pad_token_id=tokenizer.token_to_id(EOT),
    )


def add_dropout(model: Qwen3ForCausalLM, p: float) -> None:
    """Dropout on the embeddings and on what each block adds to the residual stream.

    Qwen3 has none of its own. Hooks leave the architecture, and hence the saved model, as it is.
    """

    def drop(module: nn.Module, _: Any, output: Tensor) -> Tensor:
        return F.dropout(output, p, module.training)

    for name, module in model.named_modules():
        if name.endswith(("embed_tokens", "o_proj", "down_proj")):
            module.register_forward_hook(drop)


def make_optimizers(model: Qwen3ForCausalLM, learning_rate: float, weight_decay: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the blocks, AdamW for embeddings and norms.

    Muon: K. Jordan et al., 2024, with the step scaled to AdamW's (J. Liu et al., arXiv 2502.16982), so
    that both take the same learning rate.
    """
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    muon = torch.optim.Muon(
        matrices,
        lr=learning_rate,
        weight_decay=weight_decay,
        adjust_lr_fn="match_rms_adamw",
    )
    adamw = torch.optim.AdamW(others, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    return [muon, adamw]


def token_loss(model: Any, inputs: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
    """Cross entropy in nats; ``inputs`` and ``labels`` are ``[batch, tokens]``, already shifted."""
    logits = model(input_ids=inputs, use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction=reduction)


@torch.no_grad()
def evaluate(model: Any, ids: list[int], windows: int | None = None) -> float:
    """Mean loss in nats per token over windows of ``CONTEXT`` tokens side by side (all, or the first few)."""
    model.eval()
    starts = list(range(0, len(ids) - 1, CONTEXT))[:windows]
    total, count = 0.0, 0
    for start in starts:
        chunk = torch.tensor([ids[start : start + CONTEXT + 1]])
        total += token_loss(model, chunk[:, :-1], chunk[:, 1:], "sum").item()
        count += chunk.shape[1] - 1
    model.train()
    return total / count
