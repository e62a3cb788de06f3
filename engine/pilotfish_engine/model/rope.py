"""The table of rotary embeddings. Knows nothing about who rotates by it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pilotfish_engine.model.shape import RopeShape


def cos_sin_table(rope: RopeShape, head_dim: int, max_positions: int) -> Tensor:
    """float32 [max_positions, head_dim]: cosines of the head_dim/2 angles of each position, then their sines."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = _scaled(1.0 / rope.theta**exponents, rope)
    angles = torch.outer(torch.arange(max_positions, dtype=torch.int64).float(), frequencies)
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def _scaled(frequencies: Tensor, rope: RopeShape) -> Tensor:
    if rope.scaling == "none":
        return frequencies
    slowed = frequencies / rope.factor
    if rope.scaling == "linear":
        return slowed
    # llama3: slow waves are stretched by the factor, fast ones kept, those between interpolated
    turns = rope.original_max_positions * frequencies / (2 * math.pi)  # turns of each wave over the original context
    kept = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return (1 - kept) * slowed + kept * frequencies
