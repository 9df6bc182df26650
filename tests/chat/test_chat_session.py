"""A conversation without a terminal: what is sent, what is kept, what is cached, and what a stop leaves behind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from minipaged import LLM, SamplingParams
from minipaged.chat.session import Answer, ChatSession, Turn
from minipaged.errors import RequestTooLargeError
from minipaged.text.chat_template import ChatTemplate

GREETING, QUESTION = "Good morrow, sir", "What news of the king?"


def read(answer: Answer) -> str:
    return "".join(piece.content for piece in answer.pieces())


def forced(texts_ids: Sequence[int]) -> SamplingParams:
    """Sampling that can write nothing but these token ids."""

    def mask(generated: list[int]) -> Any:
        allowed = np.zeros(1024, dtype=bool)
        allowed[texts_ids[len(generated)]] = True
        return allowed

    return SamplingParams(temperature=0.0, token_mask=mask, max_tokens=len(texts_ids), skip_special_tokens=False)


def test_answers_are_those_of_llm_chat_for_the_same_messages(llm: LLM, session: ChatSession) -> None:
    session.system = "Speak in verse."
    first = read(session.ask(GREETING))
    second = read(session.ask(QUESTION))
    messages = [
        {"role": "system", "content": "Speak in verse."},
        {"role": "user", "content": GREETING},
        {"role": "assistant", "content": first},
        {"role": "user", "content": QUESTION},
    ]
    expected = [llm.chat(messages[:k], session.params, use_tqdm=False)[0].outputs[0].text for k in (2, 4)]
    assert [first, second] == expected
    assert session.messages() == [*messages, {"role": "assistant", "content": second}]


def test_the_second_turn_finds_the_first_in_the_prefix_cache(llm: LLM, session: ChatSession) -> None:
    read(session.ask(GREETING))
    read(session.ask(QUESTION))
    first, second = session.answered
    assert first.cached_tokens == 0
    block_size = llm.engine.block_manager.block_size
    assert second.cached_tokens % block_size == 0
    # all full blocks of the first turn's prompt and answer; the last sampled token has no K/V yet
    assert second.cached_tokens >= (first.prompt_tokens + first.generated_tokens - 2) // block_size * block_size > 0
    assert second.cached_tokens < second.prompt_tokens


def test_numbers_of_an_answer(llm: LLM, session: ChatSession) -> None:
    read(session.ask(GREETING))
    (stats,) = session.answered
    prompt = llm.render_chat([{"role": "user", "content": GREETING}])
    assert llm.tokenizer is not None
    assert stats.prompt_tokens == len(llm.tokenizer.encode(prompt, add_special_tokens=False))
    assert 0 < stats.generated_tokens <= 24
    assert stats.decoded_tokens == stats.generated_tokens - 1
    assert stats.first_token_s is not None
    assert stats.decode_tok_s == pytest.approx(stats.decoded_tokens / stats.decode_s)
    total = session.total()
    assert (total.prompt_tokens, total.generated_tokens) == (stats.prompt_tokens, stats.generated_tokens)


def test_a_stopped_answer_keeps_what_was_shown_and_frees_its_blocks(llm: LLM, session: ChatSession) -> None:
    session.params = replace(session.params, ignore_eos=True, max_tokens=200)
    answer = session.ask(GREETING)
    shown = ""
    for piece in answer.pieces():
        shown += piece.content
        if len(shown) > 20:
            answer.stop()
    assert answer.finish_reason == "abort"
    assert llm.engine.stats().blocks_in_use == 0
    assert session.turns == [Turn(GREETING, shown, stopped=True)]
    assert len(shown) > 20
    assert session.answered[0].generated_tokens < 200

    session.params = replace(session.params, max_tokens=8)
    assert read(session.ask(QUESTION))
    assert [message["content"] for message in session.messages()[:3]] == [GREETING, shown, QUESTION]


def test_an_answer_stopped_before_it_began_leaves_no_trace(session: ChatSession) -> None:
    read(session.ask(GREETING))
    before = session.messages()
    for answer in (session.ask(QUESTION), session.retry()):
        answer.stop()
        assert read(answer) == ""
        assert not answer.kept
        assert session.messages() == before


def test_a_long_prompt_can_be_stopped_between_its_chunks() -> None:
    with LLM(num_blocks=64, max_num_batched_tokens=16, check_invariants=True) as llm:
        session = ChatSession(llm)
        answer = session.ask("good morrow " * 30)
        pieces = answer.pieces()
        assert next(pieces).content == ""
        assert llm.engine.stats().blocks_in_use > 0
        answer.stop()
        assert "".join(piece.content for piece in pieces) == ""
        assert llm.engine.stats().blocks_in_use == 0
        assert session.turns == []
        assert session.answered[0].first_token_s is None


def test_an_exception_while_reading_ends_the_answer_too(llm: LLM, session: ChatSession) -> None:
    pieces = session.ask(GREETING).pieces()
    shown = next(pieces).content
    while not shown:
        shown = next(pieces).content
    pieces.close()
    assert llm.engine.stats().blocks_in_use == 0
    assert session.turns[0].stopped
    assert session.turns[0].answer.startswith(shown)


def test_a_failing_step_leaves_the_conversation_as_it_was(
    llm: LLM, session: ChatSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = read(session.ask(GREETING))
    with monkeypatch.context() as patch:

        def broken(plan: object) -> None:
            raise RuntimeError("the device is gone")

        patch.setattr(llm.engine.runner, "execute", broken)
        answer = session.ask(QUESTION)
        assert read(answer) == ""
    assert answer.finish_reason == "error"
    assert answer.error == "RuntimeError: the device is gone"
    assert session.turns == [Turn(GREETING, expected)]
    assert read(session.retry()) == expected


def test_characters_arrive_whole(llm: LLM, session: ChatSession) -> None:
    text = "é😀你👩‍👩‍👧!"
    assert llm.tokenizer is not None
    ids = llm.tokenizer.encode(text)
    assert len(ids) > len(text), "some characters take several tokens"
    session.params = forced(ids)
    pieces = [piece.content for piece in session.ask(GREETING).pieces()]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert len([piece for piece in pieces if piece]) > 3, "it streams"


# ---- thinking


def test_thoughts_are_told_apart_and_never_go_back(llm: LLM, session: ChatSession) -> None:
    assert llm.tokenizer is not None
    session.params = forced(llm.tokenizer.encode("<think>\nHm, a king.\n</think>\n\nNone, my lord."))
    answer = session.ask(QUESTION)
    pieces = list(answer.pieces())
    assert "".join(piece.reasoning for piece in pieces) == "Hm, a king."
    assert "".join(piece.content for piece in pieces) == "None, my lord."
    assert session.turns == [Turn(QUESTION, "None, my lord.")]
    session.params = SamplingParams(max_tokens=1)
    following = session.ask(GREETING)
    list(following.pieces())
    assert session.messages()[1] == {"role": "assistant", "content": "None, my lord."}


def test_an_answer_stopped_in_its_thoughts_is_dropped(llm: LLM, session: ChatSession) -> None:
    assert llm.tokenizer is not None
    session.params = forced(llm.tokenizer.encode("<think>\nHm, a king.\n</think>\n\nNone, my lord."))
    answer = session.ask(QUESTION)
    for piece in answer.pieces():
        if piece.reasoning:
            answer.stop()
    assert answer.reasoning
    assert session.turns == []


@pytest.mark.parametrize(
    ("thinking", "ending"), [(False, "<think>\n\n</think>\n\n"), (True, "assistant\n"), (None, "assistant\n")]
)
def test_the_switch_reaches_the_template(
    llm: LLM, session: ChatSession, monkeypatch: pytest.MonkeyPatch, thinking: bool | None, ending: str
) -> None:
    prompts = []
    prepare = llm.engine.prepare

    def spy(*args: Any, **kwargs: Any) -> Any:
        prompts.append(kwargs["prompt_text"])
        return prepare(*args, **kwargs)

    monkeypatch.setattr(llm.engine, "prepare", spy)
    session.thinking = thinking
    read(session.ask(QUESTION))
    assert prompts[0].endswith(ending)


def test_a_template_without_the_switch_says_so(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm, "_loaded", replace(llm.loaded, chat_template=ChatTemplate("{{ messages[0].content }}")))
    session = ChatSession(llm)
    with pytest.raises(ValueError, match="enable_thinking"):
        session.thinking = False
    assert session.thinking is None


# ---- the context


def test_a_full_context_names_the_numbers_and_the_way_out(session: ChatSession) -> None:
    session.turns = [Turn(f"{k}: " + "good morrow " * 12, "and you " * 12) for k in range(8)]
    before = list(session.turns)
    with pytest.raises(RequestTooLargeError, match=r"no longer fits: (\d+) prompt tokens \+ max_tokens = 24") as caught:
        session.ask(QUESTION)
    assert session.turns == before
    assert "> 512 tokens" in str(caught.value)
    assert "/reset" in str(caught.value)
    count = int(str(caught.value).partition("/drop ")[2].split()[0])
    session.drop(count - 1)
    with pytest.raises(RequestTooLargeError):
        session.ask(QUESTION)
    session.drop(1)
    assert session.turns == before[count:]
    assert read(session.ask(QUESTION))


def test_without_max_tokens_the_way_out_leaves_room_for_an_answer(session: ChatSession) -> None:
    session.params = SamplingParams(temperature=0.0)
    session.turns = [Turn(f"{k}: " + "good morrow " * 12, "and you " * 12) for k in range(8)]
    with pytest.raises(RequestTooLargeError) as caught:
        session.ask(QUESTION)
    session.drop(int(str(caught.value).partition("/drop ")[2].split()[0]))
    read(session.ask(QUESTION))
    assert session.answered[-1].prompt_tokens <= 512 * 3 // 4


def test_a_message_that_is_too_long_alone_says_so(session: ChatSession) -> None:
    session.turns = [Turn("a", "b")]
    with pytest.raises(RequestTooLargeError, match="the message alone makes"):
        session.ask("good morrow " * 400)


def test_an_answer_that_fills_the_context_says_so(session: ChatSession) -> None:
    session.params = SamplingParams(temperature=0.0, ignore_eos=True)
    answer = session.ask("good morrow " * 100)
    read(answer)
    assert answer.finish_reason == "length"
    assert answer.filled_context
    stats = session.answered[0]
    assert stats.prompt_tokens + stats.generated_tokens == session.context_limit == 512


def test_the_limit_is_the_pools_if_that_is_less() -> None:
    with pytest.warns(UserWarning, match="num_blocks"):
        owner = LLM(num_blocks=4)
    with owner as llm:
        session = ChatSession(llm)
        assert session.context_limit == 65
        with pytest.raises(RequestTooLargeError, match="> 65 tokens"):
            session.ask("good morrow " * 40)


def test_context_tokens_are_those_of_the_next_prompt(llm: LLM, session: ChatSession) -> None:
    assert session.context_tokens() == 0
    read(session.ask(GREETING))
    text = llm.render_chat(session.messages(), add_generation_prompt=False)
    assert llm.tokenizer is not None
    assert session.context_tokens() == len(llm.tokenizer.encode(text, add_special_tokens=False))


# ---- going back


def test_retry_replaces_the_last_answer_alone(session: ChatSession) -> None:
    session.params = SamplingParams(temperature=1.5, max_tokens=12)
    read(session.ask(GREETING))
    read(session.ask(QUESTION))
    first = session.turns[0]
    again = read(session.retry())
    assert session.turns == [first, Turn(QUESTION, again)]


def test_undo_drop_and_reset(session: ChatSession) -> None:
    session.system = "Speak in verse."
    session.turns = [Turn("a", "1"), Turn("b", "2"), Turn("c", "3"), Turn("d", "4")]
    assert session.undo() == Turn("d", "4")
    session.drop(1)
    assert [turn.question for turn in session.turns] == ["b", "c"]
    for count in (0, 3):
        with pytest.raises(ValueError, match="has 2"):
            session.drop(count)
    session.reset()
    assert session.messages() == [{"role": "system", "content": "Speak in verse."}]
    with pytest.raises(ValueError, match="undo"):
        session.undo()
    with pytest.raises(ValueError, match="no message"):
        session.retry()


@pytest.mark.parametrize("text", ["", "  \n"])
def test_an_empty_message_is_refused(session: ChatSession, text: str) -> None:
    with pytest.raises(ValueError, match="empty"):
        session.ask(text)


@pytest.mark.parametrize(("missing", "named"), [("tokenizer", "tokenizer"), ("chat_template", "chat template")])
def test_a_model_that_cannot_chat_is_sent_to_generate(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, missing: str, named: str
) -> None:
    without: dict[str, Any] = {missing: None}
    monkeypatch.setattr(llm, "_loaded", replace(llm.loaded, **without))
    with pytest.raises(ValueError, match=f"has no {named}.*minipaged generate"):
        ChatSession(llm)


def test_more_than_one_answer_is_refused(llm: LLM) -> None:
    with pytest.raises(ValueError, match="n must be 1"):
        ChatSession(llm, SamplingParams(n=2))
