"""Grammars for generated text, by llguidance (extra `[guided]`), as `SamplingParams.token_mask`."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from minipaged.server.errors import refused

if TYPE_CHECKING:
    from minipaged.server.protocol import GenerationBody
    from minipaged.text.tokenizer import Tokenizer

TokenMask = Callable[[list[int]], "np.ndarray[Any, Any] | None"]

MAX_CHOICES = 10_000  # the library takes more than linear time for them
TRIAL_TOKENS = 8  # tokens without an alternative that a new grammar is followed over, to see whether it works
MAX_STATES = 64  # per request: at least one for each of its n children, so that none has to start again
JSON_OBJECT = {"type": "object"}


class Guide:
    """Makes token masks for one model. Everything here is slow enough to belong in a worker thread."""

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._eos_token_ids = list(eos_token_ids)

    def mask_for(self, body: GenerationBody, *, thought_is_open: bool) -> TokenMask | None:
        """The mask that `response_format` or a `guided_...` field asks for, None if there is none.

        thought_is_open: the prompt ends inside a thought; what follows it is guided, the thought is not. 400 for a
        grammar that makes no sense, for two at once, and without llguidance.
        """
        wanted = [(name, value) for name, value in _wishes(body).items() if value is not None]
        if not wanted:
            return None
        if len(wanted) > 1:
            raise refused(f"{' and '.join(name for name, _ in wanted)} exclude each other: give one", wanted[0][0])
        name, value = wanted[0]
        if body.ignore_eos or body.min_tokens:
            raise refused(f"{name} excludes ignore_eos and min_tokens: the grammar says where the text ends", name)
        if not self._eos_token_ids:
            raise refused(f"{name} needs a model with an end-of-sequence token", name)
        llguidance = _llguidance(name)
        grammar = _grammar(llguidance, name, value)
        root = llguidance.LLMatcher(self._ll_tokenizer, grammar, log_level=0)
        if root.is_error():
            raise refused(f"{name} cannot be used: {_first_line(root.get_error())}", name)
        try:
            self._try_out(GrammarMask(name, root, self._tokenizer.vocab_size))
        except ValueError as error:
            raise refused(f"{name} cannot be used: {error}", name) from None
        close = self._tokenizer.token_to_id("</think>") if thought_is_open else None
        return GrammarMask(name, root, self._tokenizer.vocab_size, after=close)

    def _try_out(self, mask: GrammarMask) -> None:
        """ValueError if a grammar that could be read fails at its first token, or along the only way there is."""
        token_ids: list[int] = []
        for _ in range(TRIAL_TOKENS):
            allowed = mask(token_ids)
            assert allowed is not None
            only = np.flatnonzero(allowed)
            if len(only) != 1 or only[0] in self._eos_token_ids:
                break
            token_ids.append(int(only[0]))

    @cached_property
    def _ll_tokenizer(self) -> Any:
        import llguidance

        return llguidance.LLTokenizer(
            str(self._tokenizer.folder / "tokenizer.json"),
            n_vocab=self._tokenizer.vocab_size,
            eos_token=self._eos_token_ids,
        )


class GrammarMask:
    """The tokens that a grammar allows after given ones; a function of its argument alone, as `token_mask` demands.

    The parser's state after each sequence of tokens seen lately is kept, so that the next token costs one step and not
    a walk from the beginning.
    """

    def __init__(self, field: str, root: Any, vocab_size: int, *, after: int | None = None) -> None:
        """field: of the body that asked for it. root: an llguidance matcher that has seen nothing; it is only copied.

        vocab_size: length of the masks. after: a token id; nothing is masked until it has come, None = from the start.
        """
        self.field = field
        self.failure: str | None = None  # why the last call raised, which is the grammar's fault and not the engine's
        self._root = root
        self._vocab_size = vocab_size
        self._after = after
        self._states: OrderedDict[tuple[int, ...], Any] = OrderedDict()

    def __call__(self, token_ids: list[int]) -> np.ndarray[Any, Any] | None:
        """bool [vocabulary of the tokenizer]; None = everything. ValueError for tokens that the grammar refuses."""
        if self._after is not None:
            if self._after not in token_ids:
                return None
            token_ids = token_ids[token_ids.index(self._after) + 1 :]
        try:
            return self._allowed(tuple(token_ids))
        except ValueError as error:
            self.failure = str(error)
            raise

    def _allowed(self, token_ids: tuple[int, ...]) -> np.ndarray[Any, Any]:
        matcher = self._at(token_ids)
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        if matcher.is_error():
            reason = _first_line(matcher.get_error())
            raise ValueError(f"the grammar matches no text, or is too large to follow ({reason})")
        allowed = np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)
        if not allowed.any():
            raise ValueError("the grammar allows no token at all here")
        return allowed

    def _at(self, token_ids: tuple[int, ...]) -> Any:
        matcher = self._states.pop(token_ids, None)
        if matcher is None:
            matcher = self._states.pop(token_ids[:-1], None) if token_ids else None
            new = token_ids[-1:]
            if matcher is None:
                matcher, new = self._root.deep_copy(), token_ids
            if new and not matcher.consume_tokens(list(new)):
                raise ValueError(f"the grammar does not allow the tokens so far: {_first_line(matcher.get_error())}")
        self._states[token_ids] = matcher
        if len(self._states) > MAX_STATES:
            self._states.popitem(last=False)
        return matcher


def _wishes(body: GenerationBody) -> dict[str, Any]:
    form = body.response_format
    schema: Any = None
    if form is not None and form.type == "json_object":
        schema = JSON_OBJECT
    elif form is not None and form.type == "json_schema":
        if form.json_schema is None:
            raise refused("response_format of type json_schema needs json_schema", "response_format")
        schema = form.json_schema.schema_
    return {
        "response_format": schema,
        "guided_json": body.guided_json,
        "guided_regex": body.guided_regex,
        "guided_choice": body.guided_choice,
        "guided_grammar": body.guided_grammar,
    }


def asks_for_grammar(body: GenerationBody) -> bool:
    """Whether any field of a body asks for one."""
    return any(value is not None for value in _wishes(body).values())


def _llguidance(name: str) -> Any:
    try:
        import llguidance
    except ImportError:
        raise refused(f"{name} needs llguidance, which is not installed here: pip install '.[guided]'", name) from None
    return llguidance


def _grammar(llguidance: Any, name: str, value: Any) -> str:
    matcher = llguidance.LLMatcher
    if name in ("response_format", "guided_json"):
        schema = value if isinstance(value, str) else json.dumps(value)
        try:
            return str(matcher.grammar_from_json_schema(schema, defaults={"whitespace_flexible": False}))
        except ValueError as error:
            raise refused(f"{name} cannot be used: {_first_line(str(error))}", name) from None
    if name == "guided_regex":
        return str(matcher.grammar_from_regex(value))
    if name == "guided_grammar":
        return str(matcher.grammar_from_lark(value))
    if not value or not all(value):
        raise refused("guided_choice must be a non-empty list of non-empty strings", name)
    if len(value) > MAX_CHOICES:
        raise refused(f"guided_choice must hold at most {MAX_CHOICES} choices, got {len(value)}", name)
    return str(matcher.grammar_from_lark("start: " + " | ".join(json.dumps(choice) for choice in value)))


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0][:300]
