"""The tokenizer wrapper against the library and Hugging Face's fast tokenizer."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_rig import MODEL_VOCAB, byte_alphabet, write_byte_level_tokenizer, write_char_tokenizer
from transformers import PreTrainedTokenizerFast

from minipaged.errors import CheckpointError
from minipaged.text import tokenizer as tokenizer_module
from minipaged.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    write_byte_level_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    loaded = Tokenizer.from_folder(folder)
    assert loaded is not None
    return loaded


@pytest.fixture(scope="module")
def hf(folder: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), eos_token="<|im_end|>", clean_up_tokenization_spaces=False
    )


def test_byte_alphabet_is_the_librarys() -> None:
    assert [tokenizer_module._BYTE_OF[character] for character in byte_alphabet()] == list(range(256))


@settings(max_examples=80, deadline=None)
@given(st.text(max_size=40))
def test_encode_and_decode_equal_hugging_face(tokenizer: Tokenizer, hf: PreTrainedTokenizerFast, text: str) -> None:
    text = f"<|im_start|>{text}<think>the <|im_end|>"
    ids = tokenizer.encode(text)
    assert ids == hf(text)["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=False) == hf.decode(ids) == text
    assert tokenizer.decode(ids) == hf.decode(ids, skip_special_tokens=True) == text[12:-10]


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(0, MODEL_VOCAB - 1), max_size=30))
def test_bytes_of_tokens_concatenate_to_the_text(tokenizer: Tokenizer, ids: list[int]) -> None:
    """Any ids, unknown ones and invalid UTF-8 included."""
    raw = b"".join(tokenizer.id_to_bytes(token_id) for token_id in ids)
    assert raw.decode("utf-8", errors="replace") == tokenizer.decode(ids, skip_special_tokens=False)
    kept = b"".join(tokenizer.id_to_bytes(token_id) for token_id in ids if not tokenizer.is_special(token_id))
    assert kept.decode("utf-8", errors="replace") == tokenizer.decode(ids)


def test_ids_and_names(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 267
    assert tokenizer.eos_token_id == tokenizer.token_to_id("<|im_end|>") == 263
    assert tokenizer.special_tokens == {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    assert [tokenizer.is_special(i) for i in (260, 261, 262, 263, 264, 300)] == [False, True, True, True, False, False]
    assert tokenizer.token_to_id("<|nothing|>") is None
    assert [tokenizer.token_text(i) for i in (0xE4, 256, 263, 266, 300)] == [
        "\ufffd",
        "he",
        "<|im_end|>",
        "naïve token",
        "",
    ]
    assert tokenizer.decode([104, 310, 105, 2**31]) == "hi"
    assert tokenizer.decode(np.array([104, 105])) == "hi"


def test_long_prompts_are_not_truncated(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode("x" * 100)) == 100
    assert tokenizer.encode("") == []


@pytest.mark.parametrize("text", ["\ud83d", "ok \udc00 ok"])
def test_lone_surrogates_are_refused_with_their_place(tokenizer: Tokenizer, text: str) -> None:
    place = next(i for i, c in enumerate(text) if "\ud800" <= c <= "\udfff")
    with pytest.raises(ValueError, match=rf"lone surrogate, U\+[0-9A-F]{{4}} at index {place}"):
        tokenizer.encode(text)
    assert tokenizer.decode(tokenizer.encode("\U0001f600\0")) == "\U0001f600\0"


def test_folders_without_a_tokenizer(tmp_path: Path) -> None:
    assert Tokenizer.from_folder(tmp_path) is None
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"vocab.json but no tokenizer.json"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    broken = Tokenizer.from_folder(tmp_path)
    assert broken is not None
    with pytest.raises(CheckpointError, match=r"tokenizer.json cannot be read"):
        broken.encode("x")
    (tmp_path / "tokenizer_config.json").write_text("[1]")
    with pytest.raises(CheckpointError, match="JSON object"):
        _ = broken.config


def test_tokens_that_only_the_config_lists_are_added_with_their_ids(tmp_path: Path) -> None:
    write_byte_level_tokenizer(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["added_tokens_decoder"] = {
        "268": {"content": "<plain>", "special": False},
        "267": {"content": "<more>", "special": True, "normalized": False},
        "263": {"content": "<|im_end|>", "special": True},
    }
    config["bos_token"] = "<start>"
    path.write_text(json.dumps(config))
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.encode("a<more><plain><start>") == [97, 267, 268, 269]
    assert tokenizer.decode([97, 267, 268, 269]) == "a<plain>"
    config["added_tokens_decoder"] = {"400": {"content": "<more>", "special": True}}
    path.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"'<more>' the id 400, tokenizer.json 267"):
        Tokenizer(tmp_path).encode("a")


def test_other_decoders_are_told_apart(tmp_path: Path) -> None:
    write_char_tokenizer(tmp_path)
    tokenizer = Tokenizer(tmp_path)
    assert not tokenizer.is_byte_level
    assert tokenizer.token_text(5) == "e"
    assert tokenizer.token_text(10_000) == ""


@pytest.mark.parametrize("normalizer", [None, {"type": "NFC"}])
@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=40), composed=st.text("ᾂ각é", max_size=40), specials=st.integers(0, 5))
def test_no_text_has_fewer_tokens_than_its_bound(
    tmp_path_factory: pytest.TempPathFactory, normalizer: object, text: str, composed: str, specials: int
) -> None:
    """Also where the normalizer makes one character of four, and in texts of nothing but the longest token."""
    tokenizer = with_changes(tmp_path_factory.mktemp("bound"), normalizer=normalizer)
    for given_text in (text, unicodedata.normalize("NFD", composed), "<|endoftext|>" * specials):
        assert tokenizer.min_num_tokens(given_text) <= len(tokenizer.encode(given_text))
    assert tokenizer.min_num_tokens("<|endoftext|>" * specials) == specials


@pytest.mark.parametrize(
    "changes",
    [
        {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}]}},
        {"pre_tokenizer": {"type": "Split", "pattern": {"String": "a"}, "behavior": "Removed", "invert": False}},
    ],
)
def test_there_is_no_bound_where_text_can_vanish(tmp_path: Path, changes: dict[str, object]) -> None:
    assert with_changes(tmp_path, **changes).min_num_tokens("x" * 10**6) == 0


def with_changes(folder: Path, **changes: object) -> Tokenizer:
    write_byte_level_tokenizer(folder)
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | changes), encoding="utf-8")
    return Tokenizer(folder)


@pytest.mark.parametrize("flag", [True, False])
def test_where_both_files_flag_a_token_the_config_wins_as_in_transformers(flag: bool, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    write_byte_level_tokenizer(tmp_path)
    ids = {"<think>": 264, "<|im_start|>": 262}
    listed = {str(token_id): {"content": text, "special": flag} for text, token_id in ids.items()}
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config = {**config, "pad_token": "<|endoftext|>", "added_tokens_decoder": listed}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer, oracle = Tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    text = "a<think>b<|im_start|>c<|im_end|>"
    token_ids = tokenizer.encode(text)
    # The oracle, Qwen2Tokenizer, builds its vocabulary anew from such a small file: its ids are its own.
    assert tokenizer.decode(token_ids) == oracle.decode(oracle(text)["input_ids"], skip_special_tokens=True)
    assert tokenizer.decode(token_ids) == ("abc" if flag else "a<think>b<|im_start|>c")
