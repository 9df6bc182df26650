"""Draws docs/figures/paged-kv.svg and paged-kv.zh.svg: the paged KV cache in seven panels.

    python tools/draw_figure.py            # writes both files

Every block number, slot, length and percentage in the picture is read from real `KVBlockManager` objects
(`figure/scene.py`: A, B and C are those of docs/walkthrough.md); here are only places, and in `figure/words.py` words.
The colours follow the reader's light or dark theme through `prefers-color-scheme`, which also works inside an <img>.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from figure.canvas import LANGUAGES, Canvas
from figure.scene import BS, LENGTHS, NAMES, TOKEN, A, B, C, Scene, scene
from minipaged.kv import address

FOLDER = Path(__file__).parents[1] / "docs" / "figures"
FILES = {"en": "paged-kv.svg", "zh": "paged-kv.zh.svg"}


def panel_1(c: Canvas, s: Scene, x: float, y: float) -> None:
    c.panel(1, x, y, 868, 236, "3")
    logical, offset = address.logical_block(TOKEN, BS), address.block_offset(TOKEN, BS)
    physical = s.tables[A][logical]
    cell, gap, left = 25, 14, x + 130
    c.text(x + 16, y + 79, c.say("positions"), "m")
    c.text(x + 16, y + 143, c.say("table of"), "m")
    for index, block in enumerate(s.tables[A]):
        start = left + index * (BS * cell + gap)
        c.text(start + BS * cell / 2, y + 52, c.say("logical", index), "m s", "middle")
        for place in range(BS):
            position = index * BS + place
            css = "a" if position < s.lengths[A] else "free dash"
            c.cell(start + place * cell, y + 60, cell, 28, css, position if css == "a" else "")
            if position == TOKEN:
                c.rect(start + place * cell, y + 60, cell, 28, "hot")
        middle = start + BS * cell / 2
        c.path(f"M{middle:g} {y + 92:g}V{y + 120:g}")
        c.cell(middle - 20, y + 124, 40, 28, "a", block, "t k")
        if index == logical:
            c.path(f"M{middle:g} {y + 156:g}V{y + 180:g}")
            c.text(left - 114, y + 203, c.say("physical", block), "m")
            for place in range(BS):
                slot = address.slot(block, place, BS)
                c.cell(middle + (place - 2) * 38, y + 184, 38, 28, "a", slot)
                if slot == s.slot:
                    c.rect(middle + (place - 2) * 38, y + 184, 38, 28, "hot")
            c.text(middle + 2 * 38 + 10, y + 203, f"← {c.say('slots')}", "m s")
    lines = [
        (c.say("formula"), f"{TOKEN} // {BS} = {logical}"),
        (c.say("offset"), f"{TOKEN} mod {BS} = {offset}"),
        (c.say("physical block"), f"table[{logical}] = {physical}"),
        (c.say("slot"), f"{physical} × {BS} + {offset} = {s.slot}"),  # noqa: RUF001
    ]
    c.text(x + 632, y + 78, c.say("token", TOKEN), "hott k")
    for row, (name, formula) in enumerate(lines):
        c.text(x + 632, y + 108 + 26 * row, name, "m")
        c.text(x + 740, y + 108 + 26 * row, formula, "hott k" if row == 3 else "t")


def panel_2(c: Canvas, s: Scene, x: float, y: float) -> None:
    c.panel(2, x, y, 426, 262, "4")
    for block, owners in enumerate(s.owners):
        left, top = x + 16 + block % 8 * 50, y + 42 + block // 8 * 58
        c.block(left, top, 44, 50, owners, "" if owners else " dash")
        c.text(left + 22, top + 19, block, "t k" if owners else "m", "middle")
        for place in range(BS if owners else 0):
            used = place < s.filled[block]
            c.rect(left + 4 + place * 9.25, top + 30, 8, 12, "head" if used else "free", 1.5)
    c.text(x + 16, y + 178, c.say("free queue"), "m")
    for place, block in enumerate(s.free):
        c.cell(x + 16 + place * 38, y + 188, 32, 26, "free dash", block)
    legend = [([A], "A"), ([B], "B"), ([C], "C"), ([B, C], c.say("shared")), ([], c.say("free"))]
    left = x + 16
    for owners, words in legend:
        c.block(left, y + 231, 15, 15, owners, "" if owners else " dash")
        c.text(left + 21, y + 243, words, "m s")
        left += 112 if len(owners) > 1 else 56


def panel_3(c: Canvas, s: Scene, x: float, y: float) -> None:
    c.panel(3, x, y, 426, 262, "5, 8")
    tops = {A: y + 50, B: y + 116, C: y + 182}
    for sequence, table in s.tables.items():
        top = tops[sequence]
        c.text(x + 16, top + 15, NAMES[sequence], "t h")
        c.text(x + 16, top + 32, c.say("tokens", s.lengths[sequence]), "m s")
        for logical, block in enumerate(table):
            left = x + 104 + logical * 48
            c.block(left, top, 42, 32, s.owners[block])
            c.text(left + 21, top + 20.5, block, "t k", "middle")
    (source, destination) = s.copies[0]
    c.path(f"M{x + 95 + 2 * 48 + 30:g} {tops[B] + 34:g}V{tops[C] - 4:g}")
    c.text(x + 234, tops[C] - 12, c.say("copied", source, destination), "m s")
    c.text(x + 104, tops[C] + 56, c.say("two owners"), "m s")
    c.path(f"M{x + 106:g} {tops[C] + 35:g}v5h86v-5", arrow=False)


def panel_4(c: Canvas, s: Scene, x: float, y: float) -> None:
    c.panel(4, x, y, 868, 172, "6")
    c.text(x + 270, y + 26, c.say("front"), "m s")
    first = s.life[1].table[0]
    titles = [c.say("create"), c.say("append", 4), c.say("append", 1), c.say("append", 2), c.say("release")]
    notes = [c.say("life 0"), c.say("life 1", first), c.say("life 2"), c.say("life 3"), c.say("life 4")]
    for column, (moment, title, note) in enumerate(zip(s.life, titles, notes, strict=True)):
        left = x + 16 + column * 171
        c.text(left, y + 54, title, "t k")
        c.text(left, y + 71, note, "m s")
        if column < 4:
            c.path(f"M{left + 128:g} {y + 50:g}h28")
        if moment.length is None:
            c.text(left, y + 106, c.say("gone"), "m s")
        else:
            c.text(left, y + 106, c.say("length", moment.length), "m s")
            for logical, block in enumerate(moment.table):
                used = min(moment.length - logical * BS, BS)
                c.cell(left + 66 + logical * 42, y + 88, 36, 28, "d", block, "t k")
                for place in range(BS):
                    css = "head" if place < used else "free"
                    c.rect(left + 67 + logical * 42 + place * 9, y + 119, 7, 7, css, 1)
        for place, block in enumerate(moment.free[:4]):
            c.cell(left + place * 27, y + 136, 24, 22, "free dash", block, "m s")
        c.text(left + 4 * 27 + 2, y + 151, "…", "m")


def panel_5(c: Canvas, s: Scene, x: float, y: float) -> None:
    c.panel(5, x, y, 426, 330, "2, 7")
    contiguous = c.say("contiguous", s.holes.count("."), s.paged.count("E"))
    for row, (words, strip) in enumerate(((contiguous, s.holes), (c.say("paged"), s.paged))):
        top = y + 42 + row * 56
        c.text(x + 16, top + 11, words, "m s")
        for place, owner in enumerate(strip):
            css = "free dash" if owner == "." else owner.lower()
            c.cell(x + 16 + place * 24.5, top + 18, 22, 24, css, "" if owner == "." else owner, "t s")
    c.text(x + 16, y + 168, c.say("internal", s.waste), "m s")
    left = x + 16
    for sequence, table in s.tables.items():
        for place in range(BS):
            used = place < s.filled[table[-1]]
            if used:
                c.rect(left + place * 22, y + 178, 20, 20, NAMES[sequence].lower())
            else:
                c.hatched(left + place * 22, y + 178, 20)
        c.text(left + 93, y + 193, NAMES[sequence], "t s")
        left += 134
    c.text(x + 16, y + 230, c.say("trade", len(LENGTHS), min(LENGTHS), max(LENGTHS)), "m s")
    for row, name in enumerate(("block size", "waste", "look-ups")):
        c.text(x + 16, y + 254 + row * 22, c.say(name), "m")
    for column, (size, share, look_ups) in enumerate(s.trade):
        right = x + 146 + column * 66
        for row, words in enumerate((f"{size}", f"{share:.1%}", f"{look_ups:,}")):
            c.text(right, y + 254 + row * 22, words, "t k" if row == 0 else "t", "end")
    c.text(x + 110, y + 319, c.say("small"), "m s")
    c.text(x + 410, y + 319, c.say("large"), "m s", "end")


def panel_6(c: Canvas, s: Scene, x: float, y: float) -> None:
    c.panel(6, x, y, 426, 330, "8, 9, 10")
    physical, offset = address.split_slot(s.slot, BS)
    c.text(x + 16, y + 52, c.say("layout"), "m s")
    c.text(x + 16, y + 71, c.say("shape"), "t k")
    for row, block in enumerate((0, 1, 2, 3)):
        top = y + 88 + row * 32
        c.block(x + 16, top, 74, 26, s.owners[block], "" if s.owners[block] else " dash")
        c.text(x + 53, top + 17.5, c.say("block", block), "t s" if s.owners[block] else "m s", "middle")
        if block == physical:
            c.rect(x + 16, top, 74, 26, "hot")
            c.path(f"M{x + 94:g} {top + 13:g}H{x + 120:g}")
    c.text(x + 53, y + 230, "⋮", "m", "middle")
    for head in range(2):
        left = x + 126 + head * 144
        c.rect(left, y + 86, 138, 146, "free")
        c.text(left + 69, y + 104, c.say("kv head", head), "m s", "middle")
        for place in range(BS):
            top = y + 114 + place * 25
            for column in range(6):
                c.rect(left + 24 + column * 18, top, 16, 20, "a", 2)
            c.text(left + 12, top + 14.5, place, "m s", "middle")
            if place == offset:
                c.rect(left + 22, top - 2, 110, 24, "hot")
        c.text(left + 132, y + 226, c.say("head size"), "m s", "end")
    index = f"[{physical}, :, {offset}, :]"
    c.text(x + 126, y + 255, f"{c.say('slot')} {s.slot}: K{index}, V{index}", "hott k")
    c.text(x + 16, y + 286, c.say("next"), "m s")
    for column, (sequence, slot) in enumerate(zip((A, B, C), s.next_slots, strict=True)):
        block, place = address.split_slot(slot, BS)
        left = x + 16 + column * 134
        c.cell(left, y + 294, 40, 24, NAMES[sequence].lower(), slot, "t k")
        c.text(left + 47, y + 310.5, f"= ({block}, {place})", "m")


def panel_7(c: Canvas, x: float, y: float) -> None:
    c.panel(7, x, y, 868, 208, "14")
    rows = (("os", "virtual page", "page table", "frame"), ("here", "logical block", "block table", "physical block"))
    for row, (name, *chain) in enumerate(rows):
        top = y + 42 + row * 38
        c.text(x + 16, top + 19, c.say(name), "t k")
        for column, key in enumerate(chain):
            left = x + 200 + column * 220
            c.cell(left, top, 160, 28, "free" if row == 0 else "a", c.say(key))
            if column < 2:
                c.path(f"M{left + 164:g} {top + 14:g}h50")
    for row, name in enumerate(("both", "unlike", "instead")):
        c.text(x + 16, y + 142 + row * 24, c.say(name), "t k")
        c.text(x + 126, y + 142 + row * 24, c.say(f"{name} list"), "t")


def draw(language: str) -> str:
    """The whole picture as SVG, in "en" or "zh"."""
    s, c = scene(), Canvas(language)
    c.text(16, 34, c.say("title"), "t x")
    panel_1(c, s, 16, 52)
    panel_2(c, s, 16, 304)
    panel_3(c, s, 458, 304)
    panel_4(c, s, 16, 582)
    panel_5(c, s, 16, 770)
    panel_6(c, s, 458, 770)
    panel_7(c, 16, 1116)
    return c.svg(1340, c.say("title"))


def main() -> None:
    """Write both pictures."""
    parser = argparse.ArgumentParser(description="Draw the figure of docs/walkthrough.md, in both languages.")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where to write (default: %(default)s)")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for language in LANGUAGES:
        (folder / FILES[language]).write_text(draw(language), encoding="utf-8")


if __name__ == "__main__":
    main()
