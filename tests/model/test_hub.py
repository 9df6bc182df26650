"""What a user may call a model, without a network: huggingface_hub's download is replaced."""

from __future__ import annotations

import fnmatch
import importlib
from importlib.readers import MultiplexedPath
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors

import minipaged
from minipaged.model import hub
from minipaged.model.hub import resolve_model


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, dict[str, Any]]]:
    made: list[tuple[str, dict[str, Any]]] = []

    def download(name: str, **kwargs: Any) -> str:
        made.append((name, kwargs))
        return str(tmp_path / "cache")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return made


def test_directory_is_itself(tmp_path: Path, calls: list[Any]) -> None:
    assert resolve_model(tmp_path) == tmp_path
    assert resolve_model(str(tmp_path), revision="main") == tmp_path
    assert not calls


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: list[Any]) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    assert resolve_model("~/model") == tmp_path / "model"


def test_directory_wins_over_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: list[Any]) -> None:
    (tmp_path / "Qwen" / "Qwen3-0.6B").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve_model("Qwen/Qwen3-0.6B") == Path("Qwen/Qwen3-0.6B")
    assert not calls


def test_hub_id_downloads_only_what_is_needed(calls: list[Any], tmp_path: Path) -> None:
    assert resolve_model("Qwen/Qwen3-0.6B", revision="abc123") == tmp_path / "cache"
    ((name, kwargs),) = calls
    assert (name, kwargs["revision"]) == ("Qwen/Qwen3-0.6B", "abc123")

    def wanted(file: str) -> bool:
        return any(fnmatch.fnmatch(file, pattern) for pattern in kwargs["allow_patterns"])

    for file in ("config.json", "tokenizer.json", "model-00001-of-00002.safetensors", "chat_template.jinja"):
        assert wanted(file)
    for file in ("pytorch_model.bin", "original/config.json", "onnx/model.safetensors", "README.md", "model.gguf"):
        assert not wanted(file)


@pytest.mark.parametrize("name", ["./nowhere", "../nowhere", "/nowhere/at/all", "~/nowhere", "a/b/c", "models/", "a b"])
def test_a_path_that_does_not_exist_is_not_asked_of_the_hub(name: str, calls: list[Any]) -> None:
    with pytest.raises(FileNotFoundError, match="does not exist") as caught:
        resolve_model(name)
    assert name in str(caught.value)
    assert not calls


def test_a_path_object_is_never_a_hub_id(calls: list[Any]) -> None:
    with pytest.raises(FileNotFoundError, match="does not exist"):
        resolve_model(Path("Qwen/Qwen3-0.6B-not-here"))
    assert not calls


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    with pytest.raises(NotADirectoryError, match="is a file: pass the folder"):
        resolve_model(tmp_path / "model.gguf")


def _response() -> Any:
    from types import SimpleNamespace

    return SimpleNamespace(headers={}, status_code=404, request=None)


FAILURES: dict[str, tuple[Any, str]] = {
    "not found": (lambda: errors.RepositoryNotFoundError("404", response=_response()), "no such public model"),
    "revision": (lambda: errors.RevisionNotFoundError("404", response=_response()), "no revision 'v9'"),
    "gated": (lambda: errors.GatedRepoError("403", response=_response()), "access to it has to be granted"),
    "not cached": (lambda: errors.LocalEntryNotFoundError("no connection"), "HF_HUB_OFFLINE"),
    "offline": (lambda: errors.OfflineModeIsEnabled("offline"), "HF_HUB_OFFLINE"),
    "disk": (lambda: OSError("No space left on device"), "No space left on device"),
}


@pytest.mark.parametrize("case", FAILURES)
def test_failures_say_what_to_do(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, text = FAILURES[case]

    def fail(*_: Any, **__: Any) -> str:
        raise make()

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(FileNotFoundError, match="neither a folder here nor a model") as caught:
        resolve_model("Qwen/Qwen3-9000B", revision="v9")
    assert text in str(caught.value)
    assert "Qwen/Qwen3-9000B" in str(caught.value)


def test_none_is_the_bundled_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert resolve_model(None) == resolve_model() == Path(minipaged.__file__).resolve().parent / "demo_model"
    monkeypatch.setattr(hub, "DEMO_FOLDER", tmp_path)
    with pytest.raises(FileNotFoundError, match=f"bundled demo model is not at {tmp_path}"):
        resolve_model(None)


def test_the_bundled_model_is_found_whatever_importlib_makes_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under some editable installs `importlib.resources.files` gives several folders as one, which is no path."""
    parts = MultiplexedPath(Path(minipaged.__file__).parent, Path(minipaged.__file__).parent / "model")
    monkeypatch.setattr("importlib.resources.files", lambda package: parts)
    assert (importlib.reload(hub).resolve_model() / "config.json").is_file()
