"""Tokenizers and sequences for the tests of this folder."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from minipaged.engine.request import Sequence
from minipaged.sampling_params import SamplingParams

# ids: the 256 bytes, then merges, then these; the models' vocabulary goes on without tokens
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
PLAIN_ADDED = ["<think>", "</think>", "naïve token"]
MODEL_VOCAB = 320


def byte_alphabet() -> list[str]:
    """The library's own alphabet, by byte: an oracle for ours. It writes a text's bytes one by one."""
    order = {}
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for point in range(0x800):  # their UTF-8 holds every byte that is valid in a character of one or two bytes
        for byte, character in zip(chr(point).encode(), level.pre_tokenize_str(chr(point))[0][0], strict=True):
            order[byte] = character
    rest = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(order.values()))
    for point in (0x0800, 0x10000, 0x40000, 0x80000, 0xC0000, 0x100000, *range(0x1000, 0x10000, 0x1000)):
        if 0xD800 <= point <= 0xDFFF:
            continue
        for byte, character in zip(chr(point).encode(), level.pre_tokenize_str(chr(point))[0][0], strict=True):
            order[byte] = character
    rest = sorted(set(rest) - set(order.values()))
    missing = [byte for byte in range(256) if byte not in order]  # bytes that UTF-8 never uses
    assert len(rest) == len(missing)
    order.update(zip(missing, rest, strict=True))
    return [order[byte] for byte in range(256)]


def write_byte_level_tokenizer(folder: Path) -> None:
    """256 byte tokens, a few merges (also of parts of characters), special and plain added tokens."""
    alphabet = byte_alphabet()
    vocab = {character: byte for byte, character in enumerate(alphabet)}
    merges = []
    for pair in ("he", "ll", "你"[0], "😀"[0], " t"):
        raw = pair.encode()
        first, second = alphabet[raw[0]], alphabet[raw[1]]
        merges.append((first, second))
        vocab[first + second] = len(vocab)
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in PLAIN_ADDED])
    backend.enable_truncation(8)  # a training setting that must not cut prompts
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "pad_token": {"content": "<|endoftext|>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write_char_tokenizer(folder: Path) -> None:
    """Another kind of decoder: sentencepiece-like pieces with byte fallback."""
    characters = ["▁", *"abcdefgé你", *(f"<0x{byte:02X}>" for byte in range(256)), "▁the", "<s>"]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={c: i for i, c in enumerate(characters)}, merges=[], byte_fallback=True)
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<s>"])
    backend.save(str(folder / "tokenizer.json"))


def sequence(
    params: SamplingParams | None = None,
    prompt: tuple[int, ...] = (1, 2),
    output: tuple[int, ...] = (),
    *,
    sequence_id: int = 0,
    index: int = 0,
    seed: int = 0,
    **fields: object,
) -> Sequence:
    """A sequence with resolved parameters, by default greedy."""
    given = params or SamplingParams(**{"temperature": 0.0, **fields})  # type: ignore[arg-type]
    resolved = given if given.max_tokens is not None else given.resolve(None, 10_000)
    return Sequence(sequence_id, index, [*prompt, *output], len(prompt), resolved, seed)
