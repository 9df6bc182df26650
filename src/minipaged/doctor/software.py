"""Versions: Python, minipaged and how it was installed, the packages that it uses."""

from __future__ import annotations

import platform
from importlib import import_module
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from minipaged import __version__
from minipaged.doctor.finding import NOTHING, Finding
from minipaged.doctor.installation import DISTRIBUTION, Installation

NEEDED = ("torch", "numpy", "transformers", "llguidance")
OPTIONAL = {  # package -> extra, what is missing without it
    "triton": ("gpu", "GPU kernels"),
}


def versions(installation: Installation) -> list[Finding]:
    """One finding each for Python, minipaged, the packages that every command needs, and the optional ones."""
    allowed = _requirements()
    return [
        Finding(
            name="python",
            value=f"{platform.python_version()}, {platform.python_implementation()}",
            why="3.10 or newer is needed",
            advice=NOTHING,
            facts={"version": platform.python_version()},
        ),
        _minipaged(installation),
        *(_package(name, allowed.get(name, SpecifierSet())) for name in (*NEEDED, *OPTIONAL)),
    ]


def _minipaged(installation: Installation) -> Finding:
    where = {
        "wheel": f"installed from a wheel, {installation.tag}",
        "editable": f"editable install of {installation.source}",
        "checkout": f"source tree {installation.source or ''} on the import path, not installed",
    }
    return Finding(
        name="minipaged",
        value=__version__,
        why=where[installation.kind],
        advice=f"to build it again: {installation.rebuild_command}",
        facts={"version": __version__, "install": installation.kind, "wheel_tag": installation.tag},
    )


def _package(name: str, allowed: SpecifierSet) -> Finding:
    try:
        found = version(name)
    except PackageNotFoundError:
        return _missing(name, allowed)
    facts = {"version": found}
    if name == "torch" and (broken := _import_error(name)):
        return Finding(
            name=name,
            value=found,
            why=f"it does not import: {broken}",
            state="problem",
            advice=f"nothing runs without it: pip install --force-reinstall '{name}{allowed}'",
            facts=facts,
        )
    if not allowed.contains(found, prereleases=True):
        return Finding(
            name=name,
            value=found,
            why=f"minipaged is made for {name}{allowed}",
            state="warning",
            advice=f"pip install '{name}{allowed}'; this version may work, but is not tested",
            facts=facts,
        )
    why = f"{name}{allowed} is asked for" if allowed else "minipaged asks for no particular version"
    return Finding(name=name, value=found, why=why, advice=NOTHING, facts=facts)


def _missing(name: str, allowed: SpecifierSet) -> Finding:
    if name in OPTIONAL:
        extra, use = OPTIONAL[name]
        return Finding(
            name=name,
            value="not installed",
            why=f"optional: {use}",
            state="note",
            advice=f"only if you want that: pip install '{DISTRIBUTION}[{extra}]'",
            facts={"version": None},
        )
    only_verify = name == "transformers"
    return Finding(
        name=name,
        value="not installed",
        why="`minipaged verify` compares with it" if only_verify else "every command needs it",
        state="warning" if only_verify else "problem",
        advice=f"pip install '{name}{allowed}'",
        facts={"version": None},
    )


def _import_error(name: str) -> str | None:
    try:
        import_module(name)
    except (ImportError, OSError) as error:  # OSError: one of its shared libraries does not load
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return None


def _requirements() -> dict[str, SpecifierSet]:
    """What the installed minipaged asks for, by package; empty for a source tree that is not installed."""
    try:
        lines = requires(DISTRIBUTION) or []
    except PackageNotFoundError:
        return {}
    found = map(Requirement, lines)
    return {requirement.name: requirement.specifier for requirement in found if requirement.name != DISTRIBUTION}
