"""Lets mkdocstrings show this package's docstrings as they are meant: they are prose, with two habits of their own.

`name: what it is` explains a parameter or field, several to a paragraph if they are short: each becomes an item of a
list. Lines with gaps of three spaces and more are a table: they are shown as typed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from griffe import Class, Extension, Function, Module, Object


class DocstringMarkdown(Extension):
    """Griffe extension; named in mkdocs.yml."""

    def on_module(self, *, mod: Module, **_: Any) -> None:
        """Tables only: a module has no parameters."""
        _rewrite(mod, ())

    def on_class(self, *, cls: Class, **_: Any) -> None:
        """Its fields, and the parameters of `__init__`, which its docstring explains."""
        init = cls.members.get("__init__")
        parameters = [p.name.lstrip("*") for p in init.parameters] if isinstance(init, Function) else []
        _rewrite(cls, [*cls.members, *parameters])

    def on_function(self, *, func: Function, **_: Any) -> None:
        """Its parameters."""
        _rewrite(func, [p.name.lstrip("*") for p in func.parameters])


def _rewrite(what: Object, names: Iterable[str]) -> None:
    if what.docstring is not None:
        paragraphs = what.docstring.value.split("\n\n")
        what.docstring.value = "\n\n".join(to_markdown(paragraph, names) for paragraph in paragraphs)


def to_markdown(paragraph: str, names: Iterable[str]) -> str:
    """One paragraph of a docstring; `names` are those that it may explain."""
    if re.search(r"\S {3,}\S", paragraph):
        return "\n".join(f"    {line}" for line in paragraph.splitlines())
    known = "|".join(sorted(map(re.escape, names), key=len, reverse=True))
    if not known or paragraph.startswith("    "):
        return paragraph
    heads = rf"((?:{known})(?:, (?:{known}))*)((?: \([^)]*\))?): "  # names, and perhaps what they have in common
    before, *rest = re.split(rf"(?:^|(?<=[.)] )){heads}", paragraph, flags=re.MULTILINE)
    if not rest:
        return paragraph
    rest[-1], errors = re.split(
        r"(?<=\.)\s+(?=(?:Raises|\w+Error)\b)|$", rest[-1], maxsplit=1
    )  # of no single parameter
    items = [
        f"- {', '.join(f'`{name}`' for name in head.split(', '))}{remark}: {' '.join(text.split())}"
        for head, remark, text in zip(rest[::3], rest[1::3], rest[2::3], strict=True)
    ]
    return "\n\n".join(part for part in (before.strip(), "\n".join(items), errors.strip()) if part)
