"""SVG elements that know the figure's colours (light and dark) and words."""

from __future__ import annotations

from xml.sax.saxutils import escape

from figure.scene import NAMES
from figure.words import WORDS

LANGUAGES = ("en", "zh")

# class: (light, dark), each (fill, stroke); None = not set
COLOURS = {
    "page": (("#ffffff", None), ("#0d1117", None)),
    "panel": (("#f6f8fa", "#d1d9e0"), ("#151b23", "#3d444d")),
    "t": (("#1f2328", None), ("#f0f6fc", None)),
    "m": (("#59636e", None), ("#9198a1", None)),
    "a": (("#c8e0ff", "#2f6fce"), ("#123a6b", "#6cb0ff")),
    "b": (("#ffdcb0", "#a85f00"), ("#5c3c0c", "#eaa94f")),
    "c": (("#c4ebcc", "#1a7f37"), ("#12472a", "#4ac26b")),
    "d": (("#e6d8fb", "#8250df"), ("#3c2763", "#bc8cff")),
    "e": (("#ffd3e2", "#bf3989"), ("#5e1f41", "#f778ba")),
    "free": (("#ffffff", "#9aa4ae"), ("#0d1117", "#6e7681")),
    "hot": (("none", "#cf222e"), ("none", "#ff7b72")),
    "hott": (("#cf222e", None), ("#ff7b72", None)),
    "line": (("none", "#818b98"), ("none", "#818b98")),
    "head": (("#818b98", None), ("#818b98", None)),
    "hatch": (("none", "#9aa4ae"), ("none", "#6e7681")),
}
FONT = (
    "system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', 'PingFang SC', 'Microsoft YaHei', "
    "'Noto Sans CJK SC', sans-serif"
)


def _css() -> str:
    def rules(theme: int) -> str:
        lines = []
        for name, themes in COLOURS.items():
            fill, stroke = themes[theme]
            lines.append(f".{name}{{fill:{fill}" + (f";stroke:{stroke}" if stroke else "") + "}")
        return "\n".join(lines)

    return (
        f"text{{font-family:{FONT};font-size:13px}}\n.s{{font-size:12px}}\n.h{{font-size:15px;font-weight:600}}\n"
        ".x{font-size:18px;font-weight:600}\n.k{font-weight:600}\n.hot{stroke-width:2.5}\n.dash{stroke-dasharray:3 3}\n"
        f"{rules(0)}\n@media (prefers-color-scheme:dark){{\n{rules(1)}\n}}\n.none{{stroke:none}}\n.open{{fill:none}}"
    )


class Canvas:
    """SVG elements in order. Coordinates in pixels of a picture 900 wide."""

    def __init__(self, language: str) -> None:
        self.parts: list[str] = []
        self.language = LANGUAGES.index(language)

    def say(self, key: str, *values: object) -> str:
        """The words for `key` in this picture's language."""
        return WORDS[key][self.language].format(*values)

    def rect(self, x: float, y: float, w: float, h: float, css: str, radius: float = 3) -> None:
        self.parts.append(f'<rect class="{css}" x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="{radius:g}"/>')

    def text(self, x: float, y: float, words: object, css: str = "t", anchor: str = "start") -> None:
        where = "" if anchor == "start" else f' text-anchor="{anchor}"'
        self.parts.append(f'<text class="{css}" x="{x:g}" y="{y:g}"{where}>{escape(str(words))}</text>')

    def cell(self, x: float, y: float, w: float, h: float, css: str, words: object = "", text: str = "t") -> None:
        self.rect(x, y, w, h, css)
        if words != "":
            self.text(x + w / 2, y + h / 2 + 4.5, words, text, "middle")

    def path(self, points: str, css: str = "line", *, arrow: bool = True) -> None:
        self.parts.append(f'<path class="{css}" d="{points}"' + (' marker-end="url(#arrow)"/>' if arrow else "/>"))

    def hatched(self, x: float, y: float, size: float) -> None:
        """A slot without a token."""
        self.rect(x, y, size, size, "free")
        where = f'x="{x:g}" y="{y:g}" width="{size:g}" height="{size:g}"'
        self.parts.append(f'<rect fill="url(#lines)" {where} rx="3"/>')

    def panel(self, number: int, x: float, y: float, w: float, h: float, steps: str) -> None:
        self.rect(x, y, w, h, "panel", 8)
        self.text(x + 16, y + 26, self.say(str(number)), "t h")
        self.text(x + w - 16, y + 26, self.say("steps" if "," in steps else "step", steps), "m s", "end")

    def block(self, x: float, y: float, w: float, h: float, owners: list[int], css: str = "") -> None:
        """A block in its owner's colour, or in both owners' colours, one on each side of the diagonal."""
        names = [NAMES[owner].lower() for owner in owners] or ["free"]
        self.rect(x, y, w, h, f"{names[0]}{css}")
        if len(names) > 1:
            edge = f"M{x + w - 1.5:g} {y:g}Q{x + w:g} {y:g} {x + w:g} {y + 3:g}V{y + h - 3:g}Q{x + w:g} {y + h:g} "
            edge += f"{x + w - 3:g} {y + h:g}H{x + 3:g}Q{x:g} {y + h:g} {x:g} {y + h - 1.5:g}"
            self.parts.append(f'<path class="{names[1]} none" d="{edge}Z"/><path class="{names[1]} open" d="{edge}"/>')

    def svg(self, height: int, title: str) -> str:
        body = "\n".join(self.parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 900 {height}" width="900" height="{height}" '
            f'role="img">\n<title>{escape(title)}</title>\n<style>\n{_css()}\n</style>\n<defs>\n'
            '<marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            '<path class="head" d="M0 0L8 4L0 8Z"/></marker>\n'
            '<pattern id="lines" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
            '<path class="hatch" d="M0 0V6"/></pattern>\n</defs>\n'
            f'<rect class="page" width="900" height="{height}"/>\n{body}\n</svg>\n'
        )
