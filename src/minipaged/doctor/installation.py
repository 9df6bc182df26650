"""How minipaged came here, and how to install it again."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Literal
from urllib.parse import urlparse
from urllib.request import url2pathname

import minipaged

DISTRIBUTION = "minipaged-qwen"
PACKAGE = Path(minipaged.__file__).resolve().parent


@dataclass(frozen=True, slots=True)
class Installation:
    """kind: "wheel", "editable" (it runs from a source tree), or "checkout" (nothing installed: the import path leads
    to a source tree). source: the source tree, if it is known; tag: platform of the installed wheel.
    """

    kind: Literal["wheel", "editable", "checkout"]
    source: Path | None
    tag: str | None

    @property
    def rebuild_command(self) -> str:
        """What builds the native kernels again and shows everything that the compiler says."""
        if self.kind != "wheel":
            return f"python {self.source / 'tools' / 'build_native.py'}" if self.source else "reinstall minipaged"
        what = str(self.source) if self.source else f"--no-binary {DISTRIBUTION} {DISTRIBUTION}"
        return f"pip install -v --no-cache-dir --force-reinstall --no-deps {what}"


def find_installation(package: Path = PACKAGE) -> Installation:
    """Of the package that is running from this folder; another one that is merely installed does not count."""
    try:
        installed = distribution(DISTRIBUTION)
    except PackageNotFoundError:
        return Installation("checkout", _source_tree(package), None)
    direct = json.loads(installed.read_text("direct_url.json") or "{}")
    url = urlparse(direct.get("url", ""))
    source = Path(url2pathname(url.path)) if url.scheme == "file" else None
    if source is not None and not source.exists():  # it was a temporary one
        source = None
    if Path(str(installed.locate_file("minipaged"))).resolve() == package:
        return Installation("wheel", source, _tag(installed))
    if direct.get("dir_info", {}).get("editable") and source is not None and package.is_relative_to(source.resolve()):
        return Installation("editable", source, _tag(installed))
    return Installation("checkout", _source_tree(package), None)


def _source_tree(package: Path) -> Path | None:
    root = package.parent.parent
    return root if (root / "tools" / "build_native.py").is_file() else None


def _tag(installed: Distribution) -> str | None:
    lines = (installed.read_text("WHEEL") or "").splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("Tag:")), None)
