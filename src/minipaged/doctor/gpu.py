"""The GPUs that PyTorch sees, or why it sees none."""

from __future__ import annotations

import re
from pathlib import Path

from minipaged.doctor.finding import Finding, gib

DRIVER = Path("proc/driver/nvidia/version")


def gpus(root: Path) -> list[Finding]:
    """One finding per CUDA device; one that says why if there is none."""
    import torch

    driver = driver_version(root)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count:
        return [_gpu(index, driver) for index in range(count)]
    built_for = f"CUDA {torch.version.cuda}" if torch.version.cuda else "the CPU only"
    why = f"PyTorch {torch.__version__} is built for {built_for} and finds no CUDA device"
    facts = {"driver": driver, "torch_cuda": torch.version.cuda}
    if driver is None:
        advice = "nothing to do: the CPU serves; for a GPU install NVIDIA's driver"
        return [Finding(name="GPU", value="none", why=why, advice=advice, facts=facts)]
    advice = (
        "the driver may be too old for this PyTorch, or CUDA_VISIBLE_DEVICES hides the GPU: compare with nvidia-smi"
        if torch.version.cuda
        else "install a CUDA build of PyTorch (its install selector names the package index) to use the GPU"
    )
    value = f"none in use, though driver {driver} is loaded"
    return [Finding(name="GPU", value=value, why=why, state="warning", advice=advice, facts=facts)]


def driver_version(root: Path) -> str | None:
    """NVIDIA's kernel driver, e.g. "550.54.15"."""
    file = root / DRIVER
    match = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s", file.read_text()) if file.is_file() else None
    return match[1] if match else None


def _gpu(index: int, driver: str | None) -> Finding:
    import torch

    properties = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    capability = f"{properties.major}.{properties.minor}"
    return Finding(
        name=f"GPU {index}",
        value=f"{properties.name}, {gib(total)}, {gib(free)} free",
        why=f"compute capability {capability}, driver {driver or 'unknown'}, CUDA {torch.version.cuda}",
        advice="it is used unless --device cpu says otherwise; --gpu-memory-utilization bounds its memory",
        facts={
            "name": properties.name,
            "total_bytes": total,
            "free_bytes": free,
            "capability": capability,
            "driver": driver,
        },
    )
