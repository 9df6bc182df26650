"""Packages, installation, GPUs and the Hub, on machines made of files."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch
from pretended import GIB, MEMINFO, Machine, only

from minipaged.doctor import gpu, hub, software
from minipaged.doctor.examine import examine
from minipaged.doctor.installation import Installation, find_installation


def test_a_missing_optional_package_is_a_note_and_a_missing_torch_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name in ("torch", "triton", "transformers"):
            raise PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr(software, "version", version)
    found = {finding.name: finding for finding in software.versions(Installation("checkout", None, None))}
    assert found["torch"].state == "problem"
    assert found["transformers"].state == "warning"
    assert found["triton"].state == "note"
    assert "[gpu]" in found["triton"].advice
    assert found["numpy"].facts["version"] == "1.0"


def test_a_torch_that_does_not_import_ends_the_examination_early_but_not_silently(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(name: str) -> None:
        raise OSError("libcudart.so.13: cannot open shared object file")

    monkeypatch.setattr(software, "import_module", broken)
    diagnosis = examine(quick=True, root=machine({"proc/meminfo": MEMINFO}))
    assert not diagnosis.usable
    torch_finding = next(finding for finding in diagnosis.findings if finding.name == "torch")
    assert "libcudart.so.13" in torch_finding.why
    assert torch_finding.state == "problem"
    assert diagnosis.to_dict()["memory_limit_bytes"] == 32 * GIB


def test_a_version_outside_the_range(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "requires", lambda _: ["numpy>=1.26", 'triton<3.10,>=3.6; extra == "gpu"'])
    monkeypatch.setattr(software, "version", lambda name: "1.20")
    found = {finding.name: finding for finding in software.versions(Installation("checkout", None, None))}
    assert found["numpy"].state == "warning"
    assert "'numpy>=1.26'" in found["numpy"].advice
    assert found["transformers"].state == "ok"


def test_this_installation_has_a_kind_and_a_way_to_build() -> None:
    installation = find_installation()
    assert installation.kind in ("wheel", "editable", "checkout")
    assert installation.rebuild_command
    nowhere = find_installation(Path("/no/such/site-packages/minipaged"))
    assert nowhere == Installation("checkout", None, None)


def test_a_driver_without_a_usable_gpu_is_a_warning(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    root = machine({"proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue\n"})
    finding = only(gpu.gpus(root))
    assert finding.state == "warning"
    assert "550.54.15" in finding.value
    (root / "proc/driver/nvidia/version").unlink()
    assert only(gpu.gpus(root)).state == "ok"


def test_a_gpu_is_described(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        name, major, minor, total_memory = "NVIDIA H200", 9, 0, 139 * GIB

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (100 * GIB, 139 * GIB))
    finding = only(gpu.gpus(machine({"proc/driver/nvidia/version": "Open Kernel Module for x86_64  580.65.06  R\n"})))
    assert finding.name == "GPU 0"
    assert finding.value == "NVIDIA H200, 139.00 GiB, 100.00 GiB free"
    assert "compute capability 9.0, driver 580.65.06" in finding.why


def test_hub_cache_and_offline_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    (tmp_path / "models--Qwen--Qwen3-0.6B").mkdir()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    cache, access = hub.hub(1)
    assert cache.facts["models"] == ["Qwen/Qwen3-0.6B"]
    assert cache.state == "ok"
    assert (access.state, access.facts) == ("note", {"offline": True})
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "not" / "yet"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    cache, access = hub.hub(1 << 60)
    assert cache.state == "warning"
    assert "HF_HOME" in cache.advice
    assert access.state == "ok"
