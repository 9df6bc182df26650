"""Draws docs/figures/terminal.svg: real runs of the commands below, as a terminal shows them.

    python tools/draw_terminal.py

Needs an installed package (or PYTHONPATH=src), and the demo model that comes with it. The figures in the picture are
those of the machine it was drawn on.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from io import StringIO
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

ROOT = Path(__file__).resolve().parent.parent
FIGURE = ROOT / "docs" / "figures" / "terminal.svg"
COLUMNS = 106
COMMANDS = (
    'minipaged generate "O Romeo, Romeo! wherefore art thou Romeo?" "ROMEO:" --n 2 --max-tokens 10 --block-size 4'
    " --num-blocks 22 --max-model-len 64 --seed 4 --show-blocks",
    "minipaged verify --max-tokens 8",
)
# Dark, with background colours on which black and white letters can both be read.
THEME = TerminalTheme(
    (24, 26, 31),
    (215, 218, 224),
    [
        (24, 26, 31),
        (224, 90, 90),
        (110, 170, 85),
        (205, 150, 60),
        (85, 135, 215),
        (180, 105, 200),
        (50, 155, 175),
        (215, 218, 224),
    ],
)


def run(command: str) -> str:
    """What a terminal would show: stdout and stderr in their order, with colours, without progress bars."""
    arguments = [sys.executable, "-m", *shlex.split(command)]
    environment = {**os.environ, "FORCE_COLOR": "1", "TERM": "xterm-256color", "COLUMNS": str(COLUMNS)}
    environment |= {"TTY_INTERACTIVE": "0"}  # Rich: colours, but nothing that is drawn over
    done = subprocess.run(
        arguments, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True
    )
    return done.stdout.replace(f"{ROOT}/", "")


def main() -> None:
    """Run the commands and write the figure."""
    console = Console(record=True, width=COLUMNS, file=StringIO(), force_terminal=True, color_system="truecolor")
    for command in COMMANDS:
        console.print(Text.assemble(("$ ", "bold green"), (command, "bold")))
        console.print(Text.from_ansi(run(command).rstrip()))
        console.print()
    without_fonts = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    without_fonts = without_fonts.replace("Fira Code, monospace", "ui-monospace, Menlo, Consolas, monospace")
    without_fonts = without_fonts.replace("<!-- Generated with Rich https://www.textualize.io -->", "")
    figure = console.export_svg(title="minipaged", theme=THEME, code_format=without_fonts, unique_id="terminal")
    FIGURE.write_text("\n".join(line.rstrip() for line in figure.splitlines()) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
