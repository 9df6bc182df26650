"""What a line that begins with a slash does."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minipaged.sampling_params import SamplingParams

if TYPE_CHECKING:
    from minipaged.chat.session import Answer, AnswerStats, ChatSession

    Reply = str | Answer
    Action = Callable[[ChatSession, str], Reply]

SETTINGS = (
    "temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens", "stop", "ignore_eos", "seed",
    "presence_penalty", "frequency_penalty", "repetition_penalty",
)  # fmt: skip
"""Fields of `SamplingParams` that /set changes."""


@dataclass(frozen=True, slots=True)
class Command:
    """A command: what may follow its name ("" = nothing), one line of help, and what it does with session and
    argument: the text of a reply, or an answer to be shown as it comes. EOFError leaves the program, ValueError says
    what is wrong.
    """

    argument: str
    help: str
    run: Action


def run(line: str, session: ChatSession) -> Reply:
    """Do what a line with a slash says. ValueError names an unknown command, or an argument where none belongs."""
    name, *rest = line.split(maxsplit=1)
    argument = rest[0].strip() if rest else ""
    command = COMMANDS.get(name)
    if command is None:
        raise ValueError(
            f"{name} is no command: {', '.join(COMMANDS)} (a message may begin with a slash after a space)"
        )
    if argument and not command.argument:
        raise ValueError(f"{name} takes no argument, got {argument!r}")
    return command.run(session, argument)


def _help(session: ChatSession, argument: str) -> str:
    usages = {f"{name} {command.argument}".rstrip(): command.help for name, command in COMMANDS.items()}
    width = max(map(len, usages)) + 2
    lines = [f"{usage:<{width}}{text}" for usage, text in usages.items()]
    keys = "Ctrl-C stops an answer or clears the line, twice or Ctrl-D leaves; Alt-Enter or \\ Enter: a new line."
    return "\n".join([*lines, "", keys])


def _reset(session: ChatSession, argument: str) -> str:
    session.reset()
    return "The conversation starts anew" + (", with the same system prompt." if session.system else ".")


def _system(session: ChatSession, argument: str) -> str:
    if not argument:
        return session.system or "There is no system prompt."
    session.system = "" if argument in ('""', "''") else argument
    done = "The system prompt is set." if session.system else "The system prompt is removed."
    # Its tokens come first, so nothing cached matches any more.
    later = " The conversation goes on, and the next answer computes all of it again; /reset starts anew."
    return done + (later if session.turns else "")


def _think(session: ChatSession, argument: str) -> str:
    if argument not in ("", "on", "off"):
        raise ValueError(f"/think takes on or off, got {argument!r}")
    if argument:
        session.thinking = argument == "on"
    state = {True: "on", False: "off", None: "left to the model's chat template"}[session.thinking]
    return f"Thinking is {state}."


def _set(session: ChatSession, argument: str) -> str:
    name, _, text = argument.partition(" ")
    if not name:
        return _settings(session)
    if name not in SETTINGS:
        raise ValueError(f"{name!r} cannot be set: {', '.join(SETTINGS)}")
    if not text.strip():
        raise ValueError(f"/set {name} needs a value, or `default`")
    change: dict[str, Any] = {name: _parsed(name, text.strip())}
    session.params = replace(session.params, **change)
    return f"{name} = {_shown(session, name)}"


def _parsed(name: str, text: str) -> object:
    """A value as JSON writes it, else the text itself; `SamplingParams` checks it."""
    if text == "default":
        return next(f.default for f in fields(SamplingParams) if f.name == name)
    try:
        return json.loads(text)
    except ValueError:
        return text


def _settings(session: ChatSession) -> str:
    width = max(map(len, SETTINGS)) + 2
    return "\n".join(f"{name:<{width}}{_shown(session, name)}" for name in SETTINGS)


def _shown(session: ChatSession, name: str) -> str:
    """A setting's value, and where it comes from if nobody gave it."""
    given = getattr(session.params, name)
    if given not in (None, [], ()):
        return json.dumps(given, ensure_ascii=False)
    if name in ("max_tokens", "seed", "stop"):
        return {"max_tokens": "as many as fit", "seed": "a new one each time", "stop": "none"}[name]
    resolved = session.params.resolve(session.llm.engine.config.generation_defaults, session.context_limit)
    return f"{getattr(resolved, name)} (the model's default)"


def _stats(session: ChatSession, argument: str) -> str:
    pool, manager = session.llm.engine.stats(), session.llm.engine.block_manager
    rows = {}
    if session.answered:
        last = session.answered[-1]
        first = "no token" if last.first_token_s is None else f"first token {last.first_token_s:.3f} s"
        rows["last answer"] = f"{_tokens(last)}; {first}"
        rows[f"all {len(session.answered)}"] = _tokens(session.total())
    rows["context"] = f"{session.context_tokens()} of {session.context_limit} tokens, {len(session.turns)} turns"
    rows["KV blocks"] = (
        f"{pool.blocks_in_use} in use, {pool.blocks_idle} idle (cached), {pool.blocks_free} free "
        f"of {pool.blocks_total}, {manager.block_size} tokens each"
    )
    return "\n".join(f"{name:<13}{text}" for name, text in rows.items())


def _tokens(stats: AnswerStats) -> str:
    rate = "" if stats.decode_tok_s is None else f" at {stats.decode_tok_s:.1f} tok/s"
    return (
        f"{stats.prompt_tokens} prompt tokens, {stats.cached_tokens} cached; {stats.generated_tokens} generated{rate}"
    )


def _retry(session: ChatSession, argument: str) -> Answer:
    return session.retry()


def _undo(session: ChatSession, argument: str) -> str:
    turn = session.undo()
    return f"Forgotten: {turn.question.splitlines()[0]:.60}"


def _drop(session: ChatSession, argument: str) -> str:
    if argument and not argument.isdecimal():
        raise ValueError(f"/drop takes a number of turns, got {argument!r}")
    session.drop(int(argument or 1))
    return f"{len(session.turns)} turns are left, {session.context_tokens()} of {session.context_limit} tokens."


def _save(session: ChatSession, argument: str) -> str:
    if not argument:
        raise ValueError("/save needs the name of a file")
    path = Path(argument).expanduser()
    try:
        with path.open("x", encoding="utf-8") as file:
            json.dump(session.messages(), file, ensure_ascii=False, indent=2)
            file.write("\n")
    except FileExistsError:
        raise ValueError(f"{path} exists: choose another name") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.strerror}") from error
    return f"{len(session.messages())} messages are in {path}."


def _exit(session: ChatSession, argument: str) -> str:
    raise EOFError


COMMANDS = {
    "/help": Command("", "This list.", _help),
    "/reset": Command("", "Forget the conversation; system prompt and settings stay.", _reset),
    "/system": Command("[TEXT]", 'Show the system prompt, or set it ("" removes it); the conversation stays.', _system),
    "/think": Command("[on|off]", "Show or switch thinking before an answer.", _think),
    "/set": Command("[NAME VALUE]", "Show or change how answers are sampled: /set temperature 0.7", _set),
    "/stats": Command("", "Tokens, speed, prefix cache, context and KV blocks.", _stats),
    "/retry": Command("", "Answer the last message again.", _retry),
    "/undo": Command("", "Forget the last message and its answer.", _undo),
    "/drop": Command("[N]", "Forget the N oldest turns (1).", _drop),
    "/save": Command("FILE", "Write the conversation to a new file, as JSON messages.", _save),
    "/exit": Command("", "Leave, as Ctrl-D does.", _exit),
}
