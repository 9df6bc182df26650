"""Read bandwidth and the decode speed that it allows, as `minipaged doctor` tells them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pretended import Machine, only

from minipaged.doctor import bandwidth


@pytest.mark.usefixtures("small_probe")
def test_bandwidth_and_the_decode_speed_it_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    """One token reads the 596 million numbers of Qwen3-0.6B once (its head is its embedding)."""
    rates = iter([10e9, 11e9, 10.5e9, 10.2e9, 10.4e9])
    monkeypatch.setattr(bandwidth.Probes, "read_bandwidth", lambda _: next(rates))
    monkeypatch.setattr(bandwidth, "resolve_dtype", lambda *_, **__: torch.bfloat16)
    finding = only(bandwidth.read_bandwidth(Path("/no/such/root")))
    assert finding.facts["gb_s"] == pytest.approx(10.4)
    assert finding.facts["spread"] == pytest.approx(1.0 / 10.4)
    assert finding.facts["decode_limit_tok_s"] == pytest.approx(10.4e9 / (2 * 596_049_920))
    assert finding.state == "ok"


@pytest.mark.usefixtures("small_probe")
def test_unsteady_bandwidth_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = iter([5e9, 11e9, 10e9, 10e9, 10e9])
    monkeypatch.setattr(bandwidth.Probes, "read_bandwidth", lambda _: next(rates))
    finding = only(bandwidth.read_bandwidth(Path("/no/such/root")))
    assert finding.state == "note"
    assert "60%" in finding.value


def test_no_memory_for_the_probe(machine: Machine) -> None:
    finding = only(bandwidth.read_bandwidth(machine({"proc/meminfo": "MemAvailable: 1000 kB\n"})))
    assert (finding.value, finding.state) == ("not measured", "warning")
