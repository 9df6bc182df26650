"""What the figure shows: numbers read from real `KVBlockManager` objects, none of them written by hand."""

from __future__ import annotations

from dataclasses import dataclass

from minipaged.kv import KVBlockManager

BS = 4
A, B, C, D = 0, 1, 2, 3
NAMES = "ABCD"
TOKEN = 6  # the one whose address is followed through panels 1 and 6
LENGTHS = [20 + 137 * i % 900 for i in range(64)]  # panel 5: what is stored with several block sizes


@dataclass(frozen=True)
class Moment:
    """Panel 4: sequence D after one operation."""

    length: int | None  # None: D does not exist (any more)
    table: tuple[int, ...]
    free: tuple[int, ...]


@dataclass(frozen=True)
class Scene:
    """Numbers read from managers, none of them written by hand."""

    tables: dict[int, list[int]]
    lengths: dict[int, int]
    owners: list[list[int]]  # of each physical block
    filled: list[int]  # slots of each physical block that hold a token
    free: tuple[int, ...]
    copies: list[tuple[int, int]]
    slot: int
    next_slots: list[int]  # where the next tokens of A, B and C go
    waste: int
    life: list[Moment]
    holes: str  # contiguous memory after B has left
    paged: str  # the same places as blocks of one token, and the newcomer E
    trade: list[tuple[int, float, int]]  # block size, share wasted, look-ups per step


def scene() -> Scene:
    """A of 13 tokens, B of 10, and C, a fork of B that has written one token."""
    manager = KVBlockManager(16, BS, free_order=[5, 2, 9, 1, 7, 12, 3, 10, 0, 4, 6, 8, 11, 13, 14, 15])
    manager.create_sequence(A)
    manager.append_tokens(A, 13)
    manager.create_sequence(B)
    manager.append_tokens(B, 10)
    manager.fork_sequence(B, C)
    manager.append_token(C)
    manager.check_invariants()
    tables = {sequence: list(state.block_table) for sequence, state in manager.sequences.items()}
    lengths = {sequence: state.sequence_length for sequence, state in manager.sequences.items()}
    owners: list[list[int]] = [[] for _ in range(16)]
    filled = [0] * 16
    for sequence, table in tables.items():
        for logical, block in enumerate(table):
            owners[block].append(sequence)
            filled[block] = min(lengths[sequence] - logical * BS, BS)
    assert all(len(owners[block]) == manager.ref_count(block) for block in range(16))
    free, waste, copies = manager.free_blocks, manager.internal_fragmentation_tokens(), manager.take_block_copies()
    life = _life(manager)
    return Scene(
        tables,
        lengths,
        owners,
        filled,
        free,
        copies,
        manager.slot_of(A, TOKEN),
        [manager.append_token(sequence) for sequence in (A, B, C)],
        waste,
        life,
        *_holes(),
        [_trade(size) for size in (1, 4, 16, 64, 256)],
    )


def _life(manager: KVBlockManager) -> list[Moment]:
    moments = [Moment(None, (), manager.free_blocks)]
    state = manager.create_sequence(D)
    for count in (0, BS, 1, 2):
        manager.append_tokens(D, count)
        moments.append(Moment(state.sequence_length, tuple(state.block_table), manager.free_blocks))
    manager.release_sequence(D)
    moments.append(Moment(None, (), manager.free_blocks))
    return moments[1:]


def _holes() -> tuple[str, str]:
    manager = KVBlockManager(16, 1)
    for sequence, length in enumerate((4, 3, 4, 2)):
        manager.create_sequence(sequence)
        manager.append_tokens(sequence, length)
    manager.release_sequence(B)

    def strip() -> str:
        owner = {block: "ABCDE"[s] for s, state in manager.sequences.items() for block in state.block_table}
        return "".join(owner.get(block, ".") for block in range(16))

    before = strip()
    manager.create_sequence(4)
    manager.append_tokens(4, 5)
    return before, strip()


def _trade(size: int) -> tuple[int, float, int]:
    pool = KVBlockManager(sum(LENGTHS), size)
    for sequence, length in enumerate(LENGTHS):
        pool.create_sequence(sequence)
        pool.append_tokens(sequence, length)
    blocks = pool.num_blocks_in_use
    return size, pool.internal_fragmentation_tokens() / (blocks * size), blocks
