"""Splits a generated text into what the model thought and what it says: `<think>` ... `</think>`."""

from __future__ import annotations

from enum import Enum

OPEN, CLOSE = "<think>", "</think>"


class Thinking(Enum):
    """What a prompt says about thoughts."""

    OFF = "the prompt holds a closed, empty thought, or the user turned thinking off: the text is all content"
    POSSIBLE = "the prompt leaves it to the model, whose text then begins with <think>"
    OPENED = "the prompt ends inside a thought"


def thinking_after(prompt: str, *, enable_thinking: object = None, continued: str | None = None) -> Thinking:
    """How the text after a rendered prompt begins.

    enable_thinking: as given to the template. continued: content of the assistant's message that is to be continued.
    """
    if continued is not None and continued.rfind(OPEN) > continued.rfind(CLOSE):
        return Thinking.OPENED
    end = prompt.rstrip()
    if end.endswith(OPEN):
        return Thinking.OPENED
    if end.endswith(CLOSE) or enable_thinking is False or continued:
        return Thinking.OFF
    return Thinking.POSSIBLE


def held_back(text: str, tag: str) -> int:
    """Length of the longest end of `text` that may be the beginning of `tag`."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0)


class ReasoningSplitter:
    """Text in pieces of any size in, (reasoning, content) out; the sums do not depend on where it was cut.

    Newlines next to the tags belong to neither. A thought that does not end is all reasoning.
    """

    def __init__(self, thinking: Thinking) -> None:
        self._state = {Thinking.OFF: "content", Thinking.POSSIBLE: "start", Thinking.OPENED: "opened"}[thinking]
        self._held = ""

    def feed(self, text: str) -> tuple[str, str]:
        """What is certain after this piece."""
        if self._state == "content":
            return "", text
        self._held += text
        reasoning = ""
        if self._state == "start":
            begin = self._held.lstrip()
            if not begin.startswith(OPEN):
                if OPEN.startswith(begin):
                    return "", ""
                return "", self._rest_is_content()
            self._held, self._state = begin[len(OPEN) :], "opened"
        if self._state == "opened":
            self._held = self._held.lstrip("\n")
            self._state = "reasoning" if self._held else "opened"
        if self._state == "reasoning":
            thought, tag, after = self._held.partition(CLOSE)
            if tag:
                reasoning, self._held, self._state = thought.rstrip("\n"), after, "closed"
            else:
                end = len(thought) - held_back(thought, CLOSE)
                end = len(thought[:end].rstrip("\n"))
                self._held = thought[end:]
                return thought[:end], ""
        if self._state == "closed":
            self._held = self._held.lstrip("\n")
            if self._held:
                return reasoning, self._rest_is_content()
        return reasoning, ""

    def finish(self) -> tuple[str, str]:
        """What was held back, when the text has ended."""
        held, self._held = self._held, ""
        return (held.rstrip("\n"), "") if self._state == "reasoning" else ("", held)

    def _rest_is_content(self) -> str:
        held, self._held, self._state = self._held, "", "content"
        return held


class AnswerStart:
    """Text in pieces of any size in, (what comes before the answer, answer) out, and nothing is lost: the thought, its
    tags and the newlines behind them come before. Held back is only what may be the beginning of a tag.
    """

    def __init__(self, thinking: Thinking) -> None:
        self._state = {Thinking.OFF: "answer", Thinking.POSSIBLE: "start", Thinking.OPENED: "thought"}[thinking]
        self._held = ""

    def feed(self, text: str) -> tuple[str, str]:
        """What is certain after this piece."""
        if self._state == "answer":
            return "", text
        text, self._held = self._held + text, ""
        if self._state == "start":
            begin = text.lstrip()
            if OPEN.startswith(begin):
                self._held = text
                return "", ""
            self._state = "thought" if begin.startswith(OPEN) else "answer"
            if self._state == "answer":
                return "", text
        before = ""
        if self._state == "thought":
            thought, tag, after = text.partition(CLOSE)
            if not tag:
                end = len(text) - held_back(text, CLOSE)
                self._held = text[end:]
                return text[:end], ""
            before, text, self._state = thought + tag, after, "gap"
        answer = text.lstrip("\n")
        if answer:
            self._state = "answer"
        return before + text[: len(text) - len(answer)], answer

    def flush(self) -> str:
        """What was held back, when the text has ended."""
        held, self._held = self._held, ""
        return held
