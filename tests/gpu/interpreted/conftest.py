"""Fixtures of the tests that run kernels in Triton's interpreter, on CPU tensors."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "ops"))  # paged_case


@pytest.fixture(autouse=True, scope="package")
def _one_thread() -> Iterator[None]:
    """These problems are so small that waiting for a second thread costs more than it gives."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer: the interpreter takes a second per step."""
    from tiny import make_tiny_folder

    folder = tmp_path_factory.mktemp("gpu") / "tiny"
    return make_tiny_folder(folder, num_hidden_layers=1, vocab_size=64, eos_token_id=60)
