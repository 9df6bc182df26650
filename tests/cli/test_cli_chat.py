"""`minipaged chat` with lines from a pipe: exit status, streams, what errors say."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from minipaged.model.hub import resolve_model


def chat(lines: str | bytes, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, everything through pipes."""
    done = subprocess.run(
        [sys.executable, "-m", "minipaged", "chat", "--num-blocks", "64", *arguments],
        input=lines.encode() if isinstance(lines, str) else lines,
        capture_output=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100"},
        check=False,
    )
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


def test_lines_are_answered_and_only_answers_go_to_stdout(tmp_path: Path) -> None:
    saved = tmp_path / "chat.json"
    lines = f"Good morrow\n /what news?\n/save {saved}\n/exit\nnever read\n"
    done = chat(lines, "--system", "Be brief.", "--max-tokens", "40", "--temperature", "0")
    assert done.returncode == 0, done.stderr
    messages = json.loads(saved.read_text())
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "user", "assistant"]
    assert [messages[k]["content"] for k in (0, 1, 3)] == ["Be brief.", "Good morrow", "/what news?"]
    answers = "".join(f"{messages[k]['content']}\n" for k in (2, 4))
    assert done.stdout == f"{answers}5 messages are in {saved}.\n"
    assert "\x1b" not in done.stdout + done.stderr, "no escape codes into a pipe"
    assert "KV pool 64 blocks" in done.stderr
    assert ">>>" not in done.stdout + done.stderr


def test_the_end_of_the_input_is_the_end() -> None:
    done = chat("/set temperature 0.7", "--no-think")
    assert (done.returncode, done.stdout) == (0, "temperature = 0.7\n")


def test_a_line_that_fails_does_not_end_the_rest_but_shows_in_the_status() -> None:
    done = chat(b"/nonsense\n\xff\n" + b"word " * 600 + b"\n/think off\n")
    assert done.returncode == 1
    assert done.stdout == "Thinking is off.\n"
    said = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(said) == 3
    assert "/nonsense is no command: /help, " in said[0]
    assert "line 2 of the input is not UTF-8" in said[1]
    assert "512 tokens of context" in said[2]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["--temperature", "-1"], 2, "temperature"),
        (["--n", "2"], 2, "No such option"),
        (["--block-size", "0"], 2, "block_size"),
        (["./no-such-folder"], 1, "no-such-folder"),
    ],
)
def test_errors_before_the_first_line(arguments: list[str], status: int, said: str) -> None:
    done = chat("hi\n", *arguments)
    assert done.returncode == status, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(("closing", "name"), [("<&-", "input"), (">&-", "output")])
def test_closed_streams_are_one_line(closing: str, name: str) -> None:
    command = f"{sys.executable} -m minipaged chat --num-blocks 64 {closing}"
    done = subprocess.run(
        ["bash", "-c", command], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith(f"error: standard {name} is closed")


def test_a_model_without_a_chat_template_is_sent_to_generate(tmp_path: Path) -> None:
    folder = tmp_path / "base"
    shutil.copytree(resolve_model(), folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    done = chat("hi\n", str(folder))
    assert done.returncode == 2
    assert "has no chat template" in done.stderr
    assert "minipaged generate" in done.stderr
    assert "Traceback" not in done.stderr


def test_help_has_an_example_and_the_engines_flags() -> None:
    done = chat("", "--help")
    assert done.returncode == 0
    assert "Example:" in done.stdout
    for flag in ("--system", "--no-think", "--kv-cache-memory", "--temperature"):
        assert flag in done.stdout


def test_ctrl_c_ends_a_script() -> None:
    command = [sys.executable, "-u", "-m", "minipaged", "chat", "--backend", "reference", "--ignore-eos"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as process:  # type: ignore[call-overload]
        process.stdin.write(b"Good morrow\n/stats\n")
        process.stdin.close()
        process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 130
        said = process.stderr.read().decode()
        assert b"KV blocks" not in process.stdout.read()
    assert "[stopped" in said
    assert said.splitlines()[-1] == "interrupted"
