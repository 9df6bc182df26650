"""Code blocks in the documentation: Python runs as it stands, and no command or flag is made up."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import typer

from minipaged.cli.main import app

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "README.zh.md", "CONTRIBUTING.md", "docs/index.md", "docs/server.md", "docs/gpu.md")


def blocks(page: str, language: str) -> list[str]:
    """The fenced blocks of one language, "" = of none."""
    text = (ROOT / page).read_text(encoding="utf-8")
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [block for of_language, block in fenced if of_language == language]


def command_lines(page: str) -> Iterator[list[str]]:
    """The words of each command in a block without a language; comments and `VARIABLE=value` in front are no part."""
    for block in blocks(page, ""):
        for line in block.splitlines():
            for command in re.sub(r"(^|\s)#.*", "", line).split(" && "):
                words = shlex.split(command)
                while words and re.match(r"[A-Z_]+=", words[0]):
                    del words[0]
                if words:
                    yield words


@pytest.mark.parametrize("page", ["README.md", "README.zh.md"])
def test_the_examples_run_and_print_what_they_say(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    examples = blocks(page, "python")
    assert len(examples) >= 3
    for example in examples:
        exec(compile(example, page, "exec"), {})
    printed = capsys.readouterr().out
    assert "ROMEO:" in printed
    assert "blocks_free=" in printed
    assert printed.split()[-2:] == ["36", "10"]


def test_the_eviction_policy_of_the_guide_does_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = blocks("CONTRIBUTING.md", "python")
    exec(compile(example, "CONTRIBUTING.md", "exec"), {})
    assert capsys.readouterr().out == "[2, 1, 0]\n"


def test_the_example_of_the_start_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = blocks("docs/index.md", "python")
    exec(compile(example, "docs/index.md", "exec"), {})
    assert "JULIET:" in capsys.readouterr().out


def check_minipaged(words: list[str]) -> None:
    """Parsed as the command line parses it; nothing runs."""
    command: Any = typer.main.get_command(app)
    while hasattr(command, "commands"):
        name, *words = words
        assert name in command.commands, f"there is no command {name}"
        command = command.commands[name]
    command.make_context(command.name, words)


def check_make(words: list[str]) -> None:
    """Targets exist; `NAME=value` is a variable that the Makefile reads."""
    makefile = (ROOT / "Makefile").read_text()
    for word in words:
        name, is_variable, _ = word.partition("=")
        assert f"$({name})" in makefile if is_variable else re.search(rf"^{name}:", makefile, re.MULTILINE), word


def check_python(words: list[str]) -> None:
    """The script exists and mentions its flags; `-m minipaged` as above; of pytest, the paths exist."""
    if words[:2] == ["-m", "minipaged"]:
        check_minipaged(words[2:])
    elif words[:2] == ["-m", "pytest"]:
        paths = [word for word in words[2:] if "/" in word]
        assert paths
        assert all((ROOT / path).exists() for path in paths), paths
    elif words[0] == "-c":
        compile(words[1], "-c", "exec")
    else:
        text = (ROOT / words[0]).read_text()
        assert [flag for flag in words[1:] if flag.startswith("-") and f'"{flag}"' not in text] == []


def check_pip(words: list[str]) -> None:
    """Extras exist."""
    project = (ROOT / "pyproject.toml").read_text()
    for extra in re.findall(r"\[(.*?)\]", " ".join(words)):
        assert re.search(rf"^{extra} = \[", project, re.MULTILINE), extra


CHECKS = {"minipaged": check_minipaged, "make": check_make, "python": check_python, "pip": check_pip}
OTHERS = {
    "cmake",
    "build/asan/mp_test_driver",
    "aarch64-linux-gnu-g++",
    "qemu-aarch64",
    "export",
    "source",
    "benchmarks/rivals/setup.sh",
}


@pytest.mark.parametrize("page", PAGES)
def test_commands_are_real(page: str) -> None:
    for name, *words in command_lines(page):
        assert name in CHECKS or name in OTHERS, f"{page}: {name} is new here, say how to check it"
        if name in CHECKS:
            CHECKS[name](words)


@pytest.mark.parametrize("line", ["generate x --colour", "lab", "bench nothing", "verify --max-tokens 0", "generate"])
def test_a_command_that_is_made_up_is_found(line: str) -> None:
    usage_error = typer.BadParameter.__mro__[1]  # Click's, or that of the Click inside Typer
    with pytest.raises((AssertionError, usage_error)):
        check_minipaged(line.split())


@pytest.mark.parametrize("page", PAGES)
def test_links_and_pictures_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", text) + re.findall(r'(?:src|srcset|href)="([^"#]+)', text)
    missing = [t for t in targets if "://" not in t and not ((ROOT / page).parent / t).exists()]
    assert missing == []


@pytest.mark.parametrize("figure", sorted((ROOT / "docs" / "figures").glob("*.svg")), ids=lambda path: path.name)
def test_pictures_bring_all_they_need(figure: Path) -> None:
    """Well-formed, and nothing is fetched when they are shown."""
    ElementTree.parse(figure)
    text = re.sub(r'xmlns(:\w+)?="[^"]*"', "", figure.read_text(encoding="utf-8"))
    assert re.findall(r"https?://[^\"'\s)]*|@import|@font-face", text) == []


def test_the_map_shows_the_imports_that_are_there() -> None:
    """After adding a module: python tools/draw_map.py."""
    command = [sys.executable, str(ROOT / "tools" / "draw_map.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_two_languages_tell_the_same() -> None:
    """The same examples, commands, pictures and results; only the words differ."""
    english, chinese = "README.md", "README.zh.md"
    assert list(command_lines(english)) == list(command_lines(chinese))
    bare = [[re.sub(r"#.*", "#", block) for block in blocks(page, "python")] for page in (english, chinese)]
    assert bare[0] == bare[1]
    numbers = [
        re.findall(r"\d+(?:\.\d+)?", re.findall(r"<!-- results -->(.*?)<!-- /results -->", text, re.DOTALL)[0])
        for text in ((ROOT / page).read_text(encoding="utf-8") for page in (english, chinese))
    ]
    assert sorted(numbers[0]) == sorted(numbers[1])
