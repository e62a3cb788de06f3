"""Reads values of a parsed config.json. Each is refused by name where it is missing, out of range or cannot run.

Knows nothing about families.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pilotfish_engine.errors import CheckpointError
from pilotfish_engine.model.shape import RopeShape

MOST = 1 << 24  # of a size that has no limit of its own
_POSITIONS = ("max_position_embeddings", "original_max_position_embeddings", "sliding_window")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts")
MOST_OF = {"num_hidden_layers": 1024, **dict.fromkeys(_POSITIONS, 1 << 28), **dict.fromkeys(_EXPERTS, 4096)}
MOST_TOKEN_ID = (1 << 31) - 1


@dataclass(frozen=True)
class Config:
    """where: names the file in errors."""

    values: Mapping[str, Any]
    where: str

    def positive(self, key: str, default: int | None = None) -> int:
        return self.whole(key, default, least=1)

    def whole(self, key: str, default: int | None = None, least: int = 0) -> int:
        value = self.values.get(key)
        return whole(default if value is None else value, f"{self.where}: {key}", least, MOST_OF.get(key, MOST))

    def number(self, key: str, default: float | None = None, least: float = 0.0, most: float = 1e12) -> float:
        """From `least` to `most`, which are finite."""
        value: Any = self.values.get(key)
        value = default if value is None else value
        if type(value) not in (int, float) or not least <= value <= most:
            raise CheckpointError(f"{self.where}: {key} is {value!r}; a number from {least:g} to {most:g} is needed")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key)
        value = default if value is None else value
        if value not in (True, False):  # 0 and 1 too
            raise CheckpointError(f"{self.where}: {key} is {value!r}; true or false is needed")
        return bool(value)

    def inner(self, key: str) -> dict[str, Any]:
        """Empty where there is none."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, dict):
            raise CheckpointError(f"{self.where}: {key} is {value!r}; an object is needed")
        return dict(value or {})

    def texts(self, key: str) -> list[str]:
        """Empty where there are none."""
        return self._list(key, str, "texts")

    def numbers(self, key: str) -> list[int]:
        """Empty where there are none."""
        return self._list(key, int, "whole numbers")

    def _list(self, key: str, kind: type, name: str) -> list[Any]:
        value = self.values.get(key)
        value = [] if value is None else value
        if not isinstance(value, list) or not all(type(part) is kind for part in value):
            raise CheckpointError(f"{self.where}: {key} is {value!r}; a list of {name} is needed")
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        """Of a field that holds one, several or none. Some write -1 for none."""
        value = self.values.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(i) is int and -1 <= i <= MOST_TOKEN_ID for i in ids):
            raise CheckpointError(f"{self.where}: {key} is {value!r}; numbers of tokens are needed")
        return tuple(i for i in ids if i >= 0)

    def only(self, key: str, *supported: object) -> None:
        """Refuses a config whose `key` is there with another value."""
        value = self.values.get(key)
        if value is not None and value not in supported:
            would_work = " or ".join(repr(other) for other in supported)
            raise CheckpointError(f"{self.where}: {key} {value!r} is not supported; {would_work} would work")


def whole(value: Any, name: str, least: int, most: int = MOST) -> int:
    """A whole number of this range. Raises CheckpointError."""
    if type(value) is not int or value < least:
        kind = "positive integer" if least == 1 else f"whole number from {least}"
        raise CheckpointError(f"{name} is {value!r}; a {kind} is needed")
    if value > most:
        raise CheckpointError(f"{name} is {value}; at most {most} would work")
    return value


def architecture_of(config: Mapping[str, Any], where: str) -> str:
    """The first of `architectures`; "none" where there is none."""
    return (Config(config, where).texts("architectures") or ["none"])[0]


def read_rope(config: Config, head_dim: int, max_positions: int, partial: float | None) -> RopeShape:
    """Both spellings: rope_parameters (transformers 5), and rope_theta with rope_scaling. partial: the share of a head
    that the family rotates where the config is silent; None for one that always rotates whole heads."""
    rope = Config({**config.values, **_rope_values(config)}, config.where)
    nested = [key for key, value in _rope_values(config).items() if isinstance(value, dict)]
    if nested:
        raise CheckpointError(f"{config.where}: rope for {nested[0]} alone is not supported; one for all would work")
    part = rope.number("partial_rotary_factor", partial or 1.0, most=1.0)
    if part != 1 and partial is None:
        raise CheckpointError(
            f"{config.where}: partial_rotary_factor {part} is not supported for this family; 1.0 would work"
        )
    common: dict[str, Any] = {
        "theta": rope.number("rope_theta", 10000.0, least=1.001),
        "rotated": None if part == 1 else int(head_dim * part),
    }
    own = _rope_values(config)
    kind = own.get("rope_type", own.get("type", "default"))
    if kind in ("default", "dynamic"):
        # dynamic: only past max_position_embeddings do angles change, with every token; no cached key would stay right
        return RopeShape(**common)
    if kind not in ("linear", "llama3", "yarn"):
        raise CheckpointError(
            f"{config.where}: rope type {kind!r} is not supported; supported are default, linear, dynamic, llama3, yarn"
        )
    scaling = Config(own, f"{config.where}: {kind} rope")
    original = scaling.positive("original_max_position_embeddings", max_positions)
    common |= {"scaling": kind, "original_max_positions": original}
    if kind == "yarn":
        return _yarn(scaling, common, max_positions)
    common["factor"] = scaling.number("factor", **_FACTOR)
    if kind == "llama3":
        low = common["low_freq_factor"] = scaling.number("low_freq_factor", least=1e-6)
        high = common["high_freq_factor"] = scaling.number("high_freq_factor", least=1e-6)
        if high <= low:
            raise CheckpointError(f"{scaling.where}: high_freq_factor {high:g} is not above low_freq_factor {low:g}")
    return RopeShape(**common)


def yarn_temperature(config: Config, rope: RopeShape) -> float:
    """What multiplies DeepSeek's scores, which the scaling of rope sharpens too."""
    weight = Config(_rope_values(config), config.where).number("mscale_all_dim", 0.0)
    return 1.0 if rope.scaling == "none" or not weight else _yarn_magnitude(rope.factor, weight) ** 2


def read_window(config: Config, used: bool) -> int | None:
    """How many positions a layer with a sliding window sees; None where the config has no window. used: whether one is
    used where the config is silent."""
    if config.values.get("sliding_window") is None or not config.flag("use_sliding_window", used):
        return None
    return config.positive("sliding_window")


_FACTOR = {"least": 1e-3, "most": 1e6}


def _rope_values(config: Config) -> dict[str, Any]:
    own = config.inner("rope_parameters") or config.inner("rope_scaling")
    return {key: value for key, value in own.items() if value is not None}


def _yarn(rope: Config, common: dict[str, Any], max_positions: int) -> RopeShape:
    factor = rope.number("factor", max_positions / common["original_max_positions"], **_FACTOR)
    over, under = rope.number("mscale", 0.0, most=1e3), rope.number("mscale_all_dim", 0.0, most=1e3)
    magnitude = _yarn_magnitude(factor)
    if over and under:
        magnitude = _yarn_magnitude(factor, over) / _yarn_magnitude(factor, under)
    return RopeShape(
        **common,
        factor=factor,
        beta_fast=rope.number("beta_fast", 32.0, least=1e-6),
        beta_slow=rope.number("beta_slow", 1.0, least=1e-6),
        truncate=rope.flag("truncate", True),
        magnitude=rope.number("attention_factor", magnitude, least=1e-6, most=1e3),
    )


def _yarn_magnitude(factor: float, weight: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
