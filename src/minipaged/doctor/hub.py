"""Where models from the Hugging Face Hub are kept, whether there is room, and whether they may be fetched."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from minipaged.doctor.finding import Finding, gib


def hub(model_bytes: int) -> list[Finding]:
    """The cache folder with its free space, and HF_HUB_OFFLINE. model_bytes: weights of Qwen3-0.6B, for scale."""
    return [_cache(model_bytes), _offline()]


def _cache(model_bytes: int) -> Finding:
    from huggingface_hub.constants import HF_HUB_CACHE

    folder = Path(HF_HUB_CACHE)
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    models = sorted(path.name.removeprefix("models--").replace("--", "/") for path in folder.glob("models--*"))
    value = f"{folder}, {gib(free)} free"
    why = f"{len(models)} models in it" if folder.is_dir() else "it does not exist yet; the first download makes it"
    facts = {"folder": str(folder), "free_bytes": free, "models": models}
    if not os.access(there, os.W_OK):
        advice = "no model can be downloaded: set HF_HOME to a folder that you may write to"
        return Finding(
            name="Hub cache", value=value, why=f"{there} is read-only", state="warning", advice=advice, facts=facts
        )
    if free < 2 * model_bytes:
        advice = f"Qwen3-0.6B takes {gib(model_bytes)}: free some space, or set HF_HOME to a larger disk"
        return Finding(name="Hub cache", value=value, why=why, state="warning", advice=advice, facts=facts)
    return Finding(name="Hub cache", value=value, why=why, advice="HF_HOME moves it", facts=facts)


def _offline() -> Finding:
    from huggingface_hub.constants import HF_HUB_OFFLINE

    given = {name: os.environ[name] for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE") if name in os.environ}
    facts = {"offline": bool(HF_HUB_OFFLINE)}
    if HF_HUB_OFFLINE:
        why = "set by " + (" ".join(f"{name}={value}" for name, value in given.items()) or "huggingface_hub")
        advice = "only models in the cache load; unset HF_HUB_OFFLINE to download others"
        return Finding(name="Hub access", value="offline", why=why, state="note", advice=advice, facts=facts)
    why = "HF_HUB_OFFLINE is not set"
    advice = "HF_HUB_OFFLINE=1 starts faster once the model is in the cache"
    return Finding(name="Hub access", value="allowed", why=why, advice=advice, facts=facts)
