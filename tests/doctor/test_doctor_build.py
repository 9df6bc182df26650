"""The error of a native build that failed: kept by the build backend, found and shown by doctor."""

from __future__ import annotations

import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from minipaged.doctor import native_build
from minipaged.doctor.backends import backends
from minipaged.doctor.installation import Installation
from minipaged.doctor.native_build import explain_missing_library, first_error, try_compiler
from minipaged.ops.cpu import library as native_library

ROOT = Path(__file__).parents[2]
GCC = """\
*** Configuring CMake...
-- Check for working CXX compiler: /usr/bin/c++ - skipped
[1/6] Building CXX object CMakeFiles/mp_avx2.dir/native/kernels.cpp.o
FAILED: CMakeFiles/mp_avx2.dir/native/kernels.cpp.o
/usr/bin/c++ -Werror=return-type -o kernels.cpp.o -c kernels.cpp
native/probe.h:11:16: error: expected initializer before 'broken'
   11 | int read_probe broken(const mp_probe* a) {
ninja: build stopped: subcommand failed.
"""
CMAKE = "-- Detecting\nCMake Error at CMakeLists.txt:3 (project):\n  No CMAKE_CXX_COMPILER could be found.\n"


def test_the_first_error_is_found_among_the_rest() -> None:
    assert first_error(GCC).splitlines()[0] == "native/probe.h:11:16: error: expected initializer before 'broken'"
    assert first_error(CMAKE) == CMAKE.split("\n", 1)[1].strip()
    strange = "\n".join(f"line {i}" for i in range(100))
    assert first_error(strange).splitlines() == [f"line {i}" for i in range(100 - native_build.LINES, 100)]
    assert first_error("") == ""


def test_a_kept_log_is_explained(tmp_path: Path) -> None:
    log = tmp_path / "build_error.txt"
    log.write_text(GCC)
    trouble = explain_missing_library(log, compile_test=lambda: None)
    assert "expected initializer before 'broken'" in trouble.excerpt
    assert (trouble.log, trouble.works_now) == (log, True)
    trouble = explain_missing_library(log, compile_test=lambda: "no C++ compiler: none")
    assert trouble.summary.endswith("no C++ compiler: none")
    assert not trouble.works_now


def test_without_a_log_the_compiler_is_tried(tmp_path: Path) -> None:
    trouble = explain_missing_library(tmp_path / "none", compile_test=lambda: "c++ does not compile:\nomp.h not found")
    assert trouble.log is None
    assert "omp.h not found" in trouble.excerpt


def _compiler(folder: Path, script: str) -> Path:
    path = folder / "c++"
    path.write_text(f"#!{sys.executable}\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_the_compiler_on_the_path_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert try_compiler() == "no C++ compiler: none of c++, g++, clang++ is on PATH, and CXX is not set"
    _compiler(tmp_path, "import sys; sys.exit('test.cpp:1:10: fatal error: omp.h: No such file or directory')")
    assert "fatal error: omp.h: No such file" in (try_compiler() or "")
    _compiler(tmp_path, "import sys; sys.exit('-fopenmp' not in sys.argv)")
    assert try_compiler() is None
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    assert "there is no such program" in (try_compiler() or "")


@pytest.mark.parametrize("kept", [True, False])
def test_a_missing_library_is_a_warning_with_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    """The back end's reason, the compiler's words, and the command that builds again."""
    monkeypatch.setattr(native_library, "LIBRARY", tmp_path / "libminipaged.so")
    monkeypatch.setattr(native_library, "BUILD_LOG", tmp_path / "build_error.txt")
    monkeypatch.setenv("CXX", "no-such-compiler")
    if kept:
        (tmp_path / "build_error.txt").write_text(GCC)
    native_library.load_library.cache_clear()
    try:
        found = {f.name: f for f in backends(Installation("wheel", Path("/src/minipaged"), "py3-none-any"), "cpu")}
    finally:
        native_library.load_library.cache_clear()
    cpu = found["back end cpu"]
    assert cpu.state == "warning"
    assert cpu.facts["reason"] == cpu.why
    expected = "error: expected initializer" if kept else "CXX=no-such-compiler: there is no such program"
    assert expected in cpu.facts["build_error"]
    assert "pip install -v --no-cache-dir --force-reinstall --no-deps /src/minipaged" in cpu.advice
    assert found["back end torch"].state == "ok"


def test_an_older_library_after_a_failed_build_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if native_library.unavailable_reason("cpu") is not None:
        pytest.skip("the native library is not built here")
    log = tmp_path / "build_error.txt"
    monkeypatch.setattr(native_library, "BUILD_LOG", log)
    log.write_text(CMAKE)
    cpu = next(f for f in backends(Installation("editable", None, None), "cpu") if f.name == "back end cpu")
    assert (cpu.state, cpu.facts["reason"]) == ("warning", None)
    assert "CMAKE_CXX_COMPILER" in cpu.facts["build_error"]


# ---- tools/build_backend.py, with a scikit-build-core that stands in for the real one

STAND_IN = '''
"""Fails as a compilation does, words on the terminal from a child process, unless told to leave CMake out."""
import pathlib, subprocess, sys, zipfile
get_requires_for_build_editable = get_requires_for_build_sdist = get_requires_for_build_wheel = build_sdist = None
def build_wheel(folder, settings=None, metadata_directory=None):
    if settings.get("wheel.cmake") != "false" and pathlib.Path("broken").exists():
        subprocess.run([sys.executable, "-c", "import sys; sys.exit('native/x.h:1:1: error: so broken')"])
        raise SystemExit(1)
    with zipfile.ZipFile(pathlib.Path(folder) / "x.whl", "w") as wheel:
        wheel.writestr("kind", settings.get("wheel.cmake", "native"))
        if "sdist.include" in settings:
            wheel.write(settings["sdist.include"], "build_error.txt")
    return "x.whl"
def build_editable(folder, settings=None, metadata_directory=None):
    assert settings["wheel.cmake"] == "false"
    return build_wheel(folder, settings)
'''


@pytest.fixture
def source_tree(tmp_path: Path) -> Path:
    tree, stand_in = tmp_path / "tree", tmp_path / "stand_in" / "scikit_build_core"
    (tree / "src" / "minipaged").mkdir(parents=True)
    (tree / "tools").mkdir()
    (tree / "tools" / "build_backend.py").write_text((ROOT / "tools" / "build_backend.py").read_text())
    stand_in.mkdir(parents=True)
    (stand_in / "__init__.py").write_text("")
    (stand_in / "build.py").write_text(STAND_IN)
    return tree


def _hook(tree: Path, hook: str) -> tuple[str, dict[str, str]]:
    """Call a hook as a front end does; returns what was printed, and the files in the wheel."""
    code = f"import build_backend; print(build_backend.{hook}({str(tree.parent)!r}))"
    paths = f"{tree / 'tools'}:{tree.parent / 'stand_in'}"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tree,
        env={"PYTHONPATH": paths, "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "x.whl"
    with zipfile.ZipFile(tree.parent / "x.whl") as wheel:
        return done.stdout, {name: wheel.read(name).decode() for name in wheel.namelist()}


def test_a_build_that_works_is_left_alone(source_tree: Path) -> None:
    _, files = _hook(source_tree, "build_wheel")
    assert files == {"kind": "native"}


def test_a_failed_build_is_packaged_without_kernels_and_with_the_error(source_tree: Path) -> None:
    (source_tree / "broken").touch()
    printed, files = _hook(source_tree, "build_wheel")
    assert files["kind"] == "false"
    assert "native/x.h:1:1: error: so broken" in files["build_error.txt"]
    assert "native/x.h:1:1: error: so broken" in printed, "pip -v shows it as it happens"
    assert "installing without them" in printed
    log = source_tree / "src" / "minipaged" / "_native" / "build_error.txt"
    assert not log.exists(), "nothing is left in the source tree"
    (source_tree / "broken").unlink()
    assert _hook(source_tree, "build_wheel")[1] == {"kind": "native"}


def test_an_editable_install_builds_into_the_source_tree(source_tree: Path) -> None:
    log = source_tree / "src" / "minipaged" / "_native" / "build_error.txt"
    build_native = source_tree / "tools" / "build_native.py"
    build_native.write_text("raise SystemExit('native/x.h:1:1: error: so broken')")
    assert _hook(source_tree, "build_editable")[1] == {"kind": "false"}
    assert "error: so broken" in log.read_text()
    build_native.write_text("open('library', 'w').close()")
    assert _hook(source_tree, "build_editable")[1] == {"kind": "false"}
    assert (source_tree / "library").exists()
    assert not log.exists()
