"""The lines with a slash, and how text is written."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from minipaged import LLM, SamplingParams
from minipaged.chat.commands import COMMANDS, SETTINGS, run
from minipaged.chat.editor import PipeReader
from minipaged.chat.screen import Screen
from minipaged.chat.session import Answer, ChatSession, Piece, Turn
from minipaged.cli.options import SAMPLING_FLAGS


def test_an_unknown_command_is_named_with_the_list(session: ChatSession) -> None:
    with pytest.raises(ValueError, match="/exti is no command") as caught:
        run("/exti", session)
    assert all(name in str(caught.value) for name in COMMANDS)


def test_help_names_every_command(session: ChatSession) -> None:
    shown = run("/help", session)
    assert isinstance(shown, str)
    assert [name for name in COMMANDS if not re.search(rf"^{name}\b", shown, re.MULTILINE)] == []


@pytest.mark.parametrize("line", ["/reset now", "/stats all", "/exit 3"])
def test_an_argument_where_none_belongs_is_an_error(session: ChatSession, line: str) -> None:
    with pytest.raises(ValueError, match="takes no argument"):
        run(line, session)


def test_exit_ends_the_lines(session: ChatSession) -> None:
    with pytest.raises(EOFError):
        run("/exit", session)


def test_system_shows_sets_and_removes(session: ChatSession) -> None:
    session.turns = [Turn("a", "b")]
    assert run("/system", session) == "There is no system prompt."
    assert "conversation goes on" in str(run("/system Be  brief.\nAlways.", session))
    assert run("/system", session) == session.system == "Be  brief.\nAlways."
    assert session.turns == [Turn("a", "b")]
    assert "removed" in str(run('/system ""', session))
    assert session.messages()[0]["role"] == "user"


def test_think(session: ChatSession) -> None:
    assert "template" in str(run("/think", session))
    assert run("/think off", session) == "Thinking is off."
    assert session.thinking is False
    assert run("/think on", session) == "Thinking is on."
    with pytest.raises(ValueError, match="'maybe'"):
        run("/think maybe", session)
    assert session.thinking is True


def test_every_sampling_flag_but_n_can_be_set_in_the_chat() -> None:
    assert {flag.name for flag in SAMPLING_FLAGS} - {"n"} <= set(SETTINGS)


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("/set temperature 0.7", "temperature", 0.7),
        ("/set top_k 5", "top_k", 5),
        ("/set top_k default", "top_k", None),
        ("/set min_p default", "min_p", None),
        ("/set ignore_eos true", "ignore_eos", True),
        ("/set stop END", "stop", ("END",)),
        ('/set stop ["a b", "\\n\\n"]', "stop", ("a b", "\n\n")),
        ("/set seed 7", "seed", 7),
    ],
)
def test_set(session: ChatSession, line: str, name: str, value: object) -> None:
    assert str(run(line, session)).startswith(f"{name} = ")
    assert getattr(session.params, name) == value


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/set temperature -1", "temperature must be .* got -1"),
        ("/set temperature warm", "temperature must be .* got 'warm'"),
        ("/set temperature NaN", "temperature must be"),
        ("/set temperature", "needs a value"),
        ("/set n 2", "'n' cannot be set: temperature"),
        ("/set max_tokens 0", "max_tokens must be"),
        ("/drop two", "'two'"),
        ("/drop 1", "has 0"),
        ("/save", "name of a file"),
        ("/save /no/such/folder/x.json", "cannot be written: No such file"),
    ],
)
def test_bad_arguments_change_nothing(session: ChatSession, line: str, said: str) -> None:
    before = session.params
    with pytest.raises(ValueError, match=said):
        run(line, session)
    assert session.params is before


def test_settings_show_where_a_value_comes_from(session: ChatSession) -> None:
    session.params = SamplingParams(top_p=0.5)
    shown = dict(line.split(maxsplit=1) for line in str(run("/set", session)).splitlines())
    assert list(shown) == list(SETTINGS)
    assert shown["top_p"] == "0.5"
    assert shown["top_k"] == "50 (the model's default)"  # the demo model's generation_config.json
    assert shown["max_tokens"] == "as many as fit"
    assert shown["stop"] == "none"


def test_a_fixed_seed_makes_retry_repeat_itself(session: ChatSession) -> None:
    session.params = SamplingParams(temperature=1.5, max_tokens=16)
    run("/set seed 7", session)
    first = "".join(piece.content for piece in session.ask("Good morrow").pieces())
    again = run("/retry", session)
    assert isinstance(again, Answer)
    assert "".join(piece.content for piece in again.pieces()) == first != ""


def test_stats_are_the_engines(llm: LLM, session: ChatSession) -> None:
    assert "0 of 512 tokens, 0 turns" in str(run("/stats", session))
    for question in ("Good morrow", "What news?"):
        list(session.ask(question).pieces())
    shown, pool, last = str(run("/stats", session)), llm.engine.stats(), session.answered[-1]
    assert f"{last.prompt_tokens} prompt tokens, {last.cached_tokens} cached; {last.generated_tokens} gen" in shown
    assert re.search(r"^last answer .* tok/s; first token \d+\.\d+ s$", shown, re.MULTILINE)
    assert f"{session.context_tokens()} of 512 tokens, 2 turns" in shown
    assert f"0 in use, {pool.blocks_idle} idle (cached), {pool.blocks_free} free of 64" in shown
    assert pool.blocks_idle > 0


def test_save_writes_messages_and_replaces_nothing(session: ChatSession, tmp_path: Path) -> None:
    session.system, session.turns = "S", [Turn("你好", "1")]
    target = tmp_path / "a chat.json"
    assert "3 messages" in str(run(f"/save {target}", session))
    assert json.loads(target.read_text(encoding="utf-8")) == session.messages()
    session.reset()
    with pytest.raises(ValueError, match="exists"):
        run(f"/save {target}", session)
    assert "你好" in target.read_text(encoding="utf-8")


def test_undo_names_what_it_forgets(session: ChatSession) -> None:
    session.turns = [Turn("a", "1"), Turn("second\nline", "2")]
    assert run("/undo", session) == "Forgotten: second"
    assert session.turns == [Turn("a", "1")]
    session.turns *= 3
    assert str(run("/drop 2", session)).startswith("1 turns are left")
    run("/reset", session)
    assert session.turns == []


# ---- lines in


def test_lines_of_a_pipe() -> None:
    reader = PipeReader(io.BytesIO("one\r\n\ntwo \\\n  három\nlast".encode()))
    assert [reader.read() for _ in range(4)] == ["one", "", "two \n  három", "last"]
    with pytest.raises(EOFError):
        reader.read()


def test_a_line_that_is_not_utf8_is_named_and_passed_over() -> None:
    reader = PipeReader(io.BytesIO(b"one\n\xff\xfe\nthree\n"))
    assert reader.read() == "one"
    with pytest.raises(ValueError, match="line 2 of the input is not UTF-8"):
        reader.read()
    assert reader.read() == "three"


def test_a_backslash_at_the_very_end_loses_nothing() -> None:
    reader = PipeReader(io.BytesIO(b"one\\\n"))
    assert reader.read() == "one\n"
    with pytest.raises(EOFError):
        reader.read()


# ---- text out

PIECES = [Piece("Hm", ""), Piece(".", ""), Piece("", "Yes\x1b[2J"), Piece("", "!")]


def shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *, terminal: bool) -> str:
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal, raising=False)
    screen = Screen()
    for piece in PIECES:
        screen.piece(piece)
    screen.end_answer()
    return capsys.readouterr().out


def test_a_terminal_gets_dim_thoughts_and_no_control_characters(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert shown(capsys, monkeypatch, terminal=True) == "\x1b[2mHm\x1b[0m\x1b[2m.\x1b[0m\n\nYes\ufffd[2J!\n"


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_a_terminal_without_styles_gets_tags(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv(name, value)
    assert shown(capsys, monkeypatch, terminal=True) == "<think>\nHm.\n</think>\n\nYes\ufffd[2J!\n"


def test_a_pipe_gets_no_escape_codes(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(capsys, monkeypatch, terminal=False) == "<think>\nHm.\n</think>\n\nYes!\n"


def test_a_thought_without_an_answer_is_closed(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen()
    screen.piece(Piece("Hm", ""))
    screen.end_answer()
    assert capsys.readouterr().out == "<think>\nHm\n</think>\n"


def test_params_are_checked_together(session: ChatSession) -> None:
    session.params = replace(session.params, max_tokens=4)
    with pytest.raises(ValueError, match="min_tokens must be at most max_tokens"):
        run("/set min_tokens 9", session)
