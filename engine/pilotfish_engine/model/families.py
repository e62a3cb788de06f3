"""What each family's config.json says: architecture → shape. One function a family, over what all have in common.

Reads configurations that are already parsed. Knows nothing about files or weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pilotfish_engine.errors import CheckpointError
from pilotfish_engine.model.shape import ModelShape, RopeShape, check_heads

PARTIAL_ROTATION = {"Glm4MoeForCausalLM": 0.5, "Qwen3NextForCausalLM": 0.25}  # of a head, where the config is silent


def shape_from_config(config: Mapping[str, Any], where: str) -> ModelShape:
    """The shape that a config.json describes; `where` names it in errors. Raises CheckpointError on what cannot run."""
    shape = layer_shape_from_config(config, where)
    kinds = _layer_types(config, shape.num_layers)
    for index, kind in enumerate(kinds):
        if kind != "full_attention":
            raise CheckpointError(
                f"{where}: layer {index} of {shape.architecture} is of type {kind!r}, which is not supported; "
                "a model whose layers are all 'full_attention' would work"
            )
    return shape


def layer_shape_from_config(config: Mapping[str, Any], where: str) -> ModelShape:
    """The same for drafts that hold a full-attention layer of the family, whatever the target's other layers are."""
    architecture = str((config.get("architectures") or ["none"])[0])
    if architecture not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise CheckpointError(f"{where}: architecture {architecture} is not supported; supported are {known}")
    read = _Config(config, where)
    read.only("hidden_act", "silu")
    read.only("mlp_bias", False)
    read.only("quantization_config", None)
    hidden, heads = read.positive("hidden_size"), read.positive("num_attention_heads")
    max_positions = read.positive("max_position_embeddings")
    _check_window(config, max_positions, where)
    head_dim = read.positive("head_dim", hidden // heads)
    shape = ModelShape(
        architecture=architecture,
        num_layers=read.positive("num_hidden_layers"),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=read.positive("num_key_value_heads", heads),
        head_dim=head_dim,
        intermediate_size=read.positive("intermediate_size"),
        vocab_size=read.positive("vocab_size"),
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=_rope(read, architecture, head_dim, max_positions),
        max_position_embeddings=max_positions,
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        bos_token_id=config.get("bos_token_id"),
        eos_token_ids=token_ids(config.get("eos_token_id")),
    )
    shape = FAMILIES[architecture](read, shape)
    check_heads(shape, where)
    return shape


def token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """A config's token id field, which may be one, several or none."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)


@dataclass(frozen=True)
class _Config:
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


def _llama(config: _Config, shape: ModelShape) -> ModelShape:
    bias = config.flag("attention_bias", False)
    return replace(shape, qkv_bias=bias, out_bias=bias)


def _mistral(config: _Config, shape: ModelShape) -> ModelShape:
    config.only("attention_bias", False)
    return shape


def _qwen2(config: _Config, shape: ModelShape) -> ModelShape:
    return replace(shape, qkv_bias=True)


def _mimo(config: _Config, shape: ModelShape) -> ModelShape:
    return replace(_qwen2(config, shape), draft_prefixes=("model.mtp_layers.",))


def _qwen3(config: _Config, shape: ModelShape) -> ModelShape:
    return replace(_llama(config, shape), qk_norm=True)


FAMILIES: Mapping[str, Callable[[_Config, ModelShape], ModelShape]] = {
    "LlamaForCausalLM": _llama,
    "MiMoForCausalLM": _mimo,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
}


def _layer_types(config: Mapping[str, Any], num_layers: int) -> list[str]:
    kinds = config.get("layer_types")
    return ["full_attention"] * num_layers if kinds is None else kinds


def _check_window(config: Mapping[str, Any], max_positions: int, where: str) -> None:
    window = config.get("sliding_window")
    uses_window = config.get("use_sliding_window", config.get("architectures") == ["MistralForCausalLM"])
    if uses_window and window is not None and window < max_positions:
        raise CheckpointError(
            f"{where}: sliding_window {window} is below max_position_embeddings {max_positions}; "
            "only full attention is supported"
        )


def _rope(config: _Config, architecture: str, head_dim: int, max_positions: int) -> RopeShape:
    """Both spellings: rope_parameters (transformers 5), and rope_theta with rope_scaling."""
    values = config.values
    rope = dict(values.get("rope_parameters") or values.get("rope_scaling") or {})
    partial = PARTIAL_ROTATION.get(architecture, 1.0)
    part = float(rope.get("partial_rotary_factor", values.get("partial_rotary_factor", partial)))
    if part != 1 and architecture not in PARTIAL_ROTATION:
        raise CheckpointError(
            f"{config.where}: partial_rotary_factor {part} is not supported for {architecture}; 1.0 would work"
        )
    common: dict[str, Any] = {
        "theta": float(rope.get("rope_theta", values.get("rope_theta", 10000.0))),
        "rotated": None if part == 1 else int(head_dim * part),
    }
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return RopeShape(**common)
    if kind not in ("linear", "llama3", "yarn"):
        raise CheckpointError(
            f"{config.where}: rope type {kind!r} is not supported; supported are default, linear, llama3, yarn"
        )
    original = int(rope.get("original_max_position_embeddings") or max_positions)
    common |= {"scaling": kind, "original_max_positions": original}
    if kind == "yarn":
        return _yarn(rope, common, max_positions)
    common["factor"] = float(rope["factor"])
    if kind == "llama3":
        common |= {key: float(rope[key]) for key in ("low_freq_factor", "high_freq_factor")}
    return RopeShape(**common)


def _yarn(rope: Mapping[str, Any], common: dict[str, Any], max_positions: int) -> RopeShape:
    factor = float(rope.get("factor") or max_positions / common["original_max_positions"])
    over, under = rope.get("mscale"), rope.get("mscale_all_dim")
    magnitude = rope.get("attention_factor")
    if magnitude is None:
        magnitude = (
            yarn_magnitude(factor, over) / yarn_magnitude(factor, under) if over and under else yarn_magnitude(factor)
        )
    return RopeShape(
        **common,
        factor=factor,
        beta_fast=float(rope.get("beta_fast") or 32),
        beta_slow=float(rope.get("beta_slow") or 1),
        truncate=bool(rope.get("truncate", True)),
        magnitude=float(magnitude),
    )


def yarn_magnitude(factor: float, weight: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
