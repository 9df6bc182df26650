"""Address arithmetic of a paged KV cache as pure functions (article, sections 2 to 6, and the GQA map).

    token position -> logical block, offset -> (block table) physical block -> slot = physical block * bs + offset

Positions, lengths and sizes are counted in tokens, blocks in blocks.
"""

from __future__ import annotations


def _at_least(name: str, value: int, minimum: int) -> None:
    if value < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {value}")


def logical_block(pos: int, bs: int) -> int:
    """Index in the sequence's block table of the block that holds token `pos`: floor(pos / bs)."""
    _at_least("token position", pos, 0)
    _at_least("block size", bs, 1)
    return pos // bs


def block_offset(pos: int, bs: int) -> int:
    """Place of token `pos` inside its block: pos mod bs."""
    _at_least("token position", pos, 0)
    _at_least("block size", bs, 1)
    return pos % bs


def slot(block: int, offset: int, bs: int) -> int:
    """Flat slot of place `offset` in block `block`: block * bs + offset. ValueError for an offset outside of it."""
    _at_least("physical block", block, 0)
    if not 0 <= offset < bs:
        raise ValueError(f"offset {offset} is outside a block of {bs} slots")
    return block * bs + offset


def split_slot(slot: int, bs: int) -> tuple[int, int]:
    """The inverse of `slot`: (physical block, offset)."""
    _at_least("slot", slot, 0)
    _at_least("block size", bs, 1)
    return divmod(slot, bs)


def num_logical_blocks(length: int, bs: int) -> int:
    """Blocks that a sequence of `length` tokens needs: ceil(length / bs)."""
    _at_least("sequence length", length, 0)
    _at_least("block size", bs, 1)
    return -(-length // bs)


def request_blocks(length: int, bs: int) -> int:
    """Blocks for a request of `length` tokens, prompt and output. The last one that is sampled is never written."""
    return num_logical_blocks(max(length - 1, 0), bs)


def longest_request(blocks: int, bs: int) -> int:
    """The longest prompt + output, in tokens, for which so many blocks suffice: the inverse of `request_blocks`."""
    return blocks * bs + 1


def last_block_waste(length: int, bs: int) -> int:
    """Internal fragmentation: slots of the last block without a token, 0 for a full block and for an empty sequence."""
    _at_least("sequence length", length, 0)
    _at_least("block size", bs, 1)
    return -length % bs


def kv_head_of(q_head: int, hq: int, hkv: int) -> int:
    """Key-value head that query head `q_head` of `hq` reads (grouped-query attention): q_head // (hq / hkv)."""
    _at_least("number of key-value heads", hkv, 1)
    if hq < hkv or hq % hkv:
        raise ValueError(f"{hq} query heads cannot be shared evenly by {hkv} key-value heads")
    if not 0 <= q_head < hq:
        raise ValueError(f"query head {q_head} is outside 0..{hq - 1}")
    return q_head // (hq // hkv)


def kv_cache_bytes(layers: int, tokens: int, hkv: int, d: int, itemsize: int) -> int:
    """Bytes of K and V of `tokens` tokens in all layers: 2 * layers * tokens * hkv * d * itemsize."""
    for name, value in (("layers", layers), ("tokens", tokens), ("hkv", hkv), ("d", d), ("itemsize", itemsize)):
        _at_least(name, value, 0)
    return 2 * layers * tokens * hkv * d * itemsize


def reserved_utilisation(length: int, max_length: int) -> float:
    """Used share (0..1) of a contiguous cache that reserves `max_length` tokens for a sequence of `length`."""
    _at_least("reserved length", max_length, 1)
    if not 0 <= length <= max_length:
        raise ValueError(f"length {length} is outside 0..{max_length}, the reserved length")
    return length / max_length
