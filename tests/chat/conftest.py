"""The demo model for conversations: greedy, a small pool that is checked after every step."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from minipaged import LLM, SamplingParams
from minipaged.chat.session import ChatSession


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(num_blocks=64, check_invariants=True) as owner:
        yield owner


@pytest.fixture
def session(llm: LLM) -> Iterator[ChatSession]:
    """A new conversation, with nothing cached; every test gives all blocks back."""
    llm.engine.block_manager.reset_prefix_cache()
    yield ChatSession(llm, SamplingParams(temperature=0.0, max_tokens=24))
    assert not llm.engine.has_unfinished()
    assert llm.engine.stats().blocks_in_use == 0
    llm.engine.block_manager.check_invariants()
