"""The loop with lines from a list: Ctrl-C as a signal that arrives in the middle of a step."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest

from minipaged import LLM
from minipaged.chat.loop import Loop
from minipaged.chat.screen import Screen
from minipaged.chat.session import ChatSession


class Lines:
    def __init__(self, *lines: str) -> None:
        self.left = list(lines)

    def read(self) -> str:
        if not self.left:
            raise EOFError
        return self.left.pop(0)


@pytest.fixture
def interrupted(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """interrupted(step, times): that often Ctrl-C during that forward pass, the first one being 1."""

    def arrange(step: int, times: int) -> None:
        execute, count = llm.engine.runner.execute, 0

        def noisy(plan: Any) -> Any:
            nonlocal count
            count += 1
            if count == step:
                for _ in range(times):
                    signal.raise_signal(signal.SIGINT)
            return execute(plan)

        monkeypatch.setattr(llm.engine.runner, "execute", noisy)

    return arrange


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("step", [1, 9])
def test_ctrl_c_in_a_step_ends_the_answer_alone(
    llm: LLM,
    session: ChatSession,
    interrupted: Callable[[int, int], None],
    capsys: pytest.CaptureFixture[str],
    step: int,
    times: int,
) -> None:
    before = signal.getsignal(signal.SIGINT)
    expected = llm.chat([{"role": "user", "content": "Good morrow"}], session.params, use_tqdm=False)[0].outputs[0]
    interrupted(step, times)
    loop = Loop(session, Screen(), Lines("Good morrow", "/stats", "/reset", "Good morrow"), interactive=True)
    loop.run()
    assert loop.failures == 0
    assert signal.getsignal(signal.SIGINT) is before
    captured = capsys.readouterr()
    assert captured.err.startswith("[stopped")
    assert "0 in use" in captured.out
    assert session.answered[0].generated_tokens == (step if times == 1 else step - 1), "the step was finished, or left"
    assert session.turns[-1].answer == expected.text, "the same question later is answered as if nothing had happened"
    assert captured.out.endswith(f"{expected.text}\n")


def test_ctrl_c_ends_a_loop_that_is_not_interactive(
    session: ChatSession, interrupted: Callable[[int, int], None]
) -> None:
    lines = Lines("Good morrow", "/reset")
    interrupted(5, 1)
    with pytest.raises(KeyboardInterrupt):
        Loop(session, Screen(), lines, interactive=False).run()
    assert lines.left == ["/reset"]
    assert session.turns[0].stopped


def test_a_failing_step_is_an_error_and_the_loop_goes_on(
    llm: LLM, session: ChatSession, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(plan: object) -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(llm.engine.runner, "execute", broken)
    loop = Loop(session, Screen(), Lines("Good morrow", "", "  ", "/think off"), interactive=True)
    loop.run()
    captured = capsys.readouterr()
    assert captured.out == "Thinking is off.\n"
    assert "error: RuntimeError: the device is gone" in captured.err
    assert loop.failures == 1


def test_an_answer_of_thoughts_alone_says_so(
    llm: LLM, session: ChatSession, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llm, "render_chat", lambda messages, **_: "<|im_start|>assistant\n<think>\n")
    Loop(session, Screen(), Lines("Good morrow"), interactive=True).run()
    assert "only thinking and no answer" in capsys.readouterr().err
