"""A model's tokens as llguidance follows grammars with them: by what each one adds to a text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minipaged.text.tokenizer import Tokenizer


class GrammarVocabulary:
    """The ids that the model can write, `vocab_size` of them, each as the bytes that it stands for.

    Control tokens (special ones, and those that end a text) stand for nothing that a grammar could spell: where its
    text reads `<|im_end|>`, these ten characters are written one by one. Added tokens that are not special (`<think>`)
    are text like any other, and written as the one token that the tokenizer has for them where nothing else is
    possible. Ids that only the model or only the tokenizer knows are never written.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """eos_token_ids: at least one, all below vocab_size. ValueError for a tokenizer that is not byte-level, where
        the bytes of a token depend on its neighbours."""
        import llguidance

        if not tokenizer.is_byte_level:
            raise ValueError("grammars need a byte-level tokenizer, as Qwen3's")
        self._tokenizer = tokenizer
        self._control = {i for i in range(vocab_size) if tokenizer.is_special(i)} | set(eos_token_ids)
        # What llguidance.TokenizerWrapper reads.
        self.tokens: Sequence[bytes] = [tokenizer.id_to_bytes(i) for i in range(vocab_size)]
        self.special_token_ids = sorted(self._control)
        self.eos_token_id = eos_token_ids[0]
        self.bos_token_id = None
        self.vocab_size = vocab_size
        self.eos_token_ids = list(eos_token_ids)
        self.ll_tokenizer: Any = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(self), eos_token=list(eos_token_ids)
        )

    def __call__(self, text: str) -> list[int]:
        """The token ids of a text that a grammar leaves no choice about: those that the tokenizer gives, unless they
        do not spell exactly this text (control tokens, normalisation, ids that the model does not have)."""
        token_ids = self._tokenizer.encode(text, add_special_tokens=False)  # for bytes an error, so text is what we get
        if b"".join(map(self._bytes_of, token_ids)) == text.encode():
            return token_ids
        return list(self.ll_tokenizer.greedy_tokenize(text))

    def _bytes_of(self, token_id: int) -> bytes:
        known = token_id < self.vocab_size and token_id not in self._control
        return self.tokens[token_id] if known else b""

    def is_control(self, token: str) -> bool:
        """Whether the token of this name stands for no text."""
        return self._tokenizer.token_to_id(token) in self._control

    def reference(self, token: str) -> str | None:
        """How a Lark grammar names one token, special or not; None if the vocabulary has no token of this name."""
        token_id = self._tokenizer.token_to_id(token)
        return None if token_id is None or token_id >= self.vocab_size else f"<[{token_id}]>"
