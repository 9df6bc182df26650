"""Text to token ids and back, through the `tokenizers` library; what incremental detokenising needs besides."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minipaged.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import tokenizers

SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """A folder's tokenizer.json, with tokenizer_config.json's special tokens. The files are read on first use."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer | None:
        """The folder's tokenizer; None if it has none. CheckpointError if it has one in another form than
        tokenizer.json."""
        folder = Path(folder)
        if (folder / "tokenizer.json").is_file():
            return cls(folder)
        others = [name for name in ("vocab.json", "merges.txt", "tokenizer.model") if (folder / name).is_file()]
        if others:
            raise CheckpointError(
                f"{folder} has {', '.join(others)} but no tokenizer.json: write one with "
                "transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
            )
        return None

    @cached_property
    def config(self) -> dict[str, Any]:
        """tokenizer_config.json, empty if there is none."""
        path = self.folder / "tokenizer_config.json"
        if not path.is_file():
            return {}
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise CheckpointError(f"{path} is not valid JSON: {error}") from error
        if not isinstance(config, dict):
            raise CheckpointError(f"{path} must hold a JSON object, found {type(config).__name__}")
        return config

    @cached_property
    def special_tokens(self) -> dict[str, str]:
        """Named special tokens ("eos_token", ...) of tokenizer_config.json, as chat templates see them."""
        named = {}
        for name in SPECIAL_TOKEN_NAMES:
            value = self.config.get(name)
            content = value.get("content") if isinstance(value, dict) else value
            if isinstance(content, str):
                named[name] = content
        return named

    @cached_property
    def _backend(self) -> tokenizers.Tokenizer:
        import tokenizers

        path = self.folder / "tokenizer.json"
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise CheckpointError(f"{path} cannot be read as a tokenizer: {error}") from error
        backend.no_truncation()  # a saved training setting must not cut or pad prompts
        backend.no_padding()
        listed = self.config.get("added_tokens_decoder") or {}
        for token_id, entry in sorted((int(key), value) for key, value in listed.items()):
            flags = {k: entry[k] for k in ("single_word", "lstrip", "rstrip", "normalized") if k in entry}
            token = tokenizers.AddedToken(entry["content"], **flags, special=bool(entry.get("special")))
            if backend.token_to_id(token.content) is None:
                (backend.add_special_tokens if token.special else backend.add_tokens)([token])
            if backend.token_to_id(token.content) != token_id:
                raise CheckpointError(
                    f"{self.folder}: tokenizer_config.json gives {token.content!r} the id {token_id}, "
                    f"tokenizer.json {backend.token_to_id(token.content)}"
                )
        missing = [content for content in self.special_tokens.values() if backend.token_to_id(content) is None]
        if missing:
            backend.add_special_tokens(missing)
        return backend

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """The tokens that `skip_special_tokens` leaves out of a text."""
        flags = {token_id: token.special for token_id, token in self._backend.get_added_tokens_decoder().items()}
        for token_id, entry in (self.config.get("added_tokens_decoder") or {}).items():
            flags[int(token_id)] = bool(entry.get("special"))  # where both files flag a token, transformers takes this
        return frozenset(token_id for token_id, special in flags.items() if special)

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id. A model's vocabulary is often padded beyond it."""
        return 1 + max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1)

    @cached_property
    def eos_token_id(self) -> int | None:
        """The id of tokenizer_config.json's eos_token. The ids that end a text are the model's, from
        generation_config.json."""
        token = self.special_tokens.get("eos_token")
        return None if token is None else self._backend.token_to_id(token)

    @property
    def end_of_turn(self) -> tuple[int, ...]:
        """What ends a chat's turn beside the model's own end-of-sequence ids, which a fine-tune may not list."""
        return () if self.eos_token_id is None else (self.eos_token_id,)

    @cached_property
    def is_byte_level(self) -> bool:
        """Whether a text is the concatenation of its tokens' bytes, read as UTF-8 (byte-level BPE, as Qwen3's)."""
        from tokenizers import decoders

        return isinstance(self._backend.decoder, decoders.ByteLevel)

    @cached_property
    def _longest_token(self) -> int | None:
        """The most UTF-8 bytes that one token can stand for; None where a token may stand for any number of them, or
        none at all for some."""
        from tokenizers import models, normalizers

        backend = self._backend
        added = backend.get_added_tokens_decoder().values()
        vocab = backend.get_vocab(with_added_tokens=False)
        known = (
            self.is_byte_level
            and isinstance(backend.model, models.BPE)
            and (backend.normalizer is None or isinstance(backend.normalizer, normalizers.NFC))
            and _keeps_every_byte(json.loads(backend.pre_tokenizer.__getstate__()) if backend.pre_tokenizer else {})
            and vocab.keys() >= _BYTE_OF.keys()  # else bytes are dropped
            and not any(token.lstrip or token.rstrip for token in added)  # they swallow blanks
        )
        if not known:
            return None
        return max(*map(len, vocab), *(len(token.content.encode()) for token in added))

    def min_num_tokens(self, text: str) -> int:
        """A number of tokens that `encode(text)` has at least, without tokenising: in constant time, and far below the
        true number for most texts. 0 where this tokenizer gives no bound."""
        if self._longest_token is None:
            return 0
        size = len(text)
        if self._backend.normalizer is not None and not text.isascii():
            size //= 4  # NFC makes one character of at most four (Unicode, annex 15)
        return -(-size // self._longest_token)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; special tokens written in it are recognised.

        add_special_tokens: also what the tokenizer puts around every text (Qwen3: nothing); False for rendered chats.
        ValueError if the text holds a lone surrogate, which is no character.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(
                f"the text holds a lone surrogate, U+{ord(text[error.start]):04X} at index {error.start}, "
                "which is half of a character"
            ) from None
        return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`. Ids that the tokenizer does not know have none; invalid UTF-8 becomes U+FFFD."""
        hidden = self.special_ids if skip_special_tokens else ()
        ids = [token_id for token_id in token_ids if token_id not in hidden]
        return str(self._backend.decode(ids, skip_special_tokens=False))

    def is_special(self, token_id: int) -> bool:
        """Whether `skip_special_tokens` leaves this token out of the text."""
        return token_id in self.special_ids

    def token_to_id(self, token: str) -> int | None:
        """The id of one token as the vocabulary spells it, None if there is none."""
        found = self._backend.token_to_id(token)
        return None if found is None else int(found)

    def id_to_bytes(self, token_id: int) -> bytes:
        """What a token adds to a text, in bytes; b"" for unknown ids. Only byte-level tokenizers give parts of
        characters."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._compute_bytes(token_id)
        return known

    def token_text(self, token_id: int) -> str:
        """A token's text alone, special or not; U+FFFD where it holds a part of a character."""
        return self.id_to_bytes(token_id).decode("utf-8", errors="replace")

    def _compute_bytes(self, token_id: int) -> bytes:
        if not self.is_byte_level:
            return self.decode([token_id], skip_special_tokens=False).encode("utf-8")
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        try:
            return bytes(_BYTE_OF[character] for character in token)
        except KeyError:  # an added token is spelt as it reads
            return str(token).encode("utf-8")


def _keeps_every_byte(pre_tokenizer: dict[str, Any]) -> bool:
    """Whether a pre-tokenizer, as tokenizer.json describes it, only cuts a text."""
    kind = pre_tokenizer.get("type")
    if kind == "Sequence":
        return all(_keeps_every_byte(part) for part in pre_tokenizer["pretokenizers"])
    return kind in ("ByteLevel", "Digits") or (kind == "Split" and pre_tokenizer["behavior"] != "Removed")


def _byte_alphabet() -> dict[str, int]:
    """The characters by which byte-level BPE writes bytes: printable Latin-1 for itself, the others from U+0100 on in
    order (GPT-2)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
