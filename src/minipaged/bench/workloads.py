"""The built-in workloads: token ids and output lengths, the same for every engine that is measured.

All are greedy, ignore the end-of-sequence token and give token ids, so that every engine does the same work. W1 to W5
are those of `benchmarks/compare.py`; "recipe" is the throughput benchmark of nano-vllm (256 sequences, seed 0:
133,966 output tokens).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np

LOWEST_ID, IDS_END = 1000, 151000  # W1 to W5 draw ids from here: real vocabulary of Qwen3, no special tokens


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """A prompt, and how many tokens are generated after it."""

    prompt: list[int]
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests that arrive together. prefix_caching: whether finding shared prefixes is part of what is measured."""

    name: str
    description: str
    requests: list[BenchRequest]
    prefix_caching: bool = False

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(len(request.prompt) for request in self.requests)

    @property
    def output_tokens(self) -> int:
        """Tokens that all requests generate."""
        return sum(request.output_tokens for request in self.requests)

    def for_vocabulary(self, vocab_size: int) -> Workload:
        """The same lengths with ids that a smaller vocabulary has (id modulo its size); itself if nothing has to
        change.
        """
        if all(max(request.prompt) < vocab_size for request in self.requests):
            return self
        folded = [replace(r, prompt=[token % vocab_size for token in r.prompt]) for r in self.requests]
        return replace(self, requests=folded, description=f"{self.description}; ids folded into {vocab_size}")

    def resized(self, prompt_tokens: int | None, output_tokens: int | None) -> Workload:
        """With other lengths, the same for every request; prompts are cut, or continued with their own beginning."""
        if prompt_tokens is None and output_tokens is None:
            return self
        requests = []
        for request in self.requests:
            length = prompt_tokens or len(request.prompt)
            repeats = -(-length // len(request.prompt))
            requests.append(BenchRequest((request.prompt * repeats)[:length], output_tokens or request.output_tokens))
        changes = [f"{n} {what} tokens" for n, what in ((prompt_tokens, "prompt"), (output_tokens, "output")) if n]
        return replace(self, requests=requests, description=f"{self.description}; changed to {', '.join(changes)}")


def _ids(generator: np.random.Generator, count: int) -> list[int]:
    ids: list[int] = generator.integers(LOWEST_ID, IDS_END, count).tolist()
    return ids


def _equal(seed: int, count: int, prompt: int, output: int) -> list[BenchRequest]:
    generator = np.random.default_rng(seed)
    return [BenchRequest(_ids(generator, prompt), output) for _ in range(count)]


def _w3() -> list[BenchRequest]:
    generator = np.random.default_rng(0)
    prompts, outputs = generator.integers(100, 513, 32), generator.integers(32, 257, 32)
    return [BenchRequest(_ids(generator, int(p)), int(o)) for p, o in zip(prompts, outputs, strict=True)]


def _recipe() -> list[BenchRequest]:
    source = random.Random(0)
    prompts = [[source.randint(0, 10000) for _ in range(source.randint(100, 1024))] for _ in range(256)]
    outputs = [source.randint(100, 1024) for _ in range(256)]
    return [BenchRequest(p, o) for p, o in zip(prompts, outputs, strict=True)]


def _shared_prefix() -> list[BenchRequest]:
    generator = np.random.default_rng(6)
    prefix = _ids(generator, 1024)
    return [BenchRequest(prefix + _ids(generator, 64), 64) for _ in range(16)]


_MAKERS: dict[str, tuple[str, Callable[[], list[BenchRequest]]]] = {
    "W1": ("1 request, prompt 128, output 128", lambda: _equal(1, 1, 128, 128)),
    "W2": ("8 requests at once, prompt 128, output 128", lambda: _equal(2, 8, 128, 128)),
    "W3": ("32 requests at once, prompts 100-512, outputs 32-256", _w3),
    "W4": ("1 prompt of 2048 tokens", lambda: _equal(4, 1, 2048, 1)),
    "W5": ("1 prompt of 8192 tokens, output 32", lambda: _equal(5, 1, 8192, 32)),
    "recipe": ("256 requests at once, prompts and outputs 100-1024", _recipe),
    "shared-prefix": ("16 requests that share 1024 prompt tokens and have 64 of their own, output 64", _shared_prefix),
    "long-prompt": ("1 prompt of 16384 tokens, output 64", lambda: _equal(7, 1, 16384, 64)),
}
WORKLOADS = tuple(_MAKERS)


def workload(name: str) -> Workload:
    """One of `WORKLOADS` by name, upper or lower case. ValueError for any other name."""
    known = {known.lower(): known for known in WORKLOADS}.get(name.lower())
    if known is None:
        raise ValueError(f"workload {name!r} is unknown; choose one of {', '.join(WORKLOADS)}")
    description, make = _MAKERS[known]
    return Workload(known, description, make(), prefix_caching=known == "shared-prefix")


def total_length(requests: Iterable[BenchRequest]) -> int:
    """Tokens of the longest request, prompt and output: what `max_model_len` has to allow."""
    return max(len(request.prompt) + request.output_tokens for request in requests)
