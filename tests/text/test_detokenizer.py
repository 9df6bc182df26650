"""Text as it comes against the decode of everything, and what ends it. CASES C15, C31, C37, C38, C39, C40, C52."""

from __future__ import annotations

import itertools
import statistics
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_rig import MODEL_VOCAB, write_byte_level_tokenizer, write_char_tokenizer

from minipaged.outputs import CompletionOutput, Logprob, RequestOutput
from minipaged.sampling_params import SamplingParams
from minipaged.text.detokenizer import Appended, ByteStream, Detokenizer, name_tokens, text_stream
from minipaged.text.tokenizer import Tokenizer

IM_END, THINK, NAIVE, UNKNOWN = 263, 264, 266, 310


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tokenizer")
    write_byte_level_tokenizer(path)
    return Tokenizer(path)


def resolved(eos: tuple[int, ...] = (), **fields: object) -> SamplingParams:
    class Defaults:
        eos_token_ids = eos
        temperature = top_p = top_k = min_p = repetition_penalty = None

    return SamplingParams(**fields).resolve(Defaults(), 10_000)  # type: ignore[arg-type]


def run(detokenizer: Detokenizer, ids: list[int]) -> tuple[list[str], Appended | None]:
    """Deltas until the sequence ends, and the last result; None if it has not ended (the rest is then flushed)."""
    deltas = []
    for token_id in ids:
        got = detokenizer.append(token_id)
        deltas.append(got.delta)
        if got.finish_reason:
            assert detokenizer.text == "".join(deltas)
            assert detokenizer.finish() == ""
            return deltas, got
    deltas.append(detokenizer.finish())
    assert detokenizer.text == "".join(deltas)
    assert detokenizer.finish() == ""
    return deltas, None


def test_multi_byte_characters_come_whole_however_they_are_cut_c39(tokenizer: Tokenizer) -> None:
    ids = list("你😀é".encode())
    deltas, _ = run(Detokenizer(resolved(), tokenizer), ids)
    assert deltas == ["", "", "你", "", "", "", "😀", "", "é", ""]
    one, two = Detokenizer(resolved(), tokenizer), Detokenizer(resolved(), tokenizer)  # interleaved streams
    for token_id in ids:
        one.append(token_id)
        two.append(token_id)
        two.append(97)
    assert one.text == "你😀é"
    assert two.text == tokenizer.decode([i for token_id in ids for i in (token_id, 97)])


def test_every_cut_of_the_nine_bytes_into_steps_c39(tokenizer: Tokenizer) -> None:
    raw = "你😀é".encode()
    for cuts in itertools.product([False, True], repeat=len(raw) - 1):
        pieces, start = [], 0
        for end, cut in enumerate([*cuts, True], start=1):
            if cut:
                pieces.append(raw[start:end])
                start = end
        fake = type("Pieces", (), {"id_to_bytes": lambda _, i: pieces[i]})  # noqa: B023
        stream = ByteStream(fake(), frozenset())  # type: ignore[arg-type]
        text = ""
        for index in range(len(pieces)):
            text += stream.push(index)
            done = b"".join(pieces[: index + 1]).decode("utf-8", errors="ignore")
            assert text == done  # as soon as it is complete, and no U+FFFD
        assert text + stream.flush() == "你😀é"


def test_max_tokens_inside_a_character_agrees_with_the_full_decode_c39(tokenizer: Tokenizer) -> None:
    ids = list("你😀é".encode())
    deltas, last = run(Detokenizer(resolved(max_tokens=5), tokenizer), ids)
    assert "".join(deltas) == tokenizer.decode(ids[:5]) == "你\ufffd"
    assert last == Appended("\ufffd", "length", None)


ids_of_text = st.text(max_size=20).map(lambda text: list(text.encode()))
any_ids = st.lists(st.integers(0, MODEL_VOCAB - 1), max_size=25)
mixed = st.lists(st.one_of(ids_of_text, any_ids), max_size=4).map(lambda parts: [i for part in parts for i in part])


@settings(max_examples=200, deadline=None)
@given(mixed, st.booleans())
def test_deltas_sum_to_the_full_decode_c39_c40(tokenizer: Tokenizer, ids: list[int], skip: bool) -> None:
    """Specials, added and unknown tokens anywhere, invalid bytes: the library's decode is the oracle."""
    deltas, last = run(Detokenizer(resolved(skip_special_tokens=skip), tokenizer), ids)
    assert last is None
    assert "".join(deltas) == tokenizer.decode(ids, skip_special_tokens=skip)


def test_spaces_and_special_tokens_are_kept_as_they_are_c40(tokenizer: Tokenizer) -> None:
    for text in (" leading", "    .", " ,  ' s", "\n"):
        for special in ([], [IM_END], [THINK], [UNKNOWN]):
            raw = list(text.encode())
            for ids in (special + raw, raw[:2] + special + raw[2:], raw + special):
                for skip in (True, False):
                    deltas, _ = run(Detokenizer(resolved(skip_special_tokens=skip), tokenizer), ids)
                    assert "".join(deltas) == tokenizer.decode(ids, skip_special_tokens=skip)
    assert run(Detokenizer(resolved(skip_special_tokens=False), tokenizer), [IM_END, 97])[0] == ["<|im_end|>", "a", ""]
    # a character on both sides of a token that has no text
    assert run(Detokenizer(resolved(), tokenizer), [0xC3, IM_END, 0xA9])[0] == ["", "", "é", ""]


def test_stop_string_across_tokens_c37(tokenizer: Tokenizer) -> None:
    deltas, last = run(Detokenizer(resolved(stop=["STOP"]), tokenizer), list(b"abcSTOPdef"))
    assert deltas == ["a", "b", "c", "", "", "", ""]
    assert last == Appended("", "stop", "STOP")
    deltas, last = run(Detokenizer(resolved(stop=["STOP"]), tokenizer), list(b"abcSTOX"))
    assert (deltas, last) == (["a", "b", "c", "", "", "", "STOX", ""], None)
    deltas, last = run(Detokenizer(resolved(stop=["STOP"], max_tokens=6), tokenizer), list(b"abcSTOX"))
    assert (deltas[-1], last) == ("STO", Appended("STO", "length", None))
    deltas, last = run(
        Detokenizer(resolved(stop="STOP", include_stop_str_in_output=True), tokenizer), list(b"abcSTOPdef")
    )
    assert ("".join(deltas), last) == ("abcSTOP", Appended("STOP", "stop", "STOP"))


def test_abort_delivers_what_was_held_back_c37(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(resolved(stop=["STOP"]), tokenizer)
    for token_id in (*b"abST", 0xE4):
        detokenizer.append(token_id)
    assert (detokenizer.text, detokenizer.finish(), detokenizer.text) == ("ab", "ST\ufffd", "abST\ufffd")


def test_text_behind_the_stop_string_in_one_token_is_dropped(tokenizer: Tokenizer) -> None:
    for stop, want in (("ïve", "na"), ("t", "naïve "), ("naïve token", "")):
        deltas, last = run(Detokenizer(resolved(stop=[stop]), tokenizer), [NAIVE])
        assert (deltas, last) == ([want], Appended(want, "stop", stop))


@settings(max_examples=200, deadline=None)
@given(
    st.text(alphabet="ab你😀", max_size=14),
    st.lists(st.text(alphabet="ab你😀", min_size=1, max_size=3), min_size=1, max_size=3),
    st.integers(0, 12),
    st.booleans(),
)
def test_stopping_equals_a_search_of_the_decoded_text_c37_c38(
    tokenizer: Tokenizer, text: str, stops: list[str], min_tokens: int, include: bool
) -> None:
    """Oracle: decode everything after each token; a stop counts if token min_tokens or a later one completes it."""
    ids = list(text.encode())
    params = resolved(stop=stops, min_tokens=min_tokens, include_stop_str_in_output=include)
    deltas, last = run(Detokenizer(params, tokenizer), ids)
    want, reason = text, None
    before = ""
    for count in range(1, len(ids) + 1):
        now = bytes(ids[:count]).decode("utf-8", errors="ignore")
        ends = [e for e in range(len(before) + 1, len(now) + 1) if any(now[:e].endswith(s) for s in stops)]
        if ends and count >= min_tokens:
            reason = max((s for s in stops if now[: ends[0]].endswith(s)), key=len)
            want = now[: ends[0] - (0 if include else len(reason))]
            break
        before = now
    assert "".join(deltas) == want
    assert (last.stop_reason if last else None) == reason
    for end in range(len(deltas)):  # nothing of the stop string was ever given out
        assert want.startswith("".join(deltas[:end]))


def test_either_eos_stops_and_is_not_in_the_text_c31(tokenizer: Tokenizer) -> None:
    for skip in (True, False):
        for eos in (IM_END, 301):
            params = resolved(eos=(IM_END, 301), stop_token_ids=[98], skip_special_tokens=skip)
            assert run(Detokenizer(params, tokenizer), [97, eos])[1] == Appended("", "stop", None)
            deltas, last = run(Detokenizer(params, tokenizer), [97, 98, 99])
            assert (deltas, last) == (["a", ""], Appended("", "stop", 98))
    params = resolved(eos=(IM_END,), include_stop_str_in_output=True, skip_special_tokens=False)
    assert run(Detokenizer(params, tokenizer), [97, IM_END])[0] == ["a", "<|im_end|>"]


def test_ignore_eos_runs_to_the_length_but_user_ids_still_stop_c38(tokenizer: Tokenizer) -> None:
    params = resolved(eos=(300, 301), ignore_eos=True, max_tokens=8, stop_token_ids=[97])
    assert run(Detokenizer(params, tokenizer), [301] * 9)[1] == Appended("", "length", None)
    deltas, last = run(Detokenizer(params, tokenizer), [301, 300, 97])
    assert (len(deltas), last) == (3, Appended("", "stop", 97))
    both = resolved(eos=(300, 301), ignore_eos=True, min_tokens=5, max_tokens=8)
    assert len(run(Detokenizer(both, tokenizer), [301] * 9)[0]) == 8
    assert len(run(Detokenizer(resolved(eos=(300,), min_tokens=3), tokenizer), [300] * 9)[0]) == 3
    user = resolved(eos=(300,), ignore_eos=True, stop_token_ids=[300])
    assert run(Detokenizer(user, tokenizer), [300])[1] == Appended("", "stop", 300)


def test_stop_wins_over_length_at_the_last_token(tokenizer: Tokenizer) -> None:
    assert run(Detokenizer(resolved(stop="b", max_tokens=2), tokenizer), [97, 98])[1] == Appended("", "stop", "b")
    assert run(Detokenizer(resolved(eos=(300,), max_tokens=1), tokenizer), [300])[1] == Appended("", "stop", None)


def test_without_tokenizer_or_detokenize_there_is_no_text(tokenizer: Tokenizer) -> None:
    for detokenizer in (
        Detokenizer(resolved(max_tokens=2), None),
        Detokenizer(resolved(max_tokens=2, detokenize=False), tokenizer),
    ):
        assert run(detokenizer, [97, 98])[1] == Appended("", "length", None)
        assert detokenizer.text == ""
    with pytest.raises(ValueError, match="stop strings need a tokenizer"):
        Detokenizer(resolved(stop="x"), None)


def test_other_decoders_give_whole_characters_and_the_full_decode(tmp_path: Path) -> None:
    write_char_tokenizer(tmp_path)
    tokenizer = Tokenizer(tmp_path)
    space, the = tokenizer.token_to_id("▁"), tokenizer.token_to_id("▁the")
    assert space is not None
    assert the is not None
    byte = [tokenizer.token_to_id(f"<0x{b:02X}>") or 0 for b in "😀".encode()]
    ids = [the, space, 1, 2, *byte, the, tokenizer.token_to_id("<s>") or 0, 9, space, *byte, 3, *byte, 10_000]
    for cut in range(len(ids) + 1):
        for skip in (True, False):
            stream = text_stream(tokenizer, tokenizer.special_ids if skip else frozenset())
            text = "".join(stream.push(token_id) for token_id in ids[:cut])
            assert "\ufffd" not in text
            assert text + stream.flush() == tokenizer.decode(ids[:cut], skip_special_tokens=skip)
    stream = text_stream(tokenizer, tokenizer.special_ids)  # invalid bytes without end do not pile up
    text = "".join(stream.push(byte[1]) for _ in range(200))
    assert len(stream._ids) <= 32  # type: ignore[attr-defined]
    assert text + stream.flush() == "\ufffd" * 200


def test_cost_per_token_does_not_grow_c52(tokenizer: Tokenizer) -> None:
    """8,000 tokens through detokeniser and stop matcher: the last 100 cost what the first 100 do (ratio in one run)."""
    ids = list(("The quick brown fox 你好 ST " * 400).encode())[:8000]
    ratios = []
    for _ in range(5):
        detokenizer = Detokenizer(resolved(stop=["STOP", "\n\n\n"]), tokenizer)
        times = []
        for token_id in ids:
            start = time.perf_counter()
            detokenizer.append(token_id)
            times.append(time.perf_counter() - start)
        ratios.append(statistics.median(times[-100:]) / statistics.median(times[:100]))
        assert len(detokenizer.text) > 6000
    assert statistics.median(ratios) <= 2


def test_log_probabilities_get_their_tokens_text(tokenizer: Tokenizer) -> None:
    entry = {token_id: Logprob(-1.0, 1) for token_id in (0xE4, IM_END, NAIVE, UNKNOWN)}
    name_tokens(entry, None)
    assert {e.decoded_token for e in entry.values()} == {None}
    name_tokens(entry, tokenizer)
    assert [e.decoded_token for e in entry.values()] == ["\ufffd", "<|im_end|>", "naïve token", ""]


def test_outputs_print_readably() -> None:
    done = CompletionOutput(0, "hi", list(range(100)), finish_reason="stop", stop_reason="x", logprobs=[{}])
    output = RequestOutput("r1", "p", [1, 2], None, [done, CompletionOutput(1)], True, 0)
    assert (done.finished, output.outputs[1].finished) == (True, False)
    assert "token_ids=[0, 1, 2, 3, 4, 5, 6, 7, ... 100 in all], finish_reason='stop', stop_reason='x'" in repr(output)
    assert "\n  CompletionOutput(index=1, text='', token_ids=[])," in repr(output)
