"""A conversation: its turns, the prompt that the chat template makes of them, and one answer at a time.

The whole conversation is rendered anew for each answer. It begins as the last prompt did, so the prefix cache gives
back the blocks of all earlier turns, and only what is new is computed.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from minipaged.errors import RequestTooLargeError
from minipaged.sampling_params import SamplingParams
from minipaged.text.reasoning import ReasoningSplitter, thinking_after

if TYPE_CHECKING:
    from minipaged.engine.request import Request
    from minipaged.llm.llm import LLM
    from minipaged.outputs import FinishReason

    Message = dict[str, str]


class Piece(NamedTuple):
    """What is new of an answer; either part may be empty."""

    reasoning: str
    content: str


@dataclass(frozen=True, slots=True)
class Turn:
    """A question and its answer, without the reasoning: that never goes back into a prompt, as in Qwen3's template."""

    question: str
    answer: str
    stopped: bool = False


@dataclass(frozen=True, slots=True)
class AnswerStats:
    """Numbers of one answer, or their sums over several.

    cached_tokens: the part of prompt_tokens that the prefix cache held. first_token_s: seconds until the first token,
    None if there was none. decoded_tokens: generated tokens after the first, which took decode_s seconds.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    first_token_s: float | None = None
    decoded_tokens: int = 0
    decode_s: float = 0.0

    @property
    def decode_tok_s(self) -> float | None:
        """Tokens per second after the first one; None if there were none."""
        return self.decoded_tokens / self.decode_s if self.decoded_tokens and self.decode_s > 0 else None


class ChatSession:
    """One conversation with one model. Use it from one thread, and let one answer end before the next begins.

    system: the system prompt, "" = none. params: how answers are sampled, `n` must be 1; None = the model's defaults.
    ValueError if the model has no tokenizer or no chat template. `system` and `params` may be changed between answers.
    """

    def __init__(self, llm: LLM, params: SamplingParams | None = None, *, system: str = "") -> None:
        loaded = llm.loaded
        if loaded.tokenizer is None or loaded.chat_template is None:
            missing = "tokenizer" if loaded.tokenizer is None else "chat template"
            raise ValueError(
                f"{loaded.source.name} has no {missing}, so it cannot chat: "
                "`minipaged generate PROMPT --model MODEL` continues a text without one"
            )
        self.llm = llm
        self.params = params or SamplingParams()
        if self.params.n != 1:
            raise ValueError(f"n must be 1 in a chat, got {self.params.n}")
        self.system = system
        self.turns: list[Turn] = []
        self.answered: list[AnswerStats] = []
        """One entry per answer since the start, forgotten turns included."""
        self._tokenizer = loaded.tokenizer
        self._template = loaded.chat_template
        self._thinking: bool | None = None
        self._numbers = itertools.count()

    # ---- answers

    def ask(self, question: str) -> Answer:
        """The answer to a message, still to be computed. ValueError if it is empty or no longer fits the context; the
        conversation is as before then.
        """
        if not question.strip():
            raise ValueError("the message is empty")
        return self._answer(self.turns, question)

    def retry(self) -> Answer:
        """Another answer to the last message; it replaces the old one as soon as there is any of it."""
        if not self.turns:
            raise ValueError("there is no message to answer again")
        return self._answer(self.turns[:-1], self.turns[-1].question)

    def _answer(self, earlier: Sequence[Turn], question: str) -> Answer:
        try:
            request = self._request(earlier, question)
        except RequestTooLargeError as error:
            raise RequestTooLargeError(self._too_long(earlier, question)) from error
        return Answer(self, earlier, question, request)

    def _request(self, earlier: Sequence[Turn], question: str) -> Request:
        text, token_ids = self._prompt(earlier, question)
        request_id = f"chat-{next(self._numbers)}"
        return self.llm.engine.prepare(request_id, token_ids, self.params, prompt_text=text)

    def _prompt(self, earlier: Sequence[Turn], question: str) -> tuple[str, list[int]]:
        messages = [*self._messages(earlier), {"role": "user", "content": question}]
        text = self.llm.render_chat(messages, **self._template_variables())
        return text, self._tokenizer.encode(text, add_special_tokens=False)

    def _too_long(self, earlier: Sequence[Turn], question: str) -> str:
        """What does not fit, and the shortest way out."""
        limit, asked = self.context_limit, self.params.max_tokens
        lengths = [len(self._prompt(earlier[k:], question)[1]) for k in range(len(earlier) + 1)]
        wanted = "at least 1 new one" if asked is None else f"max_tokens = {asked} new ones"
        said = f"the conversation no longer fits: {lengths[0]} prompt tokens + {wanted} > {limit} tokens of context"
        if lengths[-1] + (asked or 1) > limit:
            shorter = "shorten the message or the system prompt"
            return f"{said}; the message alone makes {lengths[-1]}: {shorter}{', lower max_tokens' if asked else ''}"
        # An answer of one token is no way out: a quarter of the context should be left for it.
        room = asked or limit // 4
        drop = next((k for k, length in enumerate(lengths) if length + room <= limit), len(earlier))
        oldest = "the oldest turn" if drop == 1 else f"the {drop} oldest turns"
        return f"{said}. It was not sent. /drop {drop} forgets {oldest}, /reset all of them"

    def _settle(self, answer: Answer, stats: AnswerStats) -> None:
        """An answer has ended."""
        self.answered.append(stats)
        if answer.kept:
            self.turns = [*answer.earlier, Turn(answer.question, answer.content, answer.finish_reason == "abort")]

    # ---- the conversation

    def messages(self) -> list[Message]:
        """The conversation in the form of OpenAI's API."""
        return self._messages(self.turns)

    def _messages(self, turns: Sequence[Turn]) -> list[Message]:
        messages = [{"role": "system", "content": self.system}] if self.system else []
        for turn in turns:
            messages += [{"role": "user", "content": turn.question}, {"role": "assistant", "content": turn.answer}]
        return messages

    def reset(self) -> None:
        """Forget every turn; system prompt and settings stay."""
        self.turns = []

    def undo(self) -> Turn:
        """Forget the last turn and return it. ValueError if there is none."""
        if not self.turns:
            raise ValueError("there is no turn to undo")
        self.turns, last = self.turns[:-1], self.turns[-1]
        return last

    def drop(self, count: int) -> None:
        """Forget the oldest turns. ValueError if there are not so many."""
        if not 1 <= count <= len(self.turns):
            raise ValueError(f"{count} turns cannot be dropped: the conversation has {len(self.turns)}")
        self.turns = self.turns[count:]

    # ---- thinking

    @property
    def thinking(self) -> bool | None:
        """`enable_thinking` as the chat template gets it; None = not given, the template decides."""
        return self._thinking

    @thinking.setter
    def thinking(self, wanted: bool | None) -> None:
        """ValueError if the chat template does not read it."""
        if wanted is not None and not any("enable_thinking" in text for text in self._template.templates.values()):
            raise ValueError(
                f"{self.llm.loaded.source.name}'s chat template has no switch for thinking (enable_thinking)"
            )
        self._thinking = wanted

    def _template_variables(self) -> dict[str, bool]:
        return {} if self._thinking is None else {"enable_thinking": self._thinking}

    # ---- numbers

    @property
    def context_limit(self) -> int:
        """Most tokens of prompt and answer together: `max_model_len`, or what the pool holds if that is less."""
        return self.llm.engine.room_for(0)

    def context_tokens(self) -> int:
        """Tokens of the conversation as the next prompt will hold them."""
        messages = self.messages()
        if not messages:
            return 0
        text = self.llm.render_chat(messages, add_generation_prompt=False, **self._template_variables())
        return len(self._tokenizer.encode(text, add_special_tokens=False))

    def total(self) -> AnswerStats:
        """Sums over all answers since the start; `first_token_s` is None."""
        return AnswerStats(
            prompt_tokens=sum(stats.prompt_tokens for stats in self.answered),
            cached_tokens=sum(stats.cached_tokens for stats in self.answered),
            generated_tokens=sum(stats.generated_tokens for stats in self.answered),
            decoded_tokens=sum(stats.decoded_tokens for stats in self.answered),
            decode_s=sum(stats.decode_s for stats in self.answered),
        )


class Answer:
    """An answer on its way. Iterate over `pieces`; nothing is computed before.

    However it ends, its blocks are free or idle afterwards. It becomes part of the conversation (`kept`) if it has come
    to its end, or if it was stopped and some of its content is there: what the user has read, the model knows too.
    """

    def __init__(self, session: ChatSession, earlier: Sequence[Turn], question: str, request: Request) -> None:
        self.earlier = earlier
        self.question = question
        self.reasoning = ""
        self.content = ""
        self.finish_reason: FinishReason | None = None
        self.error: str | None = None
        self.computing = False
        """Whether a step is running: the one part of `pieces` that takes time, and that an exception may interrupt."""
        self._session = session
        self._request = request
        self._splitter = ReasoningSplitter(thinking_after(request.prompt or "", enable_thinking=session.thinking))
        self._num_read = 0
        self._stopped = False

    @property
    def kept(self) -> bool:
        """Whether it is in the conversation, now that it has ended."""
        return self.finish_reason in ("stop", "length") or (self.finish_reason == "abort" and bool(self.content))

    @property
    def filled_context(self) -> bool:
        """Whether it was cut because the context is full."""
        return self.finish_reason == "length" and self._session.params.max_tokens is None

    @property
    def stopped(self) -> bool:
        """Whether `stop` has been called."""
        return self._stopped

    def stop(self) -> None:
        """End it after the step that is running. May be called from a signal handler."""
        self._stopped = True

    def pieces(self) -> Generator[Piece, None, None]:
        """Compute it, step by step, and yield what is new after each. Close the generator if you leave early."""
        engine = self._session.llm.engine
        engine.submit(self._request)
        try:
            while not (self._request.finished or self._stopped):
                self._step()
                yield self._read()
            engine.drop(self._request)
            yield self._read()
        finally:
            engine.drop(self._request)
            self._read()
            self._session._settle(self, self._stats())

    def _step(self) -> None:
        self.computing = True
        try:
            self._session.llm.engine.step()
        finally:
            self.computing = False

    def _read(self) -> Piece:
        """What has come since the last call; everything that was held back, once the request is over."""
        output = self._request.output().outputs[0]
        reasoning, content = self._splitter.feed(output.text[self._num_read :])
        self._num_read = len(output.text)
        if output.finished:
            more_reasoning, more_content = self._splitter.finish()
            reasoning, content = reasoning + more_reasoning, content + more_content
        self.reasoning += reasoning
        self.content += content
        self.finish_reason, self.error = output.finish_reason, output.error
        return Piece(reasoning, content)

    def _stats(self) -> AnswerStats:
        output = self._request.output()
        times, generated = self._request.metrics, len(output.outputs[0].token_ids)
        first, end = times.first_token_time, times.finished_time
        return AnswerStats(
            prompt_tokens=len(output.prompt_token_ids),
            cached_tokens=output.num_cached_tokens or 0,
            generated_tokens=generated,
            first_token_s=None if first is None else first - times.arrival_time,
            decoded_tokens=max(generated - 1, 0),
            decode_s=0.0 if first is None or end is None else end - first,
        )
