"""Why the native kernels are missing: the error of the build that failed, and whether a compiler works here now."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

COMPILERS = ("c++", "g++", "clang++")  # after $CXX; CMake looks for these first
PROGRAM = "#include <omp.h>\nint main() { return omp_get_max_threads() < 1; }\n"
SECONDS = 60
LINES = 15
# What compilers, linkers, CMake and shells write in front of the reason.
_ERROR = re.compile(r"CMake Error|\berror: |\bundefined reference\b|command not found|Could NOT find|FileNotFoundError")


@dataclass(frozen=True, slots=True)
class BuildTrouble:
    """summary: one line; excerpt: the error itself as the compiler, CMake or the test here printed it; log: file with
    the whole output of the build, None if no build left one; works_now: a small OpenMP program compiles here.
    """

    summary: str
    excerpt: str
    log: Path | None
    works_now: bool


def explain_missing_library(log: Path, compile_test: Callable[[], str | None] | None = None) -> BuildTrouble:
    """log: where a failed build leaves its output. compile_test: the error of a small program, None if it works."""
    problem = (compile_test or try_compiler)()
    now = "a C++ compiler with OpenMP works here now" if problem is None else " ".join(problem.splitlines()[:2])
    if log.is_file():
        excerpt = first_error(log.read_text(encoding="utf-8", errors="replace"))
        summary = f"their build failed when minipaged was installed; {now}"
        return BuildTrouble(summary, excerpt, log, problem is None)
    return BuildTrouble(f"no build left an error; {now}", problem or "", None, problem is None)


def first_error(output: str) -> str:
    """The first error in the output of a build and the lines after it; the end if nothing looks like an error."""
    lines = [line.rstrip() for line in output.strip().splitlines()]
    at = next((index for index, line in enumerate(lines) if _ERROR.search(line)), max(0, len(lines) - LINES))
    return "\n".join(lines[at : at + LINES]).strip()


def try_compiler() -> str | None:
    """Compile a small OpenMP program with $CXX or the first compiler on PATH; what went wrong, or None."""
    given = shlex.split(os.environ.get("CXX", ""))
    found = given or [path for path in (shutil.which(name) for name in COMPILERS) if path][:1]
    if not found:
        return f"no C++ compiler: none of {', '.join(COMPILERS)} is on PATH, and CXX is not set"
    if shutil.which(found[0]) is None:
        return f"CXX={os.environ['CXX']}: there is no such program"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "test.cpp"
        source.write_text(PROGRAM)
        command = [*found, "-std=c++17", "-fopenmp", str(source), "-o", str(source.with_suffix(""))]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"{shlex.join(found)} does not run: {error}"
    if done.returncode == 0:
        return None
    said = first_error(done.stdout + done.stderr) or f"it printed nothing, exit status {done.returncode}"
    return f"{shlex.join(found)} does not compile a small OpenMP program:\n{said}"
