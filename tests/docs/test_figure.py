"""The committed figures are what the script draws today, complete in both themes and both languages."""

from __future__ import annotations

import importlib
import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from types import ModuleType

import pytest

from minipaged.kv import KVBlockManager

ROOT = Path(__file__).parents[2]
FIGURES = {"en": "paged-kv.svg", "zh": "paged-kv.zh.svg"}
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def draw_figure() -> ModuleType:
    """The script as a module."""
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        return importlib.import_module("draw_figure")
    finally:
        sys.path.remove(str(ROOT / "tools"))


def committed(language: str) -> str:
    return (ROOT / "docs" / "figures" / FIGURES[language]).read_text(encoding="utf-8")


@pytest.mark.parametrize("language", FIGURES)
def test_the_committed_figure_is_what_the_script_draws(draw_figure: ModuleType, language: str) -> None:
    assert committed(language) == draw_figure.draw(language), "run tools/draw_figure.py and look at the result"


def test_the_figure_follows_the_manager(draw_figure: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another order of the free queue gives another picture: the numbers are read, not written."""
    scene = importlib.import_module("figure.scene")

    def other_order(blocks: int, size: int, free_order: list[int] | None = None) -> KVBlockManager:
        return KVBlockManager(blocks, size, free_order=free_order and free_order[::-1])

    monkeypatch.setattr(scene, "KVBlockManager", other_order)
    assert scene.scene().tables[0] == [15, 14, 13, 11]
    drawn = draw_figure.draw("en")
    assert "table[1] = 14" in drawn
    assert "14 × 4 + 2 = 58" in drawn  # noqa: RUF001
    assert "table[1] = 2<" in committed("en")


@pytest.mark.parametrize("language", FIGURES)
def test_all_of_it_lies_inside_and_has_a_colour_in_both_themes(language: str) -> None:
    root = ET.fromstring(committed(language))
    width, height = float(root.get("width", 0)), float(root.get("height", 0))
    style = root.findtext(f"{SVG}style") or ""
    light, dark = style.split("@media (prefers-color-scheme:dark)")
    shapes = [element for element in root if element.tag in (f"{SVG}text", f"{SVG}rect", f"{SVG}path")]
    assert len(shapes) > 300
    for shape in shapes:
        x, y = float(shape.get("x", 0)), float(shape.get("y", 0))
        assert 0 <= x <= x + float(shape.get("width", 0)) <= width
        assert 0 <= y <= y + float(shape.get("height", 0)) <= height
        colour = (shape.get("class") or "hatch").split()[0]
        assert all(re.search(rf"^\.{colour}\{{fill:", rules, re.MULTILINE) for rules in (light, dark)), colour
    titles = [text.text or "" for text in root.iter(f"{SVG}text") if text.get("class") == "t h"]
    assert [title[0] for title in titles if title[0].isdigit()] == list("1234567")


def test_the_two_languages_differ_in_words_only() -> None:
    shapes = [re.sub(r"<(text|title)\b.*?</\1>", "", committed(language)) for language in FIGURES]
    assert shapes[0] == shapes[1]
    english = re.findall(r"<text[^>]*>(.*?)</text>", committed("en"))
    assert not any("\u4e00" <= character <= "\u9fff" for word in english for character in word)
