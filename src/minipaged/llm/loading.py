"""From the keywords of `LLM` to a running engine: model, pool, runner, tokenizer, in the order in which they depend on
each other.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from minipaged import cgroup
from minipaged.engine.config import EngineConfig
from minipaged.engine.engine import Engine
from minipaged.engine.listeners import Journal
from minipaged.kv import FanOut, KVBlockManager, PagedKVCache
from minipaged.kv.address import num_logical_blocks
from minipaged.llm.memory import (
    CPU_MEMORY_SHARE,
    PoolSize,
    check_cpu_memory,
    check_pool,
    gpu_pool_bytes,
    size_pool,
)
from minipaged.llm.options import EngineOptions
from minipaged.model.hub import resolve_model
from minipaged.runner.input_batch import InputBatch
from minipaged.runner.model_runner import ModelRunner
from minipaged.runner.warm_up import warm_up
from minipaged.sampling.sampler import Sampler
from minipaged.text.chat_template import ChatTemplate
from minipaged.text.tokenizer import Tokenizer
from minipaged.threads import available_processors, set_threads

if TYPE_CHECKING:
    import torch

    from minipaged.model.qwen3 import Qwen3Model
    from minipaged.model.source import ModelSource
    from minipaged.ops.backend import Backend

logger = logging.getLogger(__name__)

GRAPHS_VARIABLE = "MINIPAGED_CUDA_GRAPHS"
"""Environment variable: 0 = decode without CUDA graphs, for debugging."""
CPU_BATCHED_TOKENS, GPU_BATCHED_TOKENS = 512, 8192
TOUCHED_TOKENS = 2048
"""What the pool holds memory for from the start. On a virtual machine whose host lends memory when it is first written,
fetching it during a prompt of 2048 tokens of Qwen3-0.6B took a tenth of the prefill."""


@dataclass(frozen=True)
class LoadedEngine:
    """An engine with everything that belongs to it."""

    engine: Engine
    model: Qwen3Model
    caches: list[PagedKVCache]
    tokenizer: Tokenizer | None
    chat_template: ChatTemplate | None
    source: ModelSource
    pool: PoolSize
    threads: int
    backend_note: str
    """Why this back end."""
    events: FanOut
    """Append a listener to follow the block manager's events."""
    close_hooks: list[Callable[[], None]] = field(default_factory=list)

    def summary(self) -> str:
        """A few lines for the start of a program: model, type, back end, threads, pool, and what was lowered."""
        manager = self.engine.block_manager
        nbytes = sum(cache.nbytes for cache in self.caches)
        kind = str(self.model.activation_dtype).removeprefix("torch.")
        lines = [
            f"model {self.source.name}: {kind} on {self.model.device}, back end {self.model.backend.name} "
            f"({self.backend_note}), {self.threads} threads (of {available_processors()} processors)",
            f"KV pool {manager.num_physical_blocks} blocks of {manager.block_size} = "
            f"{manager.num_physical_blocks * manager.block_size} tokens, {nbytes / 2**30:.2f} GiB; "
            f"max_model_len {self.engine.max_model_len}",
        ]
        return "\n".join([*lines, *([self.pool.note] if self.pool.note else [])])


def load_engine(options: EngineOptions) -> LoadedEngine:
    """Load the model and set up everything else. Errors name the option to change; nothing is left behind if one is
    raised.
    """
    threads = set_threads(options.threads)  # before the first tensor operation

    from minipaged.model.dtypes import resolve_dtype
    from minipaged.model.weights import load_model
    from minipaged.ops.registry import backend_note, get_backend

    device = _device(options.device)
    source = _source(options)
    config = source.config
    tokenizer, text_folder = _tokenizer(options, source.folder)
    if options.max_model_len is not None and options.max_model_len > config.max_context:
        raise ValueError(
            f"max_model_len = {options.max_model_len} is more than the model's {config.max_context} positions"
        )
    on_gpu = _is_gpu(device)
    batched_tokens = options.max_num_batched_tokens or (GPU_BATCHED_TOKENS if on_gpu else CPU_BATCHED_TOKENS)
    backend = get_backend(options.backend, device)
    note = "asked for" if options.backend else backend_note(backend.name, device)
    dtype = resolve_dtype(options.dtype, source.dtype, device=device, fast_bfloat16=backend.fast_bfloat16)
    positions = options.max_model_len or config.max_context
    if device.type == "cpu":
        available = cgroup.available_memory()
        check_cpu_memory(config, dtype.itemsize, tokens=batched_tokens + 1, positions=positions, available=available)
    with _naming(
        f"the weights, {batched_tokens} tokens per step and {positions} positions: "
        "lower max_num_batched_tokens or max_model_len"
    ):
        model = load_model(
            config,
            source.tensors,
            backend,
            activation_dtype=dtype,
            device=device,
            max_model_len=options.max_model_len,
            max_tokens=batched_tokens + 1,
        )
    if on_gpu:
        num_seqs = min(options.max_num_seqs, batched_tokens)
        warm_up(model, num_tokens=batched_tokens + 1, num_seqs=num_seqs, block_size=options.block_size)
    automatic = options.num_blocks is None and options.kv_cache_memory is None
    block_bytes = config.kv_bytes_per_token(model.activation_dtype.itemsize) * options.block_size
    pool = size_pool(
        block_bytes=block_bytes,
        block_size=options.block_size,
        available_bytes=_available_bytes(device, options.gpu_memory_utilization) if automatic else 0,
        available_source=_AVAILABLE_SOURCE[on_gpu],
        model_max_len=config.max_context,
        max_num_seqs=options.max_num_seqs,
        max_model_len=options.max_model_len,
        num_blocks=options.num_blocks,
        kv_cache_memory=options.kv_cache_memory,
    )
    pool_bytes = pool.num_blocks * block_bytes
    check_pool(pool_bytes, _gpu_memory(device)[0] if on_gpu else cgroup.available_memory(), str(device))
    with _naming(
        f"the KV pool of {pool.num_blocks} blocks ({pool_bytes} bytes): lower num_blocks, block_size or kv_cache_memory"
    ):
        caches = [
            PagedKVCache(
                pool.num_blocks,
                config.num_key_value_heads,
                options.block_size,
                config.head_dim,
                dtype=model.activation_dtype,
                device=device,
            )
            for _ in range(config.num_hidden_layers)
        ]
        for cache in caches if not on_gpu else ():  # there, zeros have been written already
            cache.touch(num_logical_blocks(TOUCHED_TOKENS, options.block_size))
    with _naming(
        f"the buffers of a step: lower max_num_seqs = {options.max_num_seqs} or "
        f"max_num_batched_tokens = {batched_tokens}"
    ):
        input_batch = InputBatch(
            max_tokens=batched_tokens + 1,
            max_seqs=options.max_num_seqs,
            max_blocks=min(pool.num_blocks, num_logical_blocks(pool.max_model_len, options.block_size)),
            block_size=options.block_size,
            num_slots=pool.num_blocks * options.block_size,
            device=device,
        )
    events = FanOut(input_batch.tables.on_event)
    manager = KVBlockManager(
        pool.num_blocks,
        options.block_size,
        enable_prefix_caching=options.enable_prefix_caching,
        eviction_policy=options.eviction_policy,
        listener=events,
    )
    engine = Engine(
        _runner(model, backend, caches, input_batch, min(options.max_num_seqs, batched_tokens), pool.max_model_len),
        manager,
        EngineConfig(
            max_model_len=pool.max_model_len,
            model_max_len=config.max_context,
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=batched_tokens,
            vocab_size=config.vocab_size,
            scheduling_policy=options.scheduling_policy,
            generation_defaults=source.generation_defaults,
            seed=options.seed,
            check_invariants=options.check_invariants,
            batch_invariant=backend.batch_invariant,
        ),
        tokenizer=tokenizer,
    )
    template = ChatTemplate.from_folder(text_folder, tokenizer.special_tokens) if tokenizer and text_folder else None
    loaded = LoadedEngine(engine, model, caches, tokenizer, template, source, pool, threads, note, events)
    if options.kv_journal is not None:
        journal = Journal(options.kv_journal, pool.num_blocks, options.block_size, lambda: engine.num_steps)
        events.listeners.append(journal)
        loaded.close_hooks.append(journal.close)
    logger.info("%s", loaded.summary())
    return loaded


@contextmanager
def _naming(what: str) -> Iterator[None]:
    """What allocators raise, each in its own way, as one MemoryError that says what did not fit and what to change."""
    try:
        yield
    except (MemoryError, OverflowError, OSError, RuntimeError) as error:
        text = str(error)
        no_memory = isinstance(error, MemoryError | OverflowError) or getattr(error, "errno", None) == errno.ENOMEM
        if no_memory or "allocate" in text or "out of memory" in text:
            raise MemoryError(f"memory does not hold {what} ({text.splitlines()[0] if text else error!r})") from error
        raise


def _source(options: EngineOptions) -> ModelSource:
    from minipaged.model.source import ModelSource

    if isinstance(options.model, ModelSource):
        return options.model
    return ModelSource.from_folder(resolve_model(options.model, options.revision))


def _device(wanted: str | torch.device) -> torch.device:
    """The device that `device` names. ValueError if there is no such device here."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "auto":
        return torch.device("cuda" if count else "cpu")
    try:
        device = torch.device(wanted)
    except (RuntimeError, TypeError):  # torch's list of names holds many that no back end here runs on
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be 'auto', 'cpu', 'cuda' or 'cuda:N', got {wanted!r}")
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ValueError(
            f"device = {str(wanted)!r}, but PyTorch sees {count} CUDA devices here: choose 'auto' or 'cpu'"
        )
    return device


def _tokenizer(options: EngineOptions, folder: Path | None) -> tuple[Tokenizer | None, Path | None]:
    """The tokenizer, and the folder where its chat template lies. folder: the model's, None if it has none."""
    if isinstance(options.tokenizer, Tokenizer):
        return options.tokenizer, options.tokenizer.folder
    if options.tokenizer is None:
        return None if folder is None else Tokenizer.from_folder(folder), folder
    own = resolve_model(options.tokenizer, options.revision)
    tokenizer = Tokenizer.from_folder(own)
    if tokenizer is None:
        raise ValueError(f"tokenizer = {str(options.tokenizer)!r}: {own} has no tokenizer.json")
    return tokenizer, own


def _runner(
    model: Qwen3Model,
    backend: Backend,
    caches: list[PagedKVCache],
    input_batch: InputBatch,
    max_seqs: int,
    max_model_len: int,
) -> ModelRunner:
    sampler = Sampler(model.config.vocab_size)
    if not _is_gpu(model.device) or not backend.capturable or os.environ.get(GRAPHS_VARIABLE) == "0":
        return ModelRunner(model, backend, caches, sampler, input_batch)
    from minipaged.runner.graph_runner import GraphRunner

    return GraphRunner(model, backend, caches, sampler, input_batch, max_seqs=max_seqs, max_model_len=max_model_len)


_AVAILABLE_SOURCE = ("a quarter of the memory left", "the GPU memory that gpu_memory_utilization leaves")


def _available_bytes(device: torch.device, gpu_memory_utilization: float) -> int:
    """What an automatic pool may take now that the weights are loaded and, on a GPU, a largest step has run."""
    if _is_gpu(device):
        return gpu_pool_bytes(*_gpu_memory(device), gpu_memory_utilization)
    available = cgroup.available_memory()
    return int((available if available is not None else 4 << 30) * CPU_MEMORY_SHARE)


def _is_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


def _gpu_memory(device: torch.device) -> tuple[int, int]:
    """Free and total bytes."""
    import torch

    return torch.cuda.mem_get_info(device)
