"""The stop matcher against a search of the whole text, whatever the pieces. CASES C37, C52."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minipaged.text.stop_strings import StopMatcher

small = st.text(alphabet="abé", min_size=1, max_size=5)


def naive(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The first end at which a stop string is complete, the longest there."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@settings(max_examples=300, deadline=None)
@given(st.lists(small, min_size=1, max_size=4), st.text(alphabet="abé", max_size=30), st.data())
def test_equals_the_search_of_the_whole_text_however_it_is_cut_c37(
    stops: list[str], text: str, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    matcher = StopMatcher(stops)
    out, seen, matched = "", "", None
    for piece in pieces:
        seen += piece
        delta, matched = matcher.feed(piece)
        out += delta
        if matched is None:
            # all that cannot become a stop string any more is out, and nothing else
            held = next(n for n in range(len(seen), -1, -1) if any(s.startswith(seen[len(seen) - n :]) for s in stops))
            assert out == seen[: len(seen) - held]
        else:
            break
    if matched is None:
        out += matcher.flush()
    assert (out, matched) == naive(text, stops)


@settings(max_examples=200, deadline=None)
@given(st.lists(small, min_size=1, max_size=4), st.text(alphabet="abé", max_size=30), st.integers(0, 30))
def test_matches_that_end_before_the_gate_do_not_count_c38(stops: list[str], text: str, gate: int) -> None:
    matcher = StopMatcher(stops)
    out, matched = "", None
    for end, character in enumerate(text, start=1):
        delta, matched = matcher.feed(character, may_match=end > gate)
        out += delta
        if matched:
            break
    else:
        out += matcher.flush()
    want: tuple[str, str | None] = (text, None)
    for end in range(gate + 1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            want = (text[: end - len(longest)], longest)
            break
    assert (out, matched) == want


def test_a_passed_over_match_is_not_held_back() -> None:
    matcher = StopMatcher(["stop"])
    assert matcher.feed("a stop", may_match=False) == ("a stop", None)
    assert matcher.flush() == ""


@pytest.mark.parametrize(
    ("stops", "text", "want"),
    [
        (["STOP"], "abcSTOPdef", ("abc", "STOP")),
        (["STOP"], "abcSTOX", ("abcSTOX", None)),
        (["STOP", "ST"], "abcSTOPdef", ("abc", "ST")),
        (["P", "STOP"], "abcSTOPdef", ("abc", "STOP")),
        (["bcd", "c"], "abcd", ("ab", "c")),
        (["aab"], "aaab", ("a", "aab")),
        (["\n\n"], "x\n\ny", ("x", "\n\n")),
        (["a", "b", "c", "d", "é"], "xéa", ("x", "é")),
    ],
)
def test_examples_c37(stops: list[str], text: str, want: tuple[str, str | None]) -> None:
    for pieces in ([text], list(text)):
        matcher = StopMatcher(stops)
        out, matched = "", None
        for piece in pieces:
            delta, matched = matcher.feed(piece)
            out += delta
            if matched:
                break
        assert (out + ("" if matched else matcher.flush()), matched) == want


def test_work_per_character_is_bounded_c52() -> None:
    """Counted: automaton steps per character stay under 2 on average, for texts that keep almost matching."""
    matcher = StopMatcher(["a" * 50 + "b", "ab" * 20])
    steps = 0

    def count(frame: object, event: str, _: object) -> None:
        nonlocal steps
        steps += event == "line" and frame.f_code is StopMatcher._step.__code__  # type: ignore[attr-defined]

    def trace(frame: object, event: str, arg: object) -> object:
        count(frame, event, arg)
        return trace

    text = ("a" * 49 + "c") * 40
    previous = sys.gettrace()
    sys.settrace(trace)  # type: ignore[arg-type]
    try:
        for character in text:
            matcher.feed(character)
    finally:
        sys.settrace(previous)
    assert steps <= 8 * len(text)
