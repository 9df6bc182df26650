"""One uniform number per token as a pure function of (seed, child, position): nothing to save, nothing that a batch
could change."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

UInt64s: TypeAlias = "np.ndarray[Any, np.dtype[np.uint64]]"
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix64(z: UInt64s) -> UInt64s:
    """The output function of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014), a
    bijection."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def uniforms(seeds: UInt64s, children: UInt64s, positions: UInt64s) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Uniform numbers in [0, 1) with 53 bits, one per row; all arguments uint64 [R].

    Each (seed, child) has its own SplitMix64 stream, of which `position` picks one number: the state of that generator
    is a counter.
    """
    stream = mix64(mix64(seeds + _GOLDEN) + (children + np.uint64(1)) * _GOLDEN)
    bits = mix64(stream + (positions + np.uint64(1)) * _GOLDEN)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
