"""What `bench serve` sends, and when: random requests or a recorded trace."""

from __future__ import annotations

import csv
import math
import random
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path

WORDS = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state")


@dataclass(frozen=True, slots=True)
class Planned:
    """One request: when to send it (seconds after the start), its prompt (token ids or text), tokens wanted."""

    at: float
    prompt: list[int] | str
    prompt_tokens: int
    output_tokens: int


def random_lengths(
    count: int, prompt_tokens: int, output_tokens: int, spread: float, seed: int
) -> list[tuple[int, int]]:
    """(prompt, output) lengths, uniform within +- `spread` (0 to 1) of the two means."""
    rng = random.Random(seed)

    def around(mean: int) -> int:
        return max(1, round(mean * rng.uniform(1 - spread, 1 + spread)))

    return [(around(prompt_tokens), around(output_tokens)) for _ in range(count)]


def azure_trace(path: Path, count: int) -> list[tuple[float, int, int]]:
    """(seconds since the first row, prompt, output) of the first `count` rows of an Azure LLM inference trace: CSV with
    the columns TIMESTAMP, ContextTokens, GeneratedTokens. ValueError if it is something else.
    """
    rows: list[tuple[float, int, int]] = []
    start: datetime | None = None
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        wanted = {"TIMESTAMP", "ContextTokens", "GeneratedTokens"}
        if not wanted <= set(reader.fieldnames or ()):
            raise ValueError(f"{path} must have the columns {sorted(wanted)}, found {reader.fieldnames}")
        for row in islice(reader, count):
            stamp, _, fraction = row["TIMESTAMP"].partition(".")
            time = datetime.fromisoformat(stamp)
            start = start or time
            seconds = (time - start).total_seconds() + float(f"0.{fraction[:6] or '0'}")
            rows.append((seconds, max(1, int(row["ContextTokens"])), max(1, int(row["GeneratedTokens"]))))
    if not rows:
        raise ValueError(f"{path} has no rows")
    first = rows[0][0]
    return [(seconds - first, prompt, output) for seconds, prompt, output in rows]


def poisson_times(count: int, rate: float, seed: int) -> list[float]:
    """Arrival times of a Poisson process with `rate` per second; infinite: all at once."""
    if math.isinf(rate):
        return [0.0] * count
    rng, now, times = random.Random(seed + 1), 0.0, []
    for _ in range(count):
        times.append(now)
        now += rng.expovariate(rate)
    return times


def plan(
    arrivals: Iterable[float],
    lengths: Iterable[tuple[int, int]],
    *,
    form: str,
    vocabulary: int,
    seed: int,
    max_prompt_tokens: int | None = None,
    max_output_tokens: int | None = None,
) -> list[Planned]:
    """The requests, each with a prompt of its own: token ids below `vocabulary`, or about as many words of text."""
    rng = random.Random(seed + 2)
    planned = []
    for at, (prompt_tokens, output_tokens) in zip(arrivals, lengths, strict=True):
        size = min(prompt_tokens, max_prompt_tokens or prompt_tokens)
        prompt: list[int] | str = [rng.randrange(vocabulary) for _ in range(size)]
        if form == "text":
            prompt = " ".join(rng.choice(WORDS) for _ in range(size))
        planned.append(Planned(at, prompt, size, min(output_tokens, max_output_tokens or output_tokens)))
    return planned
