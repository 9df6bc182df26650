"""PEP 517 build backend: scikit-build-core's, plus a fallback that keeps the error.

If the native kernels do not build (no compiler, no OpenMP, an error of ours), the package is built again without them,
and everything that the failed build printed goes into it as `minipaged/_native/build_error.txt`, where
`minipaged doctor` finds it. pip shows a build's output only with -v or when the whole build fails.

There are no `prepare_metadata_*` hooks: whether the wheel is pure is known only when it has been built.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scikit_build_core import build as scikit_build
from scikit_build_core.build import (
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
]

ERROR_LOG = Path("src/minipaged/_native/build_error.txt")  # hooks run in the root of the source tree
_CHILD = """
import json, sys
from scikit_build_core import build
hook, folder, settings, answer = json.loads(sys.argv[1])
name = getattr(build, hook)(folder, settings)
open(answer, "w", encoding="utf-8").write(name)
"""

Settings = Mapping[str, Any]


def build_wheel(folder: str, settings: Settings | None = None, metadata_directory: str | None = None) -> str:
    """Build the wheel into `folder`, without native kernels if they do not build; returns its file name."""
    try:
        return _build("build_wheel", folder, settings or {})
    finally:
        ERROR_LOG.unlink(missing_ok=True)  # it is in the wheel now; the source tree stays as it was


def build_editable(folder: str, settings: Settings | None = None, metadata_directory: str | None = None) -> str:
    """The same for an editable install, which runs from the source tree: the error stays there."""
    return _build("build_editable", folder, settings or {})


def _build(hook: str, folder: str, settings: Settings) -> str:
    ERROR_LOG.unlink(missing_ok=True)
    name, output = _build_aloud(hook, folder, settings)
    if name is not None:
        return name
    print("\n*** the native kernels did not build: installing without them; `minipaged doctor` shows why", flush=True)
    ERROR_LOG.parent.mkdir(exist_ok=True)
    ERROR_LOG.write_text(output, encoding="utf-8")
    # git ignores the log; `sdist.include` is scikit-build-core's way of taking an ignored file along all the same.
    without = {**settings, "wheel.cmake": "false", "sdist.include": ERROR_LOG.as_posix()}
    wheel: str = getattr(scikit_build, hook)(folder, without)
    return wheel


def _build_aloud(hook: str, folder: str, settings: Settings) -> tuple[str | None, str]:
    """The wheel's name, None if it did not build, and everything that was printed meanwhile, by CMake and compiler too.

    A process of its own: what its children write straight to the terminal can be kept that way.
    """
    with tempfile.TemporaryDirectory() as scratch:
        answer = Path(scratch) / "wheel-name"
        call = json.dumps([hook, folder, dict(settings), str(answer)])
        command = [sys.executable, "-c", _CHILD, call]
        kept = []
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
            assert process.stdout is not None
            for line in process.stdout:
                kept.append(line.decode(errors="replace"))
                print(kept[-1], end="", flush=True)
        built = process.returncode == 0 and answer.is_file()
        return answer.read_text(encoding="utf-8") if built else None, "".join(kept)
