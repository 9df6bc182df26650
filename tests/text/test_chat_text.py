"""What is different about a chat's text: tags that are special tokens, stop strings and thoughts, the end of a turn."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from text_rig import write_byte_level_tokenizer

from minipaged.sampling_params import SamplingParams
from minipaged.text.chat_template import ChatTemplate
from minipaged.text.detokenizer import ChatText, Detokenizer
from minipaged.text.reasoning import AnswerStart, ReasoningSplitter, Thinking
from minipaged.text.tokenizer import Tokenizer

TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
# As Qwen3's tokenizer.json flags its added tokens: the tags are none of the special ones. Fine-tunes flag them.
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@pytest.fixture(params=[False, True], ids=["tags are plain", "tags are special"])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    write_byte_level_tokenizer(tmp_path)
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokens = [tokenizers.AddedToken(tag, special=request.param, normalized=False) for tag in TAGS]
    (backend.add_special_tokens if request.param else backend.add_tokens)(tokens)
    backend.save(str(tmp_path / "tokenizer.json"))
    return Tokenizer(tmp_path)


def text_of(tokenizer: Tokenizer, text: str, chat: ChatText | None, **fields: object) -> str:
    params = SamplingParams(**fields).resolve(None, 10_000)  # type: ignore[arg-type]
    detokenizer = Detokenizer(params, tokenizer, chat)
    deltas = ""
    for token_id in tokenizer.encode(text):
        appended = detokenizer.append(token_id)
        deltas += appended.delta
        if appended.finish_reason is not None:
            break
    deltas += detokenizer.finish()
    assert deltas == detokenizer.text
    return deltas


def test_parsers_see_tags_and_nobody_sees_other_special_tokens(tokenizer: Tokenizer) -> None:
    text = "<think>a</think>b<|im_start|>c<tool_call>{}</tool_call><|endoftext|>"
    ids = [tokenizer.token_to_id(tag) for tag in TAGS]
    visible = ChatText(visible=frozenset(token_id for token_id in ids if token_id is not None))
    assert text_of(tokenizer, text, visible) == "<think>a</think>bc<tool_call>{}</tool_call>"
    assert text_of(tokenizer, text, visible, skip_special_tokens=False) == text
    hidden = all(token_id in tokenizer.special_ids for token_id in ids)
    plain = "abc{}" if hidden else "<think>a</think>bc<tool_call>{}</tool_call>"
    assert text_of(tokenizer, text, None) == plain


@pytest.mark.parametrize(
    ("thinking", "text", "wanted"),
    [
        (Thinking.POSSIBLE, "<think>\na\n\nb\n</think>\n\nHello\n\nyou", "<think>\na\n\nb\n</think>\n\nHello"),
        (Thinking.OPENED, "a\n\nb</think>\n\nHello\n\nyou", "a\n\nb</think>\n\nHello"),
        (Thinking.POSSIBLE, "Hello\n\nyou", "Hello"),
        (Thinking.OFF, "<think>\n\n</think>", "<think>"),
        (Thinking.POSSIBLE, "<think>a\n\nb", "<think>a\n\nb"),
        (Thinking.POSSIBLE, "<thin", "<thin"),
        (None, "<think>\na\n\nb</think>", "<think>\na"),
    ],
)
def test_stop_strings_are_about_the_answer(
    tokenizer: Tokenizer, thinking: Thinking | None, text: str, wanted: str
) -> None:
    assert text_of(tokenizer, text, ChatText(frozenset(range(1000)), thinking), stop=["\n\n"]) == wanted


@given(
    st.lists(st.sampled_from(["<think>", "</think>", "\n", " ", "a", "<", "</thi", "b\n\nc"]), max_size=9),
    st.sampled_from(list(Thinking)),
    st.randoms(use_true_random=False),
)
def test_the_answer_starts_where_the_splitter_says(parts: list[str], thinking: Thinking, rng: random.Random) -> None:
    text = "".join(parts)
    places = sorted(rng.randrange(len(text) + 1) for _ in range(4))
    gate, splitter = AnswerStart(thinking), ReasoningSplitter(thinking)
    before = answer = content = ""
    for piece in [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]:
        first, second = gate.feed(piece)
        assert not (first and answer), "the answer does not end"
        before, answer = before + first, answer + second
        content += splitter.feed(piece)[1]
    assert before + answer + gate.flush() == text
    assert answer == content


def test_the_end_of_a_turn_is_an_end() -> None:
    params = SamplingParams().resolve(None, 5).with_ends((7, 8))
    assert params.eos_token_ids == (7, 8)
    assert Detokenizer(params, None).append(8).finish_reason == "stop"


TEMPLATE = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.name }}("
    "{% if c.function.arguments is string %}{{ c.function.arguments }}{% else %}"
    "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v | tojson }};{% endfor %}{% endif %})"
    "{% endfor %}{{ m.role }}{% endfor %}{{ tools | tojson if tools else '' }}"
)


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ('{"b": 1, "a": [2, "é"]}', 'f(b=1;a=[2, "é"];)'),
        ({"b": 1}, "f(b=1;)"),
        ("", "f()"),
        (None, "f()"),
        ("{}", "f()"),
        ("[1, 2]", "f([1, 2])"),
        ("{broken", "f({broken)"),
        ("[" * 100_000, "f(" + "[" * 100_000 + ")"),
    ],
)
def test_arguments_of_earlier_calls_reach_the_template_as_objects(arguments: object, wanted: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    assert ChatTemplate(TEMPLATE).render(messages, add_generation_prompt=False) == f"{wanted}assistant"
    assert call["function"]["arguments"] == arguments  # type: ignore[index]


def test_tools_keep_their_order_and_developers_are_system() -> None:
    tool = {"function": {"parameters": {"z": 1, "a": 2}, "name": "f"}, "type": "function"}
    text = ChatTemplate(TEMPLATE).render([{"role": "developer", "content": "x"}], tools=[tool])
    assert text == "system" + json.dumps([tool])
