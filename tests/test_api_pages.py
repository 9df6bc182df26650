"""The API pages name every module, and what turns docstrings into Markdown keeps every word of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "minipaged"
PAGES = ROOT / "docs" / "api"
PLANES = ("kv", "text", "ops", "model", "engine", "sampling", "runner", "llm", "server")
BASE = {f"minipaged.{name}" for name in ("arguments", "errors", "outputs", "sampling_params")}


def modules_of(plane: str) -> set[str]:
    files = (path.relative_to(PACKAGE.parent).with_suffix("") for path in (PACKAGE / plane).rglob("*.py"))
    parts = (file.parts[:-1] if file.name == "__init__" else file.parts for file in files)
    return {".".join(names) for names in parts if not any(name.startswith("_") for name in names)}


def test_every_module_has_its_place_on_a_page() -> None:
    pages = {page.stem: re.findall(r"^::: (\S+)", page.read_text(), re.MULTILINE) for page in PAGES.glob("*.md")}
    named = [module for modules in pages.values() for module in modules]
    assert len(named) == len(set(named))
    wanted = set.union(BASE, *map(modules_of, PLANES))
    assert wanted - set(named) == set(), "new modules: add `::: minipaged...` to the page of their plane in docs/api"
    assert set(named) - wanted == set(), "modules that are gone: take them out of docs/api"


PARAGRAPHS = {
    "no names: nothing happens here.": "no names: nothing happens here.",
    "key: first,\n  of two lines.\nvalue: second": "- `key`: first, of two lines.\n- `value`: second",
    "What it is. key: first. value: second.": "What it is.\n\n- `key`: first.\n- `value`: second.",
    "key, value: both.\nOSError without a disk.": "- `key`, `value`: both.\n\nOSError without a disk.",
    "key (one per row): many.": "- `key` (one per row): many.",
    "a key: not a name": "a key: not a name",
    "keys: another name": "keys: another name",
    "a.py    one\nbc.py   two": "    a.py    one\n    bc.py   two",
    "    >>> key: int = 1": "    >>> key: int = 1",
}


SOURCE = '''"""A module."""

class Box:
    """A box.

    size: cm.
    rest: more.
    """

    def __init__(self, size, **rest): ...

    def put(self, what):
        """Put. what: kg."""
'''


@pytest.mark.parametrize("paragraph", PARAGRAPHS)
def test_docstrings_as_markdown(paragraph: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    from docstring_markdown import to_markdown

    assert to_markdown(paragraph, ["value", "key"]) == PARAGRAPHS[paragraph]


def test_classes_are_explained_with_their_fields_and_parameters(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import griffe

    from docstring_markdown import DocstringMarkdown

    (tmp_path / "box.py").write_text(SOURCE)
    module = griffe.load("box", search_paths=[tmp_path], extensions=griffe.Extensions(DocstringMarkdown()))
    texts = [what.docstring.value for what in (module, module["Box"], module["Box.put"])]
    assert texts == ["A module.", "A box.\n\n- `size`: cm.\n- `rest`: more.", "Put.\n\n- `what`: kg."]
