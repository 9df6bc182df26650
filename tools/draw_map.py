"""Draws docs/figures/map.svg from the imports that are there: the parts of the package, their modules, who needs whom.

    python tools/draw_map.py            # needs grimp (extra [test]); run it after adding a module
    python tools/draw_map.py --check    # exit status 1 if the figure is not what this would draw

Every box may import from the boxes below it. Arrows are the shortest account of that: where a way over other boxes
exists, the direct arrow is left out. It is an error if the imports have a circle or cannot be drawn downwards.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from pathlib import Path
from textwrap import wrap

import grimp

ROOT = Path(__file__).resolve().parent.parent
FIGURE = ROOT / "docs" / "figures" / "map.svg"
BASE = "base"  # the box of single files that import nothing, or only each other
WIDTH, MARGIN, GAP, ROW_GAP, LINE, CHARACTER = 900, 10, 12, 30, 16, 6.7  # pixels
NARROWEST = 24  # characters that a box counts for at least, when a row's width is shared

STYLE = """
  .box { fill: #f6f8fa; stroke: #59636e; } .part { fill: #1f2328; font: bold 14px sans-serif; }
  .modules { fill: #424a53; font: 11px monospace; } .arrow { stroke: #59636e; fill: none; stroke-width: 1.4; }
  .tip { fill: #59636e; }
  @media (prefers-color-scheme: dark) {
    .box { fill: #161b22; stroke: #9198a1; } .part { fill: #f0f6fc; } .modules { fill: #c9d1d9; }
    .arrow { stroke: #9198a1; } .tip { fill: #9198a1; }
  }
"""


@dataclass
class Box:
    """One part: where it is drawn, in pixels, and the boxes that its arrows lead to."""

    name: str
    modules: list[str]
    targets: list[str] = field(default_factory=list)
    row: int = 0
    left: float = 0
    right: float = 0
    top: float = 0

    @property
    def lines(self) -> list[str]:
        """Names of the modules, as many per line as fit."""
        return wrap("  ".join(self.modules), int((self.right - self.left - 20) / CHARACTER), break_on_hyphens=False)

    @property
    def height(self) -> float:
        """Of title and modules."""
        return 28 + LINE * len(self.lines) + (6 if self.lines else 0)


def part_of(module: str) -> str | None:
    """The part that a module belongs to; None for the package itself, `__main__` and `_lazy`."""
    name = module.partition(".")[2].split(".")[0]
    return None if not name or name.startswith("_") else name


def read_imports() -> tuple[dict[str, Box], dict[str, set[str]]]:
    """The boxes with their modules, and box -> the boxes that it imports."""
    graph = grimp.build_graph("minipaged", cache_dir=None)
    modules: dict[str, list[str]] = {}
    imports: dict[str, set[str]] = {}
    for module in sorted(graph.modules):
        part = part_of(module)
        if part is not None:
            modules.setdefault(part, []).extend(name for name in module.split(".")[2:3] if not name.startswith("_"))
            others = map(part_of, graph.find_modules_directly_imported_by(module))
            imports.setdefault(part, set()).update(other for other in others if other not in (None, part))
    files = [part for part in imports if not graph.find_children(f"minipaged.{part}")]
    base = [part for part in TopologicalSorter(imports).static_order() if part in files]  # CycleError for a circle
    base = [part for number, part in enumerate(base) if imports[part] <= set(base[:number])]
    boxes = {part: Box(part, sorted(set(modules[part]))) for part in imports if part not in base}
    boxes[BASE] = Box(", ".join(sorted(base)), [])
    merged = {part: {BASE if other in base else other for other in imports[part]} for part in boxes if part != BASE}
    return boxes, {**merged, BASE: set()}


def place(boxes: dict[str, Box], imports: dict[str, set[str]]) -> float:
    """Rows from the top by the longest chain of importers, arrows, then left, right and top of each box; the height."""
    bottom_up = list(TopologicalSorter(imports).static_order())
    reach: dict[str, set[str]] = {}
    for part in bottom_up:
        reach[part] = imports[part].union(*(reach[other] for other in imports[part]))
        boxes[part].targets = sorted(
            other for other in imports[part] if not any(other in reach[third] for third in imports[part])
        )
    for part in reversed(bottom_up):
        for other in imports[part]:
            boxes[other].row = max(boxes[other].row, boxes[part].row + 1)
    _columns(boxes)
    top = float(MARGIN)
    for row in range(max(box.row for box in boxes.values()) + 1):
        inside = [box for box in boxes.values() if box.row == row]
        for box in inside:
            box.top = top
        top += max(box.height for box in inside) + ROW_GAP
    return top - ROW_GAP + MARGIN


def _columns(boxes: dict[str, Box]) -> None:
    """The boxes of a row share its width, each by how much it has to say, below those whose arrows lead to them."""

    def centre(box: Box) -> float:
        above = [(other.left + other.right) / 2 for other in boxes.values() if box.name in other.targets]
        return sum(above) / len(above) if above else 0.0

    for number in range(1 + max(box.row for box in boxes.values())):
        row = sorted((box for box in boxes.values() if box.row == number), key=centre)
        weights = [max(NARROWEST, sum(map(len, box.modules))) for box in row]
        left = float(MARGIN)
        for box, weight in zip(row, weights, strict=True):
            box.left = left
            box.right = left + (WIDTH - 2 * MARGIN + GAP) * weight / sum(weights) - GAP
            left = box.right + GAP


def draw(boxes: dict[str, Box], height: float) -> str:
    """The figure as SVG, light or dark as the reader's system is."""
    names = ", ".join(box.name for box in sorted(boxes.values(), key=lambda box: box.row))
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" role="img">',
        f"<title>Parts of minipaged, from the top: {names}. Imports point down.</title>",
        f"<style>{STYLE}</style>",
    ]
    for box in boxes.values():  # first, so that an arrow to a part further down passes behind what lies between
        for target in (boxes[name] for name in box.targets):
            start, end = (box.left + box.right) / 2, (target.left + target.right) / 2
            top, bottom = box.top + box.height, target.top
            out.append(f'<path class="arrow" d="M{start:.1f} {top:.1f}L{end:.1f} {bottom - 6:.1f}"/>')
            out.append(f'<path class="tip" d="M{end:.1f} {bottom:.1f}l-4.5 -8h9z"/>')
    for box in boxes.values():
        out.append(
            f'<rect class="box" x="{box.left:.1f}" y="{box.top:.1f}" width="{box.right - box.left:.1f}" '
            f'height="{box.height:.1f}" rx="5"/>'
        )
        out.append(f'<text class="part" x="{box.left + 10:.1f}" y="{box.top + 19:.1f}">{box.name}</text>')
        for number, line in enumerate(box.lines, 1):
            y = box.top + 20 + LINE * number
            out.append(f'<text class="modules" x="{box.left + 10:.1f}" y="{y:.1f}" xml:space="preserve">{line}</text>')
    return "\n".join([*out, "</svg>"]) + "\n"


def main() -> None:
    """Write the figure, or compare with it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit status 1 if the figure is out of date"
    )
    check = parser.parse_args().check
    sys.path.insert(0, str(ROOT / "src"))
    boxes, imports = read_imports()
    figure = draw(boxes, place(boxes, imports))
    if not check:
        FIGURE.write_text(figure, encoding="utf-8")
    elif not FIGURE.exists() or FIGURE.read_text(encoding="utf-8") != figure:
        raise SystemExit(f"{FIGURE.relative_to(ROOT)} is out of date: run python tools/draw_map.py")


if __name__ == "__main__":
    main()
