"""Writes the random-weight Qwen3-0.6B (bf16) that every engine runs, with a tokenizer of the right size. Usage:
make_models.py FOLDER

Speed does not depend on the values of weights; nothing is downloaded.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

VOCAB_SIZE = 151936
SPECIAL = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "additional_special_tokens": ["<|im_start|>"]}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE whose merges are all pairs, then triples, until the vocabulary is full."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = list(itertools.product(alphabet, alphabet))
    triples = ((a + b, c) for (a, b), c in itertools.product(pairs, alphabet))
    vocab = {symbol: index for index, symbol in enumerate(alphabet)}
    merges = []
    for left, right in itertools.chain(pairs, triples):
        if len(vocab) == VOCAB_SIZE - 3:  # the special tokens
            break
        if left + right not in vocab:
            vocab[left + right] = len(vocab)
            merges.append((left, right))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.add_special_tokens(SPECIAL)
    fast.chat_template = TEMPLATE
    return fast


def main(folder: Path) -> None:
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        dtype=torch.bfloat16,
    )
    tokenizer.save_pretrained(folder)
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
