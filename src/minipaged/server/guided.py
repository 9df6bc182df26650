"""Grammars for generated text, by llguidance, as `SamplingParams.token_mask`."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from minipaged.server.constraints import OF_THE_ANSWER, Constraint, constraint_of
from minipaged.server.errors import refused
from minipaged.server.grammar_vocabulary import GrammarVocabulary
from minipaged.server.tool_grammar import tool_grammar

if TYPE_CHECKING:
    from minipaged.server.protocol import GenerationBody
    from minipaged.text.tokenizer import Tokenizer

TokenMask = Callable[[list[int]], "np.ndarray[Any, Any]"]

MAX_CHOICES = 10_000  # the library takes more than linear time for them
TRIAL_TOKENS = 8  # tokens without an alternative that a new grammar is followed over, to see whether it works
MAX_STATES = 64  # per request: at least one for each of its n children, so that none has to start again
CLOSE_THOUGHT = "</think>"


class Guide:
    """Makes token masks for one model. Everything here is slow enough to belong in a worker thread."""

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: Sequence[int], vocab_size: int | None = None) -> None:
        """vocab_size: the number of ids that the model can write, None = as many as the tokenizer knows."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size or tokenizer.vocab_size
        self._eos_token_ids = [token_id for token_id in eos_token_ids if token_id < self._vocab_size]

    def mask_for(
        self,
        body: GenerationBody,
        *,
        thought_is_open: bool,
        tools: Sequence[dict[str, Any]] | None = None,
        parallel: bool = True,
    ) -> TokenMask | None:
        """The mask that the body's constraint asks for, None if there is none.

        thought_is_open: the prompt ends inside a thought; what follows it is guided, the thought is not. tools: may be
        called instead of an answer that follows `response_format`, several times if parallel. 400 for a grammar that
        makes no sense, for two at once, and without llguidance.
        """
        constraint = constraint_of(body)
        if constraint is None:
            return None
        name = constraint.field
        if body.ignore_eos or body.min_tokens:
            raise refused(f"{name} excludes ignore_eos and min_tokens: the grammar says where the text ends", name)

        def write_grammar() -> str:
            grammar = _grammar(_llguidance(name), constraint)
            if not tools or name != OF_THE_ANSWER:
                return grammar
            names = [tool["function"]["name"] for tool in tools]
            calls = tool_grammar(tools, names, parallel=parallel, reference=self._vocabulary.reference)
            return _either(calls, grammar)

        return self._mask(name, write_grammar, thought_is_open=thought_is_open)

    def mask_for_tools(
        self, tools: Sequence[dict[str, Any]], names: Sequence[str], *, parallel: bool, thought_is_open: bool
    ) -> TokenMask:
        """The mask that forces a call of one of the functions `names`; several calls are allowed if parallel.

        tools: the request's, as OpenAI writes them. thought_is_open: as for `mask_for`. 400 for a name that no tool
        has, for a schema that makes no sense, and without llguidance.
        """
        return self._mask(
            "tools",
            lambda: tool_grammar(tools, names, parallel=parallel, reference=self._vocabulary.reference),
            thought_is_open=thought_is_open,
        )

    def _mask(self, name: str, write_grammar: Callable[[], str], *, thought_is_open: bool) -> GrammarMask:
        if not self._eos_token_ids:
            raise refused(f"{name} needs a model with an end-of-sequence token", name)
        llguidance = _llguidance(name)
        grammar = write_grammar()
        vocabulary = self._vocabulary

        def matcher(text: str) -> Any:
            made = llguidance.LLMatcher(vocabulary.ll_tokenizer, text, log_level=0)
            if made.is_error():
                raise refused(f"{name} cannot be used: {_first_line(made.get_error())}", name)
            return made

        mask = GrammarMask(name, matcher(grammar), vocabulary)
        try:
            self._try_out(mask)
        except ValueError as error:
            raise refused(f"{name} cannot be used: {error}", name) from None
        if not thought_is_open:
            return mask
        return GrammarMask(name, matcher(_after_a_thought(grammar, vocabulary)), vocabulary)

    def _try_out(self, mask: GrammarMask) -> None:
        """ValueError if a grammar that could be read fails at its first token, or along the only way there is."""
        token_ids: list[int] = []
        for _ in range(TRIAL_TOKENS):
            only = np.flatnonzero(mask(token_ids))
            if len(only) != 1 or only[0] in self._eos_token_ids:
                break
            token_ids.append(int(only[0]))

    @cached_property
    def _vocabulary(self) -> GrammarVocabulary:
        return GrammarVocabulary(self._tokenizer, self._vocab_size, self._eos_token_ids)


class GrammarMask:
    """The tokens that a grammar allows after given ones; a function of its argument alone, as `token_mask` demands.

    The parser's state after each sequence of tokens seen lately is kept, so that the next token costs one step and not
    a walk from the beginning.
    """

    def __init__(self, field: str, root: Any, vocabulary: GrammarVocabulary) -> None:
        """field: of the body that asked for it. root: an llguidance matcher that has seen nothing, to be copied."""
        self.field = field
        self.failure: str | None = None  # why the last call raised, which is the grammar's fault and not the engine's
        self._root = root
        self._vocabulary = vocabulary
        self._states: OrderedDict[tuple[int, ...], Any] = OrderedDict()

    def __call__(self, token_ids: list[int]) -> np.ndarray[Any, Any]:
        """bool [vocabulary of the model]. ValueError for tokens that the grammar refuses."""
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
        allowed = np.unpackbits(bits, count=self._vocabulary.vocab_size, bitorder="little").view(np.bool_)
        if not allowed.any():
            raise ValueError("the grammar allows no token at all here")
        ends = self._vocabulary.eos_token_ids
        if allowed[ends].any() and not matcher.is_accepting():
            # A grammar that asks for the end token in the middle: the engine would end there, half way through.
            allowed[ends] = False
            if not allowed.any():
                raise ValueError("the grammar goes on after a token that ends the text")
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


def _llguidance(name: str) -> Any:
    try:
        import llguidance
    except ImportError:
        raise refused(f"{name} needs llguidance, which is not installed here: pip install llguidance", name) from None
    return llguidance


def _grammar(llguidance: Any, constraint: Constraint) -> str:
    matcher, name, value = llguidance.LLMatcher, constraint.field, constraint.value
    if constraint.kind == "json":
        schema = value if isinstance(value, str) else json.dumps(value)
        try:
            return str(matcher.grammar_from_json_schema(schema, defaults={"whitespace_flexible": False}))
        except ValueError as error:
            raise refused(f"{name} cannot be used: {_first_line(str(error))}", name) from None
    if constraint.kind == "regex":
        return str(matcher.grammar_from_regex(value))
    if constraint.kind == "grammar":
        return str(matcher.grammar_from_lark(_lark(name, value)))
    if not value or not all(value):
        raise refused(f"{name} must hold a non-empty list of non-empty strings", name)
    if len(value) > MAX_CHOICES:
        raise refused(f"{name} must hold at most {MAX_CHOICES} choices, got {len(value)}", name)
    return str(matcher.grammar_from_lark("start: " + " | ".join(json.dumps(choice) for choice in value)))


def _lark(name: str, text: str) -> str:
    """A grammar in Lark as it is, one in GBNF (llama.cpp's and XGrammar's form of EBNF) as Lark."""
    from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax

    if is_lark_syntax(text):
        return text
    try:
        return str(gbnf_to_lark(text))
    except Exception as error:  # of the library's own, of any class
        raise refused(f"{name} is no grammar, neither in Lark nor in GBNF: {_first_line(str(error))}", name) from None


def _either(calls: str, answer: str) -> str:
    """Calls of tools, by a Lark grammar, or a text of the grammar `answer`."""
    whole = json.loads(answer)
    first, *others = whole["grammars"]
    lark = calls.replace("start:", "start: called | @content\ncalled:", 1)
    return json.dumps({**whole, "grammars": [{"lark_grammar": lark}, {**first, "name": "content"}, *others]})


def _after_a_thought(grammar: str, vocabulary: GrammarVocabulary) -> str:
    """The grammar of a text that begins inside a thought: anything up to the first `</think>`, then `grammar`."""
    whole = json.loads(grammar) if grammar.lstrip().startswith("{") else {"grammars": [{"lark_grammar": grammar}]}
    answer, *others = whole["grammars"]
    close = vocabulary.reference(CLOSE_THOUGHT)
    if close is not None and vocabulary.is_control(CLOSE_THOUGHT):
        thought = f"thought: THOUGHT {close}\nTHOUGHT: /(?s:.*)/ & ~/(?s:.*)<\\/think>(?s:.*)/"
    else:
        thought = "thought[lazy]: /(?s:.*)<\\/think>/"
    lark = f"start: thought NEWLINES @answer\n{thought}\nNEWLINES: /\\n{{0,2}}/"
    return json.dumps({**whole, "grammars": [{"lark_grammar": lark}, {**answer, "name": "answer"}, *others]})


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0][:300]
