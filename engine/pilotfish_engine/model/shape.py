"""What a checkpoint says about its model: sizes, rope, special tokens; and the tensors that such a model has.

Plain values, whatever the file format they were read from. Knows nothing about files, weights or families' names.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from pilotfish_engine.errors import CheckpointError

Tensors = Iterator[tuple[str, tuple[int, ...]]]


@dataclass(frozen=True)
class RopeShape:
    """theta: base. rotated: how many of a head's dimensions turn, the first ones (None: all). divisors: of each
    frequency, where a file spells a scaling out. factor: of every scaling. low_freq_factor, high_freq_factor: llama3's.
    beta_fast, beta_slow, truncate, magnitude: yarn's; the last multiplies cosines and sines."""

    theta: float
    scaling: Literal["none", "linear", "llama3", "yarn"] = "none"
    rotated: int | None = None
    divisors: tuple[float, ...] = ()
    factor: float = 1.0
    original_max_positions: int = 8192
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    magnitude: float = 1.0


@dataclass(frozen=True)
class WindowShape:
    """Attention of the layers `layers` sees the last `size` positions, a token's own among them. rope: of these
    layers."""

    size: int
    layers: frozenset[int]
    rope: RopeShape


@dataclass(frozen=True)
class LatentShape:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434). q_rank: of the queries' latent (None: they have
    none); kv_rank: of the latent that keys and values share. interleaved: rotation pairs neighbours, not halves.
    temperature: multiplies the scores beside 1/sqrt(nope_dim + rope_dim)."""

    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    bias: bool = False
    interleaved: bool = True
    temperature: float = 1.0

    def tensors(self, prefix: str, hidden: int, heads: int) -> Tensors:
        qk_dim = self.nope_dim + self.rope_dim
        if self.q_rank is None:
            yield f"{prefix}q_proj.weight", (heads * qk_dim, hidden)
        else:
            yield f"{prefix}q_a_proj.weight", (self.q_rank, hidden)
            if self.bias:
                yield f"{prefix}q_a_proj.bias", (self.q_rank,)
            yield f"{prefix}q_a_layernorm.weight", (self.q_rank,)
            yield f"{prefix}q_b_proj.weight", (heads * qk_dim, self.q_rank)
        yield f"{prefix}kv_a_proj_with_mqa.weight", (self.kv_rank + self.rope_dim, hidden)
        if self.bias:
            yield f"{prefix}kv_a_proj_with_mqa.bias", (self.kv_rank + self.rope_dim,)
        yield f"{prefix}kv_a_layernorm.weight", (self.kv_rank,)
        yield f"{prefix}kv_b_proj.weight", (heads * (self.nope_dim + self.v_dim), self.kv_rank)
        yield f"{prefix}o_proj.weight", (hidden, heads * self.v_dim)
        if self.bias:
            yield f"{prefix}o_proj.bias", (hidden,)


@dataclass(frozen=True)
class RoutingShape:
    """How a token chooses `top_k` of `num_experts`. scoring: of the router's logits; correction: a bias is added for
    the choice alone. Of `num_groups` equal groups only the best `topk_groups` are open, a group being as good as its
    best expert (softmax) or its best two together (sigmoid). normalised: the chosen weights are divided by their sum,
    before they are multiplied by `scaling`."""

    num_experts: int
    top_k: int
    scoring: Literal["softmax", "sigmoid"]
    correction: bool = False
    num_groups: int = 1
    topk_groups: int = 1
    normalised: bool = True
    scaling: float = 1.0


@dataclass(frozen=True)
class MoEShape:
    """expert_size: intermediate size of one expert. shared: name and intermediate size of the experts that every token
    passes, as one MLP; shared_gate: its output is weighed by a sigmoid of the token. Layers below `first_layer`, those
    that `step` skips and `dense_layers` have a plain MLP."""

    routing: RoutingShape
    expert_size: int
    shared: tuple[str, int] | None = None
    shared_gate: bool = False
    first_layer: int = 0
    step: int = 1
    dense_layers: frozenset[int] = frozenset()

    def in_layer(self, index: int) -> bool:
        return index >= self.first_layer and (index + 1) % self.step == 0 and index not in self.dense_layers

    def tensors(self, prefix: str, hidden: int) -> Tensors:
        experts = self.routing.num_experts
        yield f"{prefix}gate.weight", (experts, hidden)
        if self.routing.correction:
            yield f"{prefix}gate.e_score_correction_bias", (experts,)
        for expert in range(experts):
            yield from mlp_tensors(f"{prefix}experts.{expert}.", hidden, self.expert_size)
        if self.shared is not None:
            name, size = self.shared
            yield from mlp_tensors(f"{prefix}{name}.", hidden, size)
            if self.shared_gate:
                yield f"{prefix}{name}_gate.weight", (1, hidden)


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """head_dim, num_kv_heads: of what the KV cache holds; with `latent` one head of a latent and a rotated key.

    qk_norm: a norm over each head's queries and keys. query_scale: of the scores (None: 1/sqrt(head_dim)). window: of
    layers that see only the last positions. output_gate: attention's output is weighed by a sigmoid of the token, from
    rows of q_proj."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeShape
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    query_scale: float | None = None
    window: WindowShape | None = None
    output_gate: bool = False
    latent: LatentShape | None = None

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def rope_width(self) -> int:
        """Of the rotary table: the dimensions of what is rotated as one piece."""
        return self.head_dim if self.latent is None else self.latent.rope_dim

    def window_of(self, layer: int) -> WindowShape | None:
        return self.window if self.window is not None and layer in self.window.layers else None

    def attention_tensors(self, prefix: str, hidden: int) -> Tensors:
        if self.latent is not None:
            yield from self.latent.tensors(prefix, hidden, self.num_heads)
            return
        q_rows = self.q_size * (2 if self.output_gate else 1)
        for name, rows in (("q_proj", q_rows), ("k_proj", self.kv_size), ("v_proj", self.kv_size)):
            yield f"{prefix}{name}.weight", (rows, hidden)
            if self.qkv_bias:
                yield f"{prefix}{name}.bias", (rows,)
        if self.qk_norm:
            yield f"{prefix}q_norm.weight", (self.head_dim,)
            yield f"{prefix}k_norm.weight", (self.head_dim,)
        yield f"{prefix}o_proj.weight", (hidden, self.q_size)
        if self.out_bias:
            yield f"{prefix}o_proj.bias", (hidden,)


@dataclass(frozen=True, kw_only=True)
class VocabularyShape:
    """embed_scale: multiplies embeddings as the model reads them."""

    vocab_size: int
    tie_word_embeddings: bool
    embed_scale: float = 1.0
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class NamesShape:
    """unread_prefixes: of tensors in the same checkpoint that the model itself does not read, like those of a draft.
    spellings: prefixes of names in the files, each with what stands here in its place."""

    unread_prefixes: tuple[str, ...] = ()
    spellings: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, kw_only=True)
class ModelShape(AttentionShape, VocabularyShape, NamesShape):
    """zero_centred_norms: stored weights are added to 1. output_norms: what attention and MLP give is normed too,
    before it is added."""

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    zero_centred_norms: bool = False
    output_norms: bool = False
    activation: Literal["silu", "gelu_tanh"] = "silu"
    moe: MoEShape | None = None

    @property
    def kv_elements_per_token(self) -> int:
        """K and V of one token in every layer; a latent is both."""
        return (2 if self.latent is None else 1) * self.num_layers * self.kv_size

    def tensor_shapes(self) -> Tensors:
        """Every weight by its Hugging Face name, each exactly once: what a checkpoint of this shape must hold."""
        yield "model.embed_tokens.weight", (self.vocab_size, self.hidden_size)
        for index in range(self.num_layers):
            yield from self.layer_tensors(f"model.layers.{index}.", index)
        yield "model.norm.weight", (self.hidden_size,)
        if not self.tie_word_embeddings:
            yield "lm_head.weight", (self.vocab_size, self.hidden_size)

    def layer_tensors(self, prefix: str, index: int) -> Tensors:
        """Of one decoder layer whose names begin with `prefix`; `index` decides between a plain MLP and experts."""
        yield f"{prefix}input_layernorm.weight", (self.hidden_size,)
        yield from self.attention_tensors(f"{prefix}self_attn.", self.hidden_size)
        yield f"{prefix}post_attention_layernorm.weight", (self.hidden_size,)
        if self.output_norms:
            yield f"{prefix}pre_feedforward_layernorm.weight", (self.hidden_size,)
            yield f"{prefix}post_feedforward_layernorm.weight", (self.hidden_size,)
        if self.moe is not None and self.moe.in_layer(index):
            yield from self.moe.tensors(f"{prefix}mlp.", self.hidden_size)
        else:
            yield from mlp_tensors(f"{prefix}mlp.", self.hidden_size, self.intermediate_size)


def mlp_tensors(prefix: str, hidden: int, inner: int) -> Tensors:
    yield f"{prefix}gate_proj.weight", (inner, hidden)
    yield f"{prefix}up_proj.weight", (inner, hidden)
    yield f"{prefix}down_proj.weight", (hidden, inner)


def check_heads(shape: ModelShape, where: str) -> None:
    """Raises CheckpointError where heads do not divide among KV heads, or cannot be rotated."""
    if shape.num_heads % shape.num_kv_heads:
        raise CheckpointError(
            f"{where}: {shape.num_heads} attention heads do not divide among {shape.num_kv_heads} KV heads; "
            "the first must be a multiple of the second"
        )
    rotated = shape.rope_width if shape.rope.rotated is None else shape.rope.rotated
    for name, dimensions in (("head_dim", shape.rope_width), ("the rotated part of a head", rotated)):
        if dimensions % 2 or dimensions == 0:
            raise CheckpointError(f"{where}: {name} is {dimensions}; rotary embeddings need an even number")
