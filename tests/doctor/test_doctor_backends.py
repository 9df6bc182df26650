"""Back ends that are optional: what cannot run here is no fault of the installation."""

from __future__ import annotations

import pytest

from minipaged.doctor.backends import backends
from minipaged.doctor.finding import Finding
from minipaged.doctor.installation import Installation
from minipaged.ops import registry

INSTALLATION = Installation("checkout", None, None)


def found_on(device: str) -> dict[str, Finding]:
    return {finding.facts["backend"]: finding for finding in backends(INSTALLATION, device)}


@pytest.fixture
def without_gpu_back_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of them can run, nor one that does not exist yet; the others are as they are."""
    real = registry.available_backends
    monkeypatch.setattr(registry, "GPU_BACKENDS", registry.GPU_BACKENDS | {"future"})
    missing = dict.fromkeys(registry.GPU_BACKENDS, "it is not there")
    monkeypatch.setattr(registry, "available_backends", lambda device="cpu": {**missing, **real(device), **missing})


@pytest.mark.usefixtures("without_gpu_back_ends")
def test_without_a_gpu_every_gpu_back_end_is_a_note() -> None:
    found = found_on("cpu")
    assert {"triton", "flashinfer", "future"} <= set(found)
    for name in registry.GPU_BACKENDS:
        assert (found[name].state, found[name].why) == ("note", "it is not there")
        assert "nothing to do without a GPU" in found[name].advice


@pytest.mark.usefixtures("without_gpu_back_ends")
def test_with_a_gpu_only_the_one_that_would_be_chosen_is_missed() -> None:
    found = found_on("cuda")
    assert found["triton"].state == "warning"
    assert "[gpu]" in found["triton"].advice
    assert found["flashinfer"].state == "note"
    assert "--backend flashinfer" in found["flashinfer"].advice


def test_a_sound_installation_has_no_problem_whatever_the_machine() -> None:
    """No GPU and no extras, as in a test run on a laptop; without the native kernels, that is a warning."""
    for finding in found_on("cpu").values():
        assert finding.state != "problem", finding
        assert finding.why, finding
