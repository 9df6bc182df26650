"""Build the native CPU library into src/minipaged/_native, for work on a checkout (`pip install` does it by itself)."""

from __future__ import annotations

import argparse
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def build(build_dir: Path, *options: str) -> None:
    """Configure and build with CMake; raises CalledProcessError with the compiler's output on the terminal."""
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    subprocess.run(["cmake", "-S", str(ROOT), "-B", str(build_dir), *generator, *options], check=True)
    subprocess.run(["cmake", "--build", str(build_dir), "--parallel", "2"], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build-dir", type=Path, default=ROOT / "build" / "native")
    build_dir: Path = parser.parse_args().build_dir
    build(build_dir)
    target = ROOT / "src" / "minipaged" / "_native"
    target.mkdir(exist_ok=True)
    temporary = target / "libminipaged.so.new"  # a rename does not disturb a process that has the old one loaded
    shutil.copy2(build_dir / "libminipaged.so", temporary)
    temporary.replace(target / "libminipaged.so")
    (target / "build_error.txt").unlink(missing_ok=True)  # of an editable install that failed (build_backend.py)
    print(f"built {target / 'libminipaged.so'}")


if __name__ == "__main__":
    main()
