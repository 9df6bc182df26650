"""Helpers next to the tests; one server per kind of engine for all tests that leave it as they found it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from server_rig import Rig, demo_rig, stub_rig


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from server_rig import write_byte_tokenizer

    folder = tmp_path_factory.mktemp("byte_tokenizer")
    write_byte_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def shared_stub(tokenizer_folder: Path) -> Iterator[Rig]:
    with stub_rig(tokenizer_folder) as rig:
        yield rig


@pytest.fixture
def stub(shared_stub: Rig) -> Iterator[Rig]:
    """A server over a scripted runner; reset before each test, idle after it."""
    shared_stub.runner.reset()
    yield shared_stub
    shared_stub.runner.reset()
    shared_stub.wait_idle()


@pytest.fixture(scope="session")
def shared_demo() -> Iterator[Rig]:
    with demo_rig() as rig:
        yield rig


@pytest.fixture
def demo(shared_demo: Rig) -> Iterator[Rig]:
    """A server over the bundled demo model: blocks of 4, float32."""
    yield shared_demo
    shared_demo.wait_idle()
