"""Rotary position embeddings: inverse frequencies, YaRN, and the table of cosines and sines that kernels read.

Sources: RoPE, Su et al. 2021 (arXiv:2104.09864); YaRN, Peng et al. 2023 (arXiv:2309.00071), with transformers'
choices where the paper leaves one (rounding of the ramp's ends, attention factor). Everything is float32 in
transformers' order of operations.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from minipaged.model.config import ModelConfig, YarnScaling
from minipaged.ops.backend import RotaryTable


def inverse_frequencies(config: ModelConfig) -> tuple[Tensor, float]:
    """float32 [D / 2] radians per position, and the factor on cos and sin (1 without YaRN).

    Pair i turns by theta^(-2i / D) per position. YaRN keeps the fast pairs, divides the slow ones by its factor, and
    blends linearly between them.
    """
    D = config.head_dim
    periods = config.rope_theta ** (torch.arange(0, D, 2, dtype=torch.float32) / D)
    frequencies = 1.0 / periods
    yarn = config.yarn
    if yarn is None:
        return frequencies, 1.0
    keep = 1 - _slow_share(config.rope_theta, D, yarn)
    stretched = 1.0 / (yarn.factor * periods)
    return stretched * (1 - keep) + frequencies * keep, yarn_attention_factor(yarn)


def _slow_share(theta: float, D: int, yarn: YarnScaling) -> Tensor:
    """float32 [D / 2]: 0 for pairs that turn more than beta_fast times within the original context, 1 below beta_slow
    turns.
    """

    def pair_with(turns: float) -> float:  # the (fractional) pair index that makes this many turns, section 3.2
        return D * math.log(yarn.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_with(yarn.beta_fast), pair_with(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, D - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp, without dividing by zero
    return ((torch.arange(D // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)


def yarn_attention_factor(yarn: YarnScaling) -> float:
    """0.1 ln(factor) + 1 (section 3.4) unless the config gives a value, or mscale and mscale_all_dim for a ratio of
    two such terms.
    """

    def term(mscale: float) -> float:
        return 1.0 if yarn.factor <= 1 else 0.1 * mscale * math.log(yarn.factor) + 1.0

    if yarn.attention_factor is not None:
        return yarn.attention_factor
    if yarn.mscale and yarn.mscale_all_dim:
        return term(yarn.mscale) / term(yarn.mscale_all_dim)
    return term(1.0)


def rotary_table(config: ModelConfig, num_positions: int, device: torch.device | str = "cpu") -> RotaryTable:
    """cos and sin for positions 0 : num_positions, float32 [num_positions, D / 2] each, YaRN's attention factor
    included.
    """
    frequencies, factor = inverse_frequencies(config)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
    cos, sin = angles.cos().mul_(factor), angles.sin_().mul_(factor)
    return RotaryTable(cos.to(device), sin.to(device))
