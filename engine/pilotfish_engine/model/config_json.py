"""Values of a config.json that is already parsed, each refused by name where it is missing or cannot run.

Knows nothing about families.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pilotfish_engine.errors import CheckpointError
from pilotfish_engine.model.shape import RopeShape


@dataclass(frozen=True)
class Config:
    """where: names the file in errors."""

    values: Mapping[str, Any]
    where: str

    def positive(self, key: str, default: int | None = None) -> int:
        value = self.values.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or value <= 0:
            raise CheckpointError(f"{self.where}: {key} is {value!r}; a positive integer is needed")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key)
        return default if value is None else bool(value)

    def only(self, key: str, *supported: object) -> None:
        """Refuses a config whose `key` is there with another value."""
        value = self.values.get(key)
        if value is not None and value not in supported:
            would_work = " or ".join(repr(other) for other in supported)
            raise CheckpointError(f"{self.where}: {key} {value!r} is not supported; {would_work} would work")


def read_rope(config: Config, head_dim: int, max_positions: int, partial: float | None) -> RopeShape:
    """Both spellings: rope_parameters (transformers 5), and rope_theta with rope_scaling. partial: the share of a head
    that the family rotates where the config is silent; None for one that always rotates whole heads."""
    values = config.values
    rope = _rope_values(values)
    nested = [key for key, value in rope.items() if isinstance(value, dict)]
    if nested:
        raise CheckpointError(f"{config.where}: rope for {nested[0]} alone is not supported; one for all would work")
    part = float(rope.get("partial_rotary_factor", values.get("partial_rotary_factor", partial or 1.0)))
    if part != 1 and partial is None:
        raise CheckpointError(
            f"{config.where}: partial_rotary_factor {part} is not supported for this family; 1.0 would work"
        )
    common: dict[str, Any] = {
        "theta": float(rope.get("rope_theta", values.get("rope_theta", 10000.0))),
        "rotated": None if part == 1 else int(head_dim * part),
    }
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind in ("default", "dynamic"):
        # dynamic: only past max_position_embeddings do angles change, with every token; no cached key would stay right
        return RopeShape(**common)
    if kind not in ("linear", "llama3", "yarn"):
        raise CheckpointError(
            f"{config.where}: rope type {kind!r} is not supported; supported are default, linear, dynamic, llama3, yarn"
        )
    original = int(rope.get("original_max_position_embeddings") or max_positions)
    common |= {"scaling": kind, "original_max_positions": original}
    if kind == "yarn":
        return _yarn(rope, common, max_positions)
    keys = ("factor", "low_freq_factor", "high_freq_factor") if kind == "llama3" else ("factor",)
    for key in keys:
        if not isinstance(rope.get(key), int | float):
            raise CheckpointError(f"{config.where}: {key} of {kind} rope is {rope.get(key)!r}; a number is needed")
        common[key] = float(rope[key])
    return RopeShape(**common)


def yarn_temperature(config: Config, rope: RopeShape) -> float:
    """What multiplies DeepSeek's scores, which the scaling of rope sharpens too."""
    weight = _rope_values(config.values).get("mscale_all_dim")
    return 1.0 if rope.scaling == "none" or not weight else _yarn_magnitude(rope.factor, float(weight)) ** 2


def read_window(config: Config, used: bool) -> int | None:
    """How many positions a layer with a sliding window sees; None where the config has no window. used: whether one is
    used where the config is silent."""
    if config.values.get("sliding_window") is None or not config.flag("use_sliding_window", used):
        return None
    return config.positive("sliding_window")


def _rope_values(config: Mapping[str, Any]) -> dict[str, Any]:
    return dict(config.get("rope_parameters") or config.get("rope_scaling") or {})


def _yarn(rope: Mapping[str, Any], common: dict[str, Any], max_positions: int) -> RopeShape:
    factor = float(rope.get("factor") or max_positions / common["original_max_positions"])
    over, under, magnitude = rope.get("mscale"), rope.get("mscale_all_dim"), rope.get("attention_factor")
    if magnitude is None:
        magnitude = _yarn_magnitude(factor)
        if over and under:
            magnitude = _yarn_magnitude(factor, over) / _yarn_magnitude(factor, under)
    return RopeShape(
        **common,
        factor=factor,
        beta_fast=float(rope.get("beta_fast") or 32),
        beta_slow=float(rope.get("beta_slow") or 1),
        truncate=bool(rope.get("truncate", True)),
        magnitude=float(magnitude),
    )


def _yarn_magnitude(factor: float, weight: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
