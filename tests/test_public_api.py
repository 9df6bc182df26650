"""Every public name says what it is: modules, classes, functions, methods, properties."""

from __future__ import annotations

import inspect
import pkgutil
import sys
import types
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest

import minipaged


def public_modules() -> list[str]:
    found = [module.name for module in pkgutil.walk_packages(minipaged.__path__, "minipaged.")]
    return ["minipaged", *(name for name in found if not any(part.startswith("_") for part in name.split(".")))]


def is_undocumented(value: Any) -> bool:
    """`dataclass` makes up a docstring, the call of the class; that says nothing."""
    text = inspect.cleandoc(value.__doc__ or "")
    return not text or (inspect.isclass(value) and text.startswith(f"{value.__name__}("))


def function_of(member: Any) -> Any:
    """What was decorated: of a property, a class or cached method, a Triton kernel."""
    for attribute in ("fget", "__func__", "func", "fn"):
        member = getattr(member, attribute, member)
    return member


def undocumented_members(cls: type) -> Iterator[str]:
    """An override may leave the word to the class that it overrides."""
    for name, member in vars(cls).items():
        function = function_of(member)
        if name.startswith("_") or not isinstance(function, types.FunctionType):
            continue
        if function.__module__ != cls.__module__:  # a dataclass or an assigned helper from elsewhere
            continue
        inherited = [function_of(vars(base)[name]) for base in cls.__mro__ if name in vars(base)]
        if all(is_undocumented(candidate) for candidate in inherited):
            yield f"{cls.__module__}.{cls.__qualname__}.{name}"


def undocumented(module: types.ModuleType) -> Iterator[str]:
    if is_undocumented(module):
        yield module.__name__
    for name, value in vars(module).items():
        if name.startswith("_") or getattr(value, "__module__", None) != module.__name__:
            continue
        if inspect.isclass(value):
            if is_undocumented(value):
                yield f"{module.__name__}.{name}"
            yield from undocumented_members(value)
        elif isinstance(function_of(value), types.FunctionType) and is_undocumented(function_of(value)):
            yield f"{module.__name__}.{name}"


@pytest.mark.parametrize("name", public_modules())
def test_every_public_name_is_documented(name: str) -> None:
    if "triton" in name and find_spec("triton") is None:
        pytest.skip("triton is not installed (extra [gpu], Linux only)")
    assert list(undocumented(import_module(name))) == []


def test_what_is_not_documented_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("sample", "A module.")
    monkeypatch.setitem(sys.modules, "sample", module)  # dataclass looks there
    source = """
from dataclasses import dataclass
from functools import cached_property

def loud(): "Says something."
def silent(): pass
def _private(): pass

@dataclass
class Bare:
    x: int = 0

class Base:
    "A class."
    def said(self): "Says something."
    def unsaid(self): pass
    @property
    def size(self): return 0
    @cached_property
    def cost(self): return 0
    @classmethod
    def make(cls): pass
    @staticmethod
    def help(): pass

class Child(Base):
    "A class."
    def said(self): pass
    def more(self): pass
"""
    exec(source, vars(module))
    names = ["silent", "Bare", "Base.unsaid", "Base.size", "Base.cost", "Base.make", "Base.help", "Child.more"]
    assert list(undocumented(module)) == [f"sample.{name}" for name in names]


def test_the_walk_reaches_every_plane() -> None:
    planes = {name.split(".")[1] for name in public_modules() if "." in name}
    assert {"bench", "cli", "engine", "errors", "kv", "llm", "model", "ops", "server", "verify"} <= planes
