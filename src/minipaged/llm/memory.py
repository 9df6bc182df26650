"""How many blocks the KV pool gets, and what that does to `max_model_len`."""

from __future__ import annotations

from dataclasses import dataclass

from minipaged._warnings import warn
from minipaged.errors import PoolSizeWarning
from minipaged.kv.address import longest_request, request_blocks
from minipaged.model.config import ModelConfig
from minipaged.model.parameters import num_weights

CPU_MEMORY_SHARE = 0.25
"""Share of the memory left after the weights that the pool takes on the CPU when nothing is said: other processes live
there too.
"""


@dataclass(frozen=True, slots=True)
class PoolSize:
    """num_blocks blocks serve requests of at most max_model_len tokens; `note` says what was lowered, for the start-up
    summary.
    """

    num_blocks: int
    max_model_len: int
    note: str | None = None


def size_pool(
    *,
    block_bytes: int,
    block_size: int,
    available_bytes: int,
    model_max_len: int,
    max_num_seqs: int,
    max_model_len: int | None = None,
    num_blocks: int | None = None,
    kv_cache_memory: int | None = None,
    available_source: str = "a quarter of the memory left",
) -> PoolSize:
    """Choose the pool. block_bytes: K and V of one block in all layers; available_bytes: what an automatic pool may
    take, and available_source says for messages where that number comes from.

    `num_blocks` wins over `kv_cache_memory` (bytes), which wins over `available_bytes`; of the last no more is taken
    than `max_num_seqs` requests of full length can fill. N blocks hold
    requests of `longest_request` tokens. ValueError if memory cannot hold one request of an explicit
    `max_model_len`; a `max_model_len` that was not asked for is lowered to the pool, with a warning.
    """
    if max_model_len is not None and max_model_len > model_max_len:
        raise ValueError(f"max_model_len = {max_model_len} is more than the model's {model_max_len} positions")
    wanted_len = max_model_len or model_max_len
    wanted_blocks = request_blocks(wanted_len, block_size)
    if num_blocks is not None:
        if num_blocks < wanted_blocks:
            note = (
                f"num_blocks = {num_blocks} holds requests of {longest_request(num_blocks, block_size)} tokens, "
                f"less than max_model_len = {wanted_len}: longer ones will be refused"
            )
            warn(note, PoolSizeWarning)
            return PoolSize(num_blocks, wanted_len, note)
        return PoolSize(num_blocks, wanted_len)
    budget = kv_cache_memory if kv_cache_memory is not None else available_bytes
    blocks = budget // block_bytes
    if kv_cache_memory is None:
        blocks = min(blocks, max(1, max_num_seqs * wanted_blocks))
    source = "kv_cache_memory" if kv_cache_memory is not None else available_source
    if blocks < 1:
        raise ValueError(
            f"{source} = {budget} bytes does not hold one block of {block_size} tokens, {block_bytes} bytes: "
            "raise kv_cache_memory or lower block_size"
        )
    if blocks >= wanted_blocks:
        return PoolSize(blocks, wanted_len)
    if max_model_len is not None:
        raise ValueError(
            f"one request of max_model_len = {max_model_len} tokens needs {wanted_blocks * block_bytes} bytes of K/V, "
            f"and {source} is {budget} bytes: raise kv_cache_memory or lower max_model_len"
        )
    lowered = longest_request(blocks, block_size)
    note = (
        f"max_model_len lowered from {wanted_len} to {lowered}: {source}, {budget} bytes, "
        f"holds {blocks} blocks; raise kv_cache_memory"
    )
    warn(note, PoolSizeWarning)
    return PoolSize(blocks, lowered, note)


def check_cpu_memory(config: ModelConfig, itemsize: int, *, tokens: int, positions: int, available: int | None) -> None:
    """MemoryError, before anything is allocated, if `available` bytes (None = unknown) cannot hold a model.

    Counted are the weights, the buffers of a step of so many tokens (`ActivationBuffers`) and the rotary table of so
    many positions: what is taken whatever the pool's size. itemsize: bytes of a weight.
    """
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    width = config.hidden_size + config.intermediate_size + (3 * heads + 2 * kv_heads) * config.head_dim
    weights = num_weights(config) * itemsize
    buffers, table = tokens * width * itemsize, positions * config.head_dim * 4
    if available is not None and weights + buffers + table > available:
        raise MemoryError(
            f"memory does not hold the weights ({_gib(weights)}), {tokens} tokens per step ({_gib(buffers)}) and "
            f"{positions} positions ({_gib(table)}): {_gib(available)} are available; lower max_num_batched_tokens or "
            "max_model_len, or take a smaller model"
        )


def gpu_pool_bytes(free: int, total: int, gpu_memory_utilization: float) -> int:
    """What the pool may take of a GPU's `total` bytes when `free` are left after the weights and a largest step.

    The share 1 - gpu_memory_utilization stays free, for captured graphs and others. ValueError if nothing is left.
    """
    available = int(free - (1.0 - gpu_memory_utilization) * total)
    if available <= 0:
        raise ValueError(
            f"gpu_memory_utilization = {gpu_memory_utilization} allows {gpu_memory_utilization * total / 2**30:.2f} of "
            f"{total / 2**30:.2f} GiB, and {(total - free) / 2**30:.2f} GiB are in use (weights, the largest step, "
            "other processes): nothing is left for the KV pool; raise gpu_memory_utilization, lower "
            "max_num_batched_tokens or max_num_seqs, or take a smaller model"
        )
    return available


def check_pool(pool_bytes: int, free: int | None, device: str) -> None:
    """MemoryError if a pool of so many bytes, which was asked for, does not fit into the `free` bytes of `device`.

    None = unknown. On a CPU pages come when they are first written: without this check the process would start, and be
    killed later.
    """
    if free is not None and pool_bytes > free:
        raise MemoryError(
            f"a KV pool of {pool_bytes} bytes ({_gib(pool_bytes)}) does not fit: {free} bytes ({_gib(free)}) of memory "
            f"are free on {device} after the weights; lower num_blocks, block_size or kv_cache_memory"
        )


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB"
