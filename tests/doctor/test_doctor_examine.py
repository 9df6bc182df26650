"""The whole examination by `minipaged doctor`: it is complete, and goes on where a topic fails."""

from __future__ import annotations

from pathlib import Path

import pytest
from pretended import MEMINFO, Machine

from minipaged.doctor import memory
from minipaged.doctor.examine import examine
from minipaged.doctor.finding import NOTHING, STATES, UNKNOWN, Finding


def test_a_system_without_proc_and_sys(tmp_path: Path) -> None:
    """As on another operating system: what cannot be known is said to be unknown, and nothing fails."""
    diagnosis = examine(quick=True, root=tmp_path)
    found = {finding.name: finding for finding in diagnosis.findings}
    for name in ("load by others", "memory", "NUMA nodes", "huge pages"):
        assert found[name].value == UNKNOWN
        assert found[name].state == "note"
    assert diagnosis.usable
    assert "could not be found out" not in {finding.value for finding in diagnosis.findings}
    assert diagnosis.to_dict()["memory_limit_bytes"] is None


def test_every_finding_is_complete_and_has_advice() -> None:
    diagnosis = examine(quick=True)
    names = [finding.name for finding in diagnosis.findings]
    assert len(set(names)) == len(names)
    for finding in diagnosis.findings:
        assert finding.state in STATES
        for text in (finding.value, finding.why, finding.advice):
            assert text.strip() == text != ""
            assert "\n" not in text, finding
        assert finding.state in ("ok", "note") or finding.advice != NOTHING


def test_a_topic_that_fails_does_not_take_the_others_along(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(root: Path) -> list[Finding]:
        raise ZeroDivisionError("a kernel with no nodes")

    monkeypatch.setattr(memory, "numa", explode)
    diagnosis = examine(quick=True, root=machine({"proc/meminfo": MEMINFO}))
    found = {finding.name: finding for finding in diagnosis.findings}
    assert found["NUMA nodes"].why == "ZeroDivisionError: a kernel with no nodes"
    assert found["NUMA nodes"].state == "warning"
    assert found["memory"].state == "ok"
