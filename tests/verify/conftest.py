"""One tiny random model and what Hugging Face computes for it, made once for all tests of `verify`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from verify_sample import PROMPTS

from minipaged.verify.oracle import Trace, hf_model, trace
from tiny import make_tiny_folder


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The thread count belongs to the process: what `verify` fixes here must not reach the tests that run later."""
    before = torch.get_num_threads()
    monkeypatch.setattr("minipaged.threads._chosen", None)
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True)
class Sample:
    folder: Path
    reference: Trace
    peer: Trace  # Hugging Face in bfloat16


@pytest.fixture(scope="session")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    folder = make_tiny_folder(tmp_path_factory.mktemp("tiny"), attention_bias=True)
    with hf_model(folder, torch.float32) as model:
        reference = trace(model, PROMPTS)
    with hf_model(folder, torch.bfloat16) as model:
        peer = trace(model, PROMPTS)
    return Sample(folder, reference, peer)
