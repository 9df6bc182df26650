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
_PURE = {"wheel.cmake": "false"}
_CHILD = """
import json, sys
from scikit_build_core import build
folder, settings, answer = json.loads(sys.argv[1])
name = build.build_wheel(folder, settings)
open(answer, "w", encoding="utf-8").write(name)
"""

Settings = Mapping[str, Any]


def build_wheel(folder: str, settings: Settings | None = None, metadata_directory: str | None = None) -> str:
    """Build the wheel into `folder`, without native kernels if they do not build; returns its file name."""
    settings = settings or {}
    with tempfile.TemporaryDirectory() as scratch:
        answer = Path(scratch) / "wheel-name"
        if _succeeds(sys.executable, "-c", _CHILD, json.dumps([folder, dict(settings), str(answer)])):
            return answer.read_text(encoding="utf-8")
    try:
        # git ignores the log; `sdist.include` is scikit-build-core's way of taking an ignored file along all the same.
        return scikit_build.build_wheel(folder, {**settings, **_PURE, "sdist.include": ERROR_LOG.as_posix()})
    finally:
        ERROR_LOG.unlink()  # it is in the wheel now; the source tree stays as it was


def build_editable(folder: str, settings: Settings | None = None, metadata_directory: str | None = None) -> str:
    """An editable install runs from the source tree: that is where the library (or the error) has to be."""
    _succeeds(sys.executable, "tools/build_native.py")
    return scikit_build.build_editable(folder, {**(settings or {}), **_PURE})


def _succeeds(*command: str) -> bool:
    """Run it; if it fails, what it printed, its children (CMake, compiler) included, is in ERROR_LOG."""
    ERROR_LOG.unlink(missing_ok=True)
    kept = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        assert process.stdout is not None
        for line in process.stdout:
            kept.append(line.decode(errors="replace"))
            print(kept[-1], end="", flush=True)
    if process.returncode == 0:
        return True
    ERROR_LOG.parent.mkdir(exist_ok=True)
    ERROR_LOG.write_text("".join(kept), encoding="utf-8")
    print("\n*** the native kernels did not build: installing without them; `minipaged doctor` shows why", flush=True)
    return False
