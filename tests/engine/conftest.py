"""Helpers next to the tests, and one tiny model for all of them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from minipaged import LLM

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tiny import make_tiny_folder

    return make_tiny_folder(tmp_path_factory.mktemp("engine") / "tiny", generation_config={"eos_token_id": [300, 301]})


@pytest.fixture(scope="module")
def bare(tiny_folder: Path) -> LLM:
    """An `LLM` without a tokenizer."""
    from llm_rig import load

    return load(tiny_folder)
