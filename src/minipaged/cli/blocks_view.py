"""Draws the physical block pool and each sequence's block table in the terminal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from minipaged.kv import KVBlockManager

COLOURS = (
    "cyan",
    "magenta",
    "green",
    "yellow",
    "blue",
    "red",
    "bright_cyan",
    "bright_magenta",
    "bright_green",
    "bright_yellow",
)
CELLS_AT_MOST = 256  # a pool of thousands of blocks is cut after the last block that holds something


@dataclass(frozen=True, slots=True)
class PoolSnapshot:
    """The manager's state between two steps: who owns which block, and what is free or idle."""

    num_blocks: int
    block_size: int
    free: frozenset[int]
    tables: dict[int, tuple[int, ...]]  # sequence -> physical blocks in logical order
    lengths: dict[int, int]

    @classmethod
    def of(cls, manager: KVBlockManager) -> PoolSnapshot:
        """Copy what the drawing needs; O(blocks)."""
        live = manager.sequences.values()
        return cls(
            num_blocks=manager.num_physical_blocks,
            block_size=manager.block_size,
            free=frozenset(manager.free_blocks),
            tables={s.sequence_id: tuple(s.block_table) for s in live},
            lengths={s.sequence_id: s.sequence_length for s in live},
        )

    @property
    def owners(self) -> dict[int, list[int]]:
        """block -> the sequences whose tables hold it."""
        owners: dict[int, list[int]] = {}
        for sequence, table in self.tables.items():
            for block in table:
                owners.setdefault(block, []).append(sequence)
        return owners

    @property
    def blocks_in_use(self) -> int:
        """Blocks in at least one table; a shared one counts once."""
        return len(self.owners)

    def tokens_in(self, block: int, sequence: int) -> int:
        """How many slots of the block hold a token of the sequence."""
        first = self.tables[sequence].index(block) * self.block_size
        return min(self.block_size, self.lengths[sequence] - first)


def print_pool(snapshot: PoolSnapshot, console: Console | None = None) -> None:
    """The pool as a grid, then a table per sequence: colour = owner, `*` = shared, `-` = partly filled, `:` = idle."""
    console = console or Console(stderr=True)
    colour = {sequence: COLOURS[i % len(COLOURS)] for i, sequence in enumerate(sorted(snapshot.tables))}
    console.print(Panel(_grid(snapshot, colour, console.width - 4), title=_title(snapshot), title_align="left"))
    console.print(_tables(snapshot, colour))
    console.print(Text("* shared   - partly filled   : idle, still cached   . free", style="dim"))


def _title(snapshot: PoolSnapshot) -> str:
    idle = snapshot.num_blocks - len(snapshot.free) - snapshot.blocks_in_use
    return (
        f"physical blocks: {snapshot.blocks_in_use} in use, {idle} idle, {len(snapshot.free)} free "
        f"of {snapshot.num_blocks}, {snapshot.block_size} tokens each"
    )


def _grid(snapshot: PoolSnapshot, colour: dict[int, str], width: int) -> Text:
    owners, grid = snapshot.owners, Text()
    held = [b for b in range(snapshot.num_blocks) if b not in snapshot.free]
    shown = min(snapshot.num_blocks, CELLS_AT_MOST, (held[-1] + 1 if held else 0) + 8)
    cell = len(str(snapshot.num_blocks - 1)) + 2
    per_row = 1 << max(0, (width // cell).bit_length() - 1)  # a power of two makes ids easy to find
    for block in range(shown):
        if block and block % per_row == 0:
            grid.append("\n")
        if block in owners:
            first, *others = owners[block]
            partial = snapshot.tokens_in(block, first) < snapshot.block_size
            style = f"black on {colour[first]}" if not others else f"bold white on {colour[first]}"
            grid.append(f"{block}{'*' if others else '-' if partial else ' '}".rjust(cell - 1), style)
        else:
            grid.append(f"{block}{'.' if block in snapshot.free else ':'}".rjust(cell - 1), "dim")
        grid.append(" ")
    if shown < snapshot.num_blocks:
        rest = snapshot.num_blocks - shown
        grid.append(f"\n... {rest} more blocks ({sum(b >= shown for b in snapshot.free)} free)", "dim")
    return grid


def _tables(snapshot: PoolSnapshot, colour: dict[int, str]) -> Table:
    owners = snapshot.owners
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("sequence")
    table.add_column("tokens", justify="right")
    table.add_column("waste", justify="right")
    table.add_column("block table (physical block:tokens)")
    for sequence, blocks in sorted(snapshot.tables.items()):
        length, row = snapshot.lengths[sequence], Text()
        for block in blocks:
            mark = "*" if len(owners[block]) > 1 else ""
            row.append(f"{block}{mark}:{snapshot.tokens_in(block, sequence)} ", colour[sequence])
        waste = len(blocks) * snapshot.block_size - length
        table.add_row(Text(str(sequence), colour[sequence]), str(length), str(waste), row)
    return table
