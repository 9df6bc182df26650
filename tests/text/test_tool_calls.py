"""Calls of tools in a text: the JSON says where one ends, and nothing else is held back or hidden."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minipaged.text.json_scanner import ObjectScanner
from minipaged.text.tool_calls import CLOSE, OPEN, ToolCall, ToolCallParser, parse_call


def run(pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    parser = ToolCallParser()
    out = [item for piece in pieces for item in parser.feed(piece)] + parser.finish()
    return (
        "".join(item for item in out if isinstance(item, str)),
        [(item.name, item.arguments) for item in out if isinstance(item, ToolCall)],
    )


def call_of(name: str, arguments: str) -> str:
    return f'{OPEN}\n{{"name": {json.dumps(name)}, "arguments": {arguments}}}\n{CLOSE}'


def every_cut(text: str) -> list[list[str]]:
    """Whole, at each character, character by character, and in random pieces."""
    rng = random.Random(text)
    cuts = [[text], list(text), *([text[:i], text[i:]] for i in range(1, len(text)))]
    for _ in range(5):
        places = sorted(rng.randrange(len(text) + 1) for _ in range(6))
        cuts.append([text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)])
    return cuts


ARGUMENTS = [
    '{"text": "use </tool_call> here"}',
    '{"text": "an <tool_call> in it"}',
    '{"text": "<tool_call>{\\"name\\": \\"f\\", \\"arguments\\": {}}</tool_call>"}',
    '{"quote": "\\"</tool_call>", "backslash": "\\\\", "both": "\\\\\\"</tool_call>"}',
    '{"half": "\\ud83d!", "pair": "\\ud83d\\ude00", "nul": "\\u0000"}',
    '{"spaced" :  [ 1.50, -0e+3 , {"deep": [[], {}]} ] , "braces": "}}]"}',
    '{"twice": 1, "twice": 2}',
    "{}",
]


@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_a_call_ends_where_its_json_does_and_keeps_the_models_own_text(arguments: str) -> None:
    for pieces in every_cut(call_of("save", arguments)):
        assert run(pieces) == ("", [("save", arguments)])


MENTIONS = [
    "I use `<tool_call>` now.\n",
    "<tool_call> is a tag. ",
    "<tool_call></tool_call>",
    "<tool_call>{} </tool_call>",
    "<tool_call>{oops}</tool_call>",
    '<tool_call>{"name": "f", "arguments": {"a": 1}\n',
    '<tool_call>{"name": "f", "arguments": {"a": 1}}\n',
    '<tool_call>{"name": "f", "arguments": {"a": "never closed\n',
    '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
    "<tool_call>\n\n<tool_call>",
    "</tool_call> <tool_call",
    "a < b, <tool_ca",
]


@pytest.mark.parametrize("mention", MENTIONS)
def test_what_is_no_call_hides_none(mention: str) -> None:
    for pieces in every_cut(mention + call_of("real", "{}")):
        text, calls = run(pieces)
        assert calls == [("real", "{}")]
        assert text == mention.rstrip() + mention[len(mention.rstrip()) :] * 0


@pytest.mark.parametrize("mention", MENTIONS)
def test_without_a_call_nothing_is_lost(mention: str) -> None:
    for pieces in every_cut(mention):
        assert run(pieces) == (mention, [])


@pytest.mark.parametrize(
    "mention", ["see `<tool_call>` there ", "<tool_call>x", "<tool_call>{ I mean", '<tool_call>{"a" b', "<tool_call>[1"]
)
def test_prose_goes_out_as_soon_as_it_cannot_be_a_call(mention: str) -> None:
    parser = ToolCallParser()
    given = mention + "".join(f" word{n}" for n in range(200))
    out = ""
    for number, character in enumerate(given, 1):
        out += "".join(item for item in parser.feed(character) if isinstance(item, str))
        if number >= len(mention):
            assert len(given[:number].rstrip()) - len(out) <= 1, "only the end of a word's space is held back"
    assert out + "".join(map(str, parser.finish())) == given


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False) | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
PROSE = st.sampled_from(
    ["so ", "a { b } c", "<think", "\n", "</tool_call>", "<tool_call>", '"', "{", "<", "é😀", "[1]"]
)


@given(
    st.lists(PROSE | st.dictionaries(st.text(), JSON_VALUES, max_size=3), max_size=6),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_any_text_with_calls_in_any_pieces(parts: list[Any], ascii_only: bool, rng: random.Random) -> None:
    """Every call that was written is found, in order, with its arguments; without any, the text comes back."""
    written = [
        p if isinstance(p, str) else json.dumps(p, ensure_ascii=ascii_only, indent=rng.choice([None, 1])) for p in parts
    ]
    calls = [text for part, text in zip(parts, written, strict=True) if not isinstance(part, str)]
    text = "".join(t if isinstance(p, str) else call_of("f", t) for p, t in zip(parts, written, strict=True))
    whole = run([text])
    assert [json.loads(arguments) for _, arguments in whole[1]] == [json.loads(arguments) for arguments in calls]
    if not calls:
        assert whole[0] == text
    places = sorted(rng.randrange(len(text) + 1) for _ in range(5))
    assert run([text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]) == whole
    assert run(list(text)) == whole


@given(st.dictionaries(st.text(), JSON_VALUES, max_size=4), st.text(max_size=3), st.randoms(use_true_random=False))
def test_the_scanner_agrees_with_the_json_module(value: dict[str, Any], tail: str, rng: random.Random) -> None:
    text = json.dumps(value, ensure_ascii=rng.random() < 0.5, indent=rng.choice([None, 1]))
    scanner = ObjectScanner()
    assert scanner.feed(text + tail, 0) == len(text)
    members = {json.loads(f'"{key}"'): json.loads(text[a:b]) for key, (a, b) in scanner.members.items()}
    assert members == json.loads(text)
    place = rng.randrange(len(text))
    changed = text[:place] + rng.choice('{}[]",:a1\\ tn-.') + text[place + rng.randrange(2) :]
    try:
        wanted = json.JSONDecoder(strict=False).raw_decode(changed)[1] if changed.startswith("{") else -1
    except ValueError as error:
        if "escape" in str(error):
            return  # the scanner leaves escapes to the parser
        wanted = -1
    found = ObjectScanner().feed(changed, 0)
    assert found == wanted or (found is None and wanted == -1)


def test_each_character_is_looked_at_a_bounded_number_of_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unclosed call with many tags inside it, in small pieces: no second reading of what was read."""
    looks = 0
    take = ObjectScanner._take

    def counted(self: ObjectScanner, character: str) -> bool:
        nonlocal looks
        looks += 1
        return take(self, character)

    monkeypatch.setattr(ObjectScanner, "_take", counted)
    text = OPEN + '{"name": "f", "arguments": {"a": "' + 2000 * (OPEN + '{\\"b ') + 500 * (OPEN + '{"c')
    assert run([text[i : i + 7] for i in range(0, len(text), 7)]) == (text, [])
    assert looks < 3 * len(text)


@pytest.mark.parametrize(
    ("text", "good"),
    [
        ('{"name": "f", "arguments": {}}', True),
        ('{"arguments": {}, "name": "f"}', True),
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}', True),
        ('{"name": "f", "arguments": {"a": "two\nlines"}}', True),
        ('{"name": "f", "arguments": "x"}', False),
        ('{"name": "f", "arguments": [1]}', False),
        ('{"name": "f", "arguments": {"a": "\\x"}}', False),
        ('{"name": 5, "arguments": {}}', False),
        ('{"name": "", "arguments": {}}', False),
        ('{"arguments": {}}', False),
        ('{"name": "f", "arguments": ' + '{"a":' * 100_000 + "1" + "}" * 100_001, False),
        ("null", False),
        ("[" * 10_000, False),
        ("", False),
    ],
)
def test_what_a_call_is(text: str, good: bool) -> None:
    call = parse_call(text)
    assert (call is not None) == good
    if call is not None:
        assert isinstance(json.loads(call.arguments), dict)
