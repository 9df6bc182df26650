"""Every kernel under the address and undefined behaviour sanitizers, on buffers that end where their data ends."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.timeout(1200)  # it compiles every instruction set
@pytest.mark.skipif(shutil.which("cmake") is None, reason="needs cmake and a C++ compiler")
def test_kernels_under_sanitizers(tmp_path: Path) -> None:
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        from build_native import build
    finally:
        sys.path.pop(0)
    build(tmp_path, "-DMP_SANITIZE=ON")
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=1", "OMP_NUM_THREADS": "2"}
    done = subprocess.run([tmp_path / "mp_test_driver"], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "portable: ok" in done.stdout
