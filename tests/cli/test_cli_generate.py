"""`minipaged generate` as a user types it: exit status, streams, JSON, the drawing of the blocks."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from minipaged import KVBlockManager
from minipaged.cli.blocks_view import PoolSnapshot, print_pool
from minipaged.cli.generate import _warn_of_models


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, output into pipes, one thread so that busy machines do not matter."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    return subprocess.run(
        [sys.executable, "-m", "minipaged", *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        env=environment,
        check=False,
    )


def test_text_goes_to_stdout_and_the_figures_to_stderr() -> None:
    done = run("generate", "ROMEO:", "--max-tokens", "20", "--temperature", "0", "--num-blocks", "20", "--show-blocks")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert "20 generated tokens" in done.stderr
    assert "tok/s" in done.stderr
    assert "blocks used" in done.stderr
    assert "physical blocks: 2 in use" in done.stderr
    assert done.stderr.count("num_blocks = 20 holds requests of 321 tokens") == 1, "in the summary, no warning as well"
    assert "\x1b" not in done.stdout + done.stderr, "no colours into a pipe"


def test_json_is_one_object_with_every_prompt() -> None:
    done = run("generate", "ROMEO:", "JULIET:", "--n", "2", "--max-tokens", "5", "--json", "--num-blocks", "20")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert [out["prompt"] for out in result["outputs"]] == ["ROMEO:", "JULIET:"]
    assert [len(out["completions"]) for out in result["outputs"]] == [2, 2]
    assert result["generated_tokens"] == sum(
        len(c["token_ids"]) for out in result["outputs"] for c in out["completions"]
    )
    assert result["blocks_used"] >= 2
    assert done.stderr.startswith("warning: num_blocks = 20 holds"), "there is no summary that would say it"
    assert len(done.stderr.splitlines()) == 1


def test_the_same_seed_gives_the_same_text_and_another_one_does_not() -> None:
    texts = [
        run("generate", "ROMEO:", "--max-tokens", "12", "--seed", seed, "--num-blocks", "40").stdout
        for seed in ("5", "5", "6")
    ]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["generate"], 2, "prompts"),
        (["generate", "hi", "--temperature", "-1"], 2, "temperature"),
        (["generate", "hi", "--max-tokens", "0"], 2, "max_tokens"),
        (["generate", ""], 2, "empty"),
        (["generate", "hi", "--no-such-flag"], 2, "No such option"),
        (["generate", "hi", "--max-tokens", "100000"], 2, "max_model_len"),
        (["generate", "hi", "--block-size", "0"], 2, "block_size"),
        (["generate", "hi", "--log-level", "loud"], 2, "log"),
        (["generate", "hi", "--model", "./no-such-folder"], 1, "no-such-folder"),
        (["generate", "hi", "--backend", "abacus"], 2, "abacus"),
        (["generate", "hi", "--device", "cuda:99"], 2, "device"),
    ],
)
def test_errors_are_short_and_have_the_right_status(arguments: list[str], status: int, said: str) -> None:
    done = run(*arguments)
    assert done.returncode == status, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_debug_shows_where_an_error_came_from() -> None:
    done = run("generate", "hi", "--model", "./no-such-folder", "--debug")
    assert done.returncode == 1
    assert "Traceback" in done.stderr


def test_help_has_an_example() -> None:
    done = run("generate", "--help")
    assert done.returncode == 0
    assert "Example:" in done.stdout
    assert "--max-num-batched-tokens" in done.stdout.replace("…", "") or "--max-num-batched" in done.stdout


def test_the_drawing_shows_owners_sharing_and_partial_blocks() -> None:
    """The article's two tables, and a fork of the second: shared blocks are marked, counts are right."""
    manager = KVBlockManager(10, 4, free_order=[5, 2, 1, 7, 9, 0, 3, 4, 6, 8])
    manager.create_sequence(0)
    manager.append_tokens(0, 7)
    manager.create_sequence(1)
    manager.append_tokens(1, 12)
    manager.fork_sequence(1, 2)
    console = Console(width=100, record=True, file=io.StringIO(), force_terminal=False)
    print_pool(PoolSnapshot.of(manager), console)
    drawn = console.export_text()
    assert "5 in use, 0 idle, 5 free of 10, 4 tokens each" in drawn
    assert "5:4 2:3" in drawn  # sequence 0: block 2 is partial
    assert drawn.count("1*:4 7*:4 9*:4") == 2  # sequences 1 and 2 share
    assert " 0." in drawn  # free


def test_a_device_that_is_not_there_is_one_line() -> None:
    done = run("generate", "hi", "--device", "cuda:99")
    assert done.returncode == 2
    assert done.stderr.startswith("error: device = 'cuda:99', but PyTorch sees")
    assert "Traceback" not in done.stderr


def test_a_reader_that_leaves_early_is_no_error_message() -> None:
    """`minipaged generate ... | head -c 1`: the pipe breaks in the middle of the text."""
    command = f"{sys.executable} -m minipaged generate ROMEO: --max-tokens 60 --ignore-eos --num-blocks 8 | head -c 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=240, check=False)
    assert len(done.stdout) == 1
    assert "error" not in done.stderr
    assert "Broken pipe" not in done.stderr


def test_ctrl_c_shows_what_there_is_and_is_no_success() -> None:
    """With the slowest back end, so that the signal comes before the end."""
    command = [sys.executable, "-u", "-m", "minipaged", "generate", "ROMEO:", "--ignore-eos", "--max-tokens", "500"]
    with subprocess.Popen(
        [*command, "--backend", "reference"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        errors = process.stderr.read().decode()
        assert process.wait(60) == 130
    assert errors.splitlines()[-1] == "interrupted"
    assert "generated tokens" in errors


def test_a_prompt_that_looks_like_a_model_is_questioned(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for prompt in ("Qwen/Qwen3-0.6B", str(tmp_path)):
        done = run("generate", prompt, "hello", "--max-tokens", "1", "--json", "--num-blocks", "20")
        assert done.returncode == 0, done.stderr
        assert f"warning: {prompt!r} looks like a model" in done.stderr
        assert f"--model {prompt}" in done.stderr
        assert [out["prompt"] for out in json.loads(done.stdout)["outputs"]] == [prompt, "hello"]


def test_prompts_that_are_texts_are_not_questioned(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes").mkdir()  # a folder, but not a model's
    monkeypatch.chdir(tmp_path)
    _warn_of_models(["ROMEO:", "yes and/or no", "x" * 5000, "~nobody-of-that-name", "nul\0", "notes", "."])
    assert capsys.readouterr().err == ""
