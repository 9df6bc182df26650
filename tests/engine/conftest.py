"""Helpers next to the tests, and one tiny model for all of them."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tiny import make_tiny_folder

    return make_tiny_folder(tmp_path_factory.mktemp("engine") / "tiny", generation_config={"eos_token_id": [300, 301]})
