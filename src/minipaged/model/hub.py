"""From what a user calls a model to a folder: the bundled demo model, a directory, or a Hugging Face Hub id."""

from __future__ import annotations

import os
import re
from pathlib import Path

DEMO_FOLDER = Path(__file__).resolve().parents[1] / "demo_model"
"""The bundled model, beside this code: installs of every kind have it there."""
NEEDED_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "model-*-of-*.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+|[\w.-]+")


def resolve_model(model: str | Path | None = None, revision: str | None = None) -> Path:
    """The folder that holds `model`: None = the demo model that ships with the package, a directory, or a Hub id to
    download.

    Only the files that are needed are downloaded, into huggingface_hub's cache, and `revision` (branch, tag or
    commit) is used for a Hub id alone. FileNotFoundError says why there is nothing to load; NotADirectoryError if
    `model` is a file.
    """
    if model is None:
        if not (DEMO_FOLDER / "config.json").is_file():
            raise FileNotFoundError(
                f"the bundled demo model is not at {DEMO_FOLDER}: reinstall minipaged, or pass a model"
            )
        return DEMO_FOLDER
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise NotADirectoryError(f"{model} is a file: pass the folder with config.json and *.safetensors")
    name = str(model)
    if isinstance(model, Path) or _looks_like_path(name):
        raise FileNotFoundError(f"model folder {name} does not exist (seen from {Path.cwd()})")
    return _download(name, revision)


def _looks_like_path(name: str) -> bool:
    return name.startswith((".", "~", os.sep)) or name.endswith(("/", os.sep)) or not _HUB_ID.fullmatch(name)


def _download(name: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    start = f"{name!r} is neither a folder here nor a model that can be fetched from the Hugging Face Hub: "
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(NEEDED_FILES)))
    except GatedRepoError as error:  # a kind of RepositoryNotFoundError, so it comes first
        reason = "access to it has to be granted first (accept its terms on its page, then `hf auth login`)"
        cause: Exception = error
    except RevisionNotFoundError as error:
        reason, cause = f"it has no revision {revision!r}", error
    except RepositoryNotFoundError as error:
        reason, cause = "there is no such public model (a private one needs `hf auth login`)", error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        reason, cause = "it is not in the local cache, and the Hub is out of reach or HF_HUB_OFFLINE is set", error
    except HFValidationError as error:
        reason, cause = f"this is not a valid id ({error})", error
    except (HfHubHTTPError, OSError) as error:
        reason, cause = f"{type(error).__name__}: {error}", error
    raise FileNotFoundError(start + reason) from cause
