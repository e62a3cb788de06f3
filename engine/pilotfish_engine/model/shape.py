"""What a checkpoint says about its model: sizes, rope, special tokens; and the tensors that such a model has.

Reads configurations that are already parsed (a config.json as a mapping). Knows nothing about files or weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pilotfish_engine.errors import CheckpointError

QKV_BIAS = {"LlamaForCausalLM": False, "MistralForCausalLM": False, "Qwen2ForCausalLM": True}


@dataclass(frozen=True)
class RopeShape:
    """theta: base. factor: of `linear` and `llama3` scaling; the last three are llama3's."""

    theta: float
    scaling: Literal["none", "linear", "llama3"] = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


@dataclass(frozen=True)
class ModelShape:
    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_norm_eps: float
    rope: RopeShape
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def kv_elements_per_token(self) -> int:
        """K and V of one token in every layer."""
        return 2 * self.num_layers * self.kv_size

    def tensor_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Every weight by its Hugging Face name, each exactly once: what a checkpoint of this shape must hold."""
        hidden, inner = self.hidden_size, self.intermediate_size
        yield "model.embed_tokens.weight", (self.vocab_size, hidden)
        for layer in range(self.num_layers):
            prefix = f"model.layers.{layer}."
            yield prefix + "input_layernorm.weight", (hidden,)
            for name, size in (("q_proj", self.q_size), ("k_proj", self.kv_size), ("v_proj", self.kv_size)):
                yield f"{prefix}self_attn.{name}.weight", (size, hidden)
                if self.qkv_bias:
                    yield f"{prefix}self_attn.{name}.bias", (size,)
            yield prefix + "self_attn.o_proj.weight", (hidden, self.q_size)
            yield prefix + "post_attention_layernorm.weight", (hidden,)
            yield prefix + "mlp.gate_proj.weight", (inner, hidden)
            yield prefix + "mlp.up_proj.weight", (inner, hidden)
            yield prefix + "mlp.down_proj.weight", (hidden, inner)
        yield "model.norm.weight", (hidden,)
        if not self.tie_word_embeddings:
            yield "lm_head.weight", (self.vocab_size, hidden)


def shape_from_config(config: Mapping[str, Any], where: str) -> ModelShape:
    """The shape that a config.json describes; `where` names it in errors. Raises CheckpointError on what cannot run."""
    architectures = config.get("architectures") or ["none"]
    architecture = str(architectures[0])
    if architecture not in QKV_BIAS:
        known = ", ".join(sorted(QKV_BIAS))
        raise CheckpointError(f"{where}: architecture {architecture} is not supported; supported are {known}")
    for key, plain in (("hidden_act", "silu"), ("attention_bias", False), ("mlp_bias", False)):
        if config.get(key, plain) != plain:
            raise CheckpointError(f"{where}: {key} {config[key]!r} is not supported; {plain!r} would work")
    number = _Numbers(config, where)
    hidden, heads = number.positive("hidden_size"), number.positive("num_attention_heads")
    kv_heads = number.positive("num_key_value_heads", heads)
    max_positions = number.positive("max_position_embeddings")
    _check_window(config, max_positions, where)
    shape = ModelShape(
        architecture=architecture,
        num_layers=number.positive("num_hidden_layers"),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=number.positive("head_dim", hidden // heads),
        intermediate_size=number.positive("intermediate_size"),
        vocab_size=number.positive("vocab_size"),
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=_rope_from_config(config, max_positions, where),
        max_position_embeddings=max_positions,
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=QKV_BIAS[architecture],
        bos_token_id=config.get("bos_token_id"),
        eos_token_ids=token_ids(config.get("eos_token_id")),
    )
    check_heads(shape, where)
    return shape


def check_heads(shape: ModelShape, where: str) -> None:
    """Raises CheckpointError where query heads do not divide among KV heads, or a head cannot be rotated in halves."""
    if shape.num_heads % shape.num_kv_heads:
        raise CheckpointError(
            f"{where}: {shape.num_heads} attention heads do not divide among {shape.num_kv_heads} KV heads; "
            "the first must be a multiple of the second"
        )
    if shape.head_dim % 2:
        raise CheckpointError(f"{where}: head_dim {shape.head_dim} is odd; rotary embeddings need an even one")


def token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """A config's token id field, which may be one, several or none."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)


@dataclass(frozen=True)
class _Numbers:
    config: Mapping[str, Any]
    where: str

    def positive(self, key: str, default: int | None = None) -> int:
        value = self.config.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or value <= 0:
            raise CheckpointError(f"{self.where}: {key} is {value!r}; a positive integer is needed")
        return value


def _check_window(config: Mapping[str, Any], max_positions: int, where: str) -> None:
    window = config.get("sliding_window")
    uses_window = config.get("use_sliding_window", config.get("architectures") == ["MistralForCausalLM"])
    if uses_window and window is not None and window < max_positions:
        raise CheckpointError(
            f"{where}: sliding_window {window} is below max_position_embeddings {max_positions}; "
            "only full attention is supported"
        )


def _rope_from_config(config: Mapping[str, Any], max_positions: int, where: str) -> RopeShape:
    """Both spellings: rope_parameters (transformers 5), and rope_theta with rope_scaling."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = float(rope.get("rope_theta", config.get("rope_theta", 10000.0)))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return RopeShape(theta)
    if kind == "linear":
        return RopeShape(theta, "linear", factor=float(rope["factor"]))
    if kind == "llama3":
        return RopeShape(
            theta,
            "llama3",
            factor=float(rope["factor"]),
            low_freq_factor=float(rope["low_freq_factor"]),
            high_freq_factor=float(rope["high_freq_factor"]),
            original_max_positions=int(rope.get("original_max_position_embeddings", max_positions)),
        )
    raise CheckpointError(f"{where}: rope type {kind!r} is not supported; supported are default, linear, llama3")
