"""The table of rotary embeddings, and rotation by it where no kernel does it. Knows nothing about who rotates.

Rotation always pairs dimension i of a head with i + D/2. Checkpoints that pair neighbours, or rotate only the first
dimensions of a head, are brought to this form when they are loaded: `order` says how the dimensions of queries and keys
lie then, which changes no product of the two.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from pilotfish_engine.model.shape import RopeShape


def cos_sin_table(rope: RopeShape, head_dim: int, max_positions: int) -> Tensor:
    """float32 [max_positions, head_dim]: cosines of the head_dim/2 angles of each position, then their sines. Pairs
    that are not rotated have the angle 0."""
    rotated = rope.rotated or head_dim
    exponents = torch.arange(0, rotated, 2, dtype=torch.int64).float() / rotated
    frequencies = _scaled(1.0 / rope.theta**exponents, rope)
    angles = torch.outer(torch.arange(max_positions, dtype=torch.int64).float(), frequencies)
    unrotated = [0, (head_dim - rotated) // 2]
    cos = functional.pad(angles.cos() * rope.magnitude, unrotated, value=1.0)
    return torch.cat((cos, functional.pad(angles.sin() * rope.magnitude, unrotated)), dim=-1)


def order(head_dim: int, rotated: int, interleaved: bool = False) -> Tensor:
    """int64 [head_dim]: which of the checkpoint's dimensions comes at each place, the first of every pair before the
    second ones. interleaved: the checkpoint pairs 2i with 2i + 1, else i with i + rotated/2."""
    turning = torch.arange(rotated)
    first, second = (turning[0::2], turning[1::2]) if interleaved else turning.chunk(2)
    still = torch.arange(rotated, head_dim).view(2, -1)
    return torch.cat((first, still[0], second, still[1]))


def rotate(x: Tensor, positions: Tensor, cos_sin: Tensor) -> Tensor:
    """x [N, heads, D] → the same, rotated by the angles of `positions` int64 [N]; computed in float32."""
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def _scaled(frequencies: Tensor, rope: RopeShape) -> Tensor:
    if rope.divisors:
        frequencies = frequencies / torch.tensor(rope.divisors)
    if rope.scaling == "none":
        return frequencies
    slowed = frequencies / rope.factor
    if rope.scaling == "linear":
        return slowed
    if rope.scaling == "yarn":
        kept = _kept_by_yarn(rope, frequencies.shape[0])
    else:
        # llama3: slow waves are stretched by the factor, fast ones kept, those between interpolated
        turns = rope.original_max_positions * frequencies / (2 * math.pi)  # of each wave over the original context
        kept = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return (1 - kept) * slowed + kept * frequencies


def _kept_by_yarn(rope: RopeShape, count: int) -> Tensor:
    """float32 [count]: 1 for waves that keep their frequency, 0 for stretched ones, between them a ramp over the wave's
    number (YaRN, arXiv 2309.00071, as its authors' code has it)."""

    def number_with(turns: float) -> float:
        waves = math.log(rope.original_max_positions / (turns * 2 * math.pi))
        return 2 * count * waves / (2 * math.log(rope.theta))

    low, high = number_with(rope.beta_fast), number_with(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * count - 1)
    ramp = (torch.arange(count, dtype=torch.float32) - low) / max(high - low, 0.001)
    return 1 - ramp.clamp(0, 1)
