"""The path of one request can be read in one sitting: the files that it crosses are counted, and bounded."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import minipaged
from test_structure import ROOT, python_lines

PACKAGE = Path(minipaged.__file__).parent

BUDGET = 3200
"""Lines of code (no docstrings, comments, blanks) in all files of the package that one greedy `LLM.generate` calls into
after the load. Whoever adds to the path raises it in the same commit, and says why."""

CHILD = """
import sys, threading
from minipaged import LLM, SamplingParams
with LLM(num_blocks=64) as llm:
    files = set()
    def called(frame, event, argument):
        if event == "call":
            files.add(frame.f_code.co_filename)
    threading.setprofile(called)
    sys.setprofile(called)
    llm.generate("ROMEO:", SamplingParams(temperature=0.0, max_tokens=8), use_tqdm=False)
    sys.setprofile(None)
print("\\n".join(sorted(files)))
"""


def test_one_request_crosses_no_more_code_than_can_be_read_in_one_sitting() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, "-c", CHILD], capture_output=True, text=True, check=False, env=environment, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    crossed = [Path(line) for line in done.stdout.splitlines() if PACKAGE in Path(line).parents]
    lines = {path.as_posix(): python_lines(path.read_text(encoding="utf-8")) for path in crossed if path.is_file()}
    assert len(lines) > 15, lines
    assert sum(lines.values()) <= BUDGET, lines
