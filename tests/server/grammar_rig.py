"""Tokenizers with the added tokens of Qwen3's, and texts written by a model that only follows the mask."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from minipaged.text.tokenizer import Tokenizer

# Qwen3's, in their order (151643 to 151668 there).
CONTROL = [
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>"),
    *("<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>"),
    *("<|image_pad|>", "<|video_pad|>"),
]
PLAIN = [
    *("<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>"),
    *("<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>", "<think>", "</think>"),
]
MERGES = ["th", "in", "thin", "to", "ol", " a", ">\n", '{"', '":', "</", "no", "yes", "ye", "00", "<|"]
CUTS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def write_qwen3_tokenizer(folder: Path, *, tags: str = "added", beyond: Sequence[str] = ()) -> Tokenizer:
    """Byte-level BPE with a few merges, Qwen3's normaliser, cuts and added tokens; then the added tokens `beyond`.

    tags: how `<think>`, `<tool_call>` and their like are written: "added" as in Qwen3's, "special", or "text" (not at
    all).
    """
    byte = {}
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    for i, code in enumerate([*printable, *(code for code in range(256) if code not in printable)]):
        byte[code] = chr(code) if i < len(printable) else chr(256 + i - len(printable))
    vocab = {byte[code]: code for code in range(256)}
    merges = []
    for word in sorted(MERGES, key=len):
        spelt = "".join(byte[code] for code in word.encode())
        cut = next(i for i in range(len(spelt) - 1, 0, -1) if spelt[:i] in vocab and spelt[i:] in vocab)
        merges.append((spelt[:cut], spelt[cut:]))
        vocab[spelt] = len(vocab)
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(CUTS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in CONTROL])
    if tags != "text":
        special = tags == "special"
        add: Callable[[Any], int] = backend.add_special_tokens if special else backend.add_tokens
        add([AddedToken(name, special=special, normalized=False) for name in PLAIN])
    backend.add_tokens([AddedToken(name, special=False, normalized=False) for name in beyond])
    backend.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


def write(mask: Callable[[list[int]], Any], ends: Sequence[int], seed: int, most: int = 400) -> list[int] | None:
    """Token ids of a text, each drawn evenly from those that the mask allows, up to a token of `ends` (which is left
    out). None for a text that is longer than `most` tokens."""
    rng = random.Random(seed)
    token_ids: list[int] = []
    for _ in range(most):
        drawn = int(rng.choice(np.flatnonzero(mask(token_ids))))
        if drawn in ends:
            return token_ids
        token_ids.append(drawn)
    return None
