"""`minipaged chat` in a real terminal (a pty): keys go in, Ctrl-C among them."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import stat
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PATIENCE = 100  # seconds until a terminal that says nothing counts as hung
LAUNCH = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # the controlling terminal turns Ctrl-C into SIGINT
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
ESCAPES = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|[()].|[=>78])")
CTRL_C, CTRL_D, ENTER, ALT_ENTER, UP = "\x03", "\x04", "\r", "\x1b\r", "\x1b[A"


class Terminal:
    """A program whose controlling terminal is ours."""

    def __init__(self, process: subprocess.Popen[bytes], keyboard: int) -> None:
        self.process = process
        self._keyboard = keyboard
        self.raw = b""
        self._read_to = 0

    @property
    def seen(self) -> str:
        """Everything that was written, without escape sequences."""
        return ESCAPES.sub("", self.raw.decode("utf-8", errors="replace"))

    def type(self, keys: str) -> None:
        os.write(self._keyboard, keys.encode())

    def wait_for(self, pattern: str) -> re.Match[str]:
        """The next match after the last one."""
        give_up = time.monotonic() + PATIENCE
        while (found := re.compile(pattern).search(self.seen, self._read_to)) is None:
            if not self._read(give_up):
                raise AssertionError(f"{pattern!r} did not appear; the end of what did: {self.seen[-2000:]!r}")
        self._read_to = found.end()
        return found

    def status(self) -> int:
        """The exit status, once everything has been read."""
        while self._read(time.monotonic() + PATIENCE):
            pass
        return self.process.wait(PATIENCE)

    def _read(self, give_up: float) -> bool:
        ready, _, _ = select.select([self._keyboard], [], [], max(0.0, give_up - time.monotonic()))
        if not ready:
            return False
        try:
            data = os.read(self._keyboard, 65536)
        except OSError:  # EIO: the program has closed its side
            return False
        self.raw += data
        return bool(data)


@contextmanager
def terminal(state: Path, *arguments: str, **variables: str) -> Iterator[Terminal]:
    """`minipaged chat` with these arguments, at its first prompt."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 40, 100, 0, 0))  # rows, columns
    environment = {k: v for k, v in os.environ.items() if k != "NO_COLOR"}
    environment |= {"TERM": "xterm", "XDG_STATE_HOME": str(state), "PROMPT_TOOLKIT_NO_CPR": "1", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCH, "-m", "minipaged", "chat", "--num-blocks", "64", *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment | variables,
        start_new_session=True,
    )
    os.close(theirs)
    try:
        window = Terminal(process, ours)
        window.wait_for(r"/help lists")
        window.wait_for(">>>")
        yield window
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def test_ctrl_c_stops_the_answer_and_the_next_one_comes(tmp_path: Path) -> None:
    """The reference kernels are slow enough for a person, or a test, to interrupt them."""
    with terminal(tmp_path, "--backend", "reference", "--ignore-eos", "--temperature", "0") as window:
        window.type(f"Good morrow{ENTER}")
        window.wait_for(r"[A-Z]+:")  # an answer of the demo model begins with a speaker
        window.type(CTRL_C)
        window.wait_for(r"\[stopped; what is there stays")
        window.wait_for(">>>")

        window.type(f"/stats{ENTER}")
        generated = int(window.wait_for(r"cached; (\d+) generated")[1])
        assert 0 < generated < 400
        assert int(window.wait_for(r"context +(\d+) of 512 tokens, 1 turns")[1]) >= generated
        blocks = window.wait_for(r"(\d+) in use, (\d+) idle \(cached\), (\d+) free of 64")
        assert blocks[1] == "0"
        assert int(blocks[2]) + int(blocks[3]) == 64

        window.type(f"/set max_tokens 4{ENTER}")
        window.wait_for(r"max_tokens = 4")
        window.type(f"What news?{ENTER}")
        window.wait_for(r"\[cut at max_tokens = 4")
        window.type(f"/stats{ENTER}")
        assert int(window.wait_for(r"last answer +\d+ prompt tokens, (\d+) cached; 4 generated")[1]) > 0
        window.wait_for(r"2 turns")
        assert window.wait_for(r"(\d+) in use")[1] == "0"
        window.wait_for(">>>")
        window.type(CTRL_D)
        assert window.status() == 0
        assert "Traceback" not in window.seen


def test_ctrl_c_at_the_prompt_clears_the_line_and_twice_leaves(tmp_path: Path) -> None:
    with terminal(tmp_path) as window:
        window.type(f"half a line{CTRL_C}/think{ENTER}")
        window.wait_for(r"Thinking is left to")
        window.wait_for(">>>")
        window.type(CTRL_C)
        window.wait_for(r"Ctrl-C again or Ctrl-D leaves")
        window.wait_for(">>>")
        window.type(CTRL_C)
        assert window.status() == 0
        assert "error" not in window.seen


def test_several_lines_are_one_message(tmp_path: Path) -> None:
    saved = tmp_path / "chat.json"
    with terminal(tmp_path, "--max-tokens", "2", "--ignore-eos") as window:
        for message in (
            "\x1b[200~pasted\nin two\x1b[201~",
            f"alt{ALT_ENTER}enter",
            f"back\\{ENTER}slash",
            "你好 😀",
        ):
            window.type(message + ENTER)
            window.wait_for(r"\[cut at max_tokens")
            window.wait_for(">>>")
        window.type(f"/save {saved}{ENTER}")
        window.wait_for("8 messages are in")
        window.wait_for(">>>")
        window.type(f"/exit{ENTER}")
        assert window.status() == 0
    messages = json.loads(saved.read_text(encoding="utf-8"))
    assert [m["content"] for m in messages[::2]] == ["pasted\nin two", "alt\nenter", "back\nslash", "你好 😀"]


def test_lines_are_remembered_for_their_owner_only(tmp_path: Path) -> None:
    with terminal(tmp_path) as window:
        window.type(f"/think off{ENTER}")
        window.wait_for(r"Thinking is off\.")
        window.wait_for(">>>")
        window.type(CTRL_D)
        assert window.status() == 0
    (kept,) = tmp_path.rglob("chat_history")
    assert "/think off" in kept.read_text()
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    with terminal(tmp_path) as window:
        window.type(UP + ENTER)
        window.wait_for(r"Thinking is off\.")


def test_no_history_is_kept_if_it_is_not_wanted_or_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with terminal(tmp_path, "--no-history") as window:
        window.type(f"/think off{ENTER}")
        window.wait_for(r"Thinking is off\.")
    assert [path.name for path in tmp_path.rglob("*")] == ["file"]
    with terminal(tmp_path / "file") as window:
        assert "warning: no history is kept" in window.seen
        window.type(f"/think off{ENTER}")
        window.wait_for(r"Thinking is off\.")


def test_no_color_means_no_styles(tmp_path: Path) -> None:
    for variables, styled in (({}, True), ({"NO_COLOR": "1"}, False)):
        with terminal(tmp_path, "--max-tokens", "2", "--ignore-eos", **variables) as window:
            window.type(f"Good morrow{ENTER}")
            window.wait_for(r"\[cut at")
            assert (b"\x1b[2m[cut at" in window.raw) is styled
