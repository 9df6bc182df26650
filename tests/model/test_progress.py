"""The loading bar: on a terminal only, and only if wanted."""

from __future__ import annotations

import io
import sys

import pytest
import torch

from minipaged.model.random_weights import RandomWeights
from minipaged.model.weights import load_model
from minipaged.ops.torch.backend import TorchBackend
from tiny import tiny_config


@pytest.mark.parametrize(
    ("terminal", "progress", "shown"), [(True, True, True), (True, False, False), (False, True, False)]
)
def test_bar(monkeypatch: pytest.MonkeyPatch, terminal: bool, progress: bool, shown: bool) -> None:
    class Stderr(io.StringIO):
        def isatty(self) -> bool:
            return terminal

    stderr = Stderr()
    monkeypatch.setattr(sys, "stderr", stderr)
    config = tiny_config()
    load_model(config, RandomWeights(config), TorchBackend(), activation_dtype=torch.float32, progress=progress)
    assert ("Loading weights" in stderr.getvalue()) == shown
    assert bool(stderr.getvalue()) == shown
