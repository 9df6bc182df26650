"""Fixtures of the operations' tests."""

from __future__ import annotations

import pytest

from minipaged.ops import attend, torch_attention


@pytest.fixture(params=["flash", "plain", "tiny scratch"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every way through the torch back end: torch's flash kernel, matrix products, and many splits to merge."""
    if request.param == "plain":
        monkeypatch.setattr(attend, "flash_works", lambda dtype, device: False)
        monkeypatch.setattr(torch_attention, "flash_works", lambda dtype, device: False)
    elif request.param == "tiny scratch":
        monkeypatch.setattr(torch_attention, "DECODE_BYTES", 16 << 10)
        monkeypatch.setattr(torch_attention, "PREFILL_BYTES", 16 << 10)
    return str(request.param)
