"""Fixtures of the operations' tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from minipaged.ops.torch import attention as torch_attention


@pytest.fixture(autouse=True, scope="package")
def _one_thread() -> Iterator[None]:
    """These problems are so small that waiting for a second thread costs more than it gives."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=["flash", "plain", "tiny scratch", "two threads"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Every way through the torch back end: torch's flash kernel, matrix products, many splits to merge, threads."""
    if request.param == "plain":
        monkeypatch.setattr(torch_attention, "flash_works", lambda dtype, device: False)
    elif request.param == "tiny scratch":
        monkeypatch.setattr(torch_attention, "DECODE_BYTES", 16 << 10)
        monkeypatch.setattr(torch_attention, "PREFILL_BYTES", 16 << 10)
    elif request.param == "two threads":
        torch.set_num_threads(2)
    yield str(request.param)
    torch.set_num_threads(1)
