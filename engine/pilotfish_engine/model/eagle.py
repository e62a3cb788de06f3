"""The forward of EAGLE and EAGLE-3 heads over a paged cache, and their loading.

Row i of a head's cache holds the target's hidden state of position i beside token i + 1, at rope position i. Steps
after the first read what the head gave at the row before in place of the target's state. Knows nothing about drafting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from pilotfish_engine.model import assembly
from pilotfish_engine.model.decoder import Decoder, new_kv_cache
from pilotfish_engine.model.eagle_checkpoint import HeadCheckpoint
from pilotfish_engine.model.eagle_shape import HeadShape
from pilotfish_engine.model.inputs import ForwardInputs, KVCache
from pilotfish_engine.model.layers import MLP, Attention, DecoderLayer, Embedding, RMSNorm, reading
from pilotfish_engine.model.linear import Dense, Linear, Rows, read_linear
from pilotfish_engine.model.weights import Weights


class TargetStates(Protocol):
    """hidden: [N, H] after the target's final norm; aux: [N, H] for each of a head's aux_layers."""

    @property
    def hidden(self) -> Tensor: ...
    @property
    def aux(self) -> tuple[Tensor, ...]: ...


class FirstLayer(Protocol):
    def __call__(self, embeds: Tensor, hidden: Tensor, inputs: ForwardInputs, kv: KVCache) -> tuple[Tensor, Tensor]:
        """embeds, hidden: [N, H], neither written to → (x, residual), as a DecoderLayer gives them."""
        ...


class EagleLayer:
    """A decoder layer without a norm before attention, over fc(embedding, hidden state). fc: [H, 2H]."""

    def __init__(self, fc: Linear, attention: Attention, mlp_norm: RMSNorm, mlp: MLP) -> None:
        self.fc = fc
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp

    def __call__(self, embeds: Tensor, hidden: Tensor, inputs: ForwardInputs, kv: KVCache) -> tuple[Tensor, Tensor]:
        residual = self.fc(torch.cat((embeds, hidden), dim=-1))
        attended = self.attention(residual, inputs, kv, 0)
        normed, residual = self.mlp_norm.add(attended, inputs.kept(residual))
        return self.mlp(normed), residual


class Eagle3Layer:
    """A decoder layer whose attention reads 2H, embedding and hidden state side by side, each behind its own norm.
    layer: the rest of it, its attention_norm that of the embedding. norm_before_residual: the normed hidden state is
    what the layer adds to."""

    def __init__(self, layer: DecoderLayer, hidden_norm: RMSNorm, norm_before_residual: bool) -> None:
        self.layer = layer
        self.hidden_norm = hidden_norm
        self.norm_before_residual = norm_before_residual

    def __call__(self, embeds: Tensor, hidden: Tensor, inputs: ForwardInputs, kv: KVCache) -> tuple[Tensor, Tensor]:
        normed = self.hidden_norm(hidden)
        both = torch.cat((self.layer.attention_norm(embeds), normed), dim=-1)
        attended = self.layer.attention(both, inputs, kv, 0)
        residual = inputs.kept(normed) if self.norm_before_residual else inputs.kept(hidden).clone()
        normed, residual = self.layer.mlp_norm.add(attended, residual)
        return self.layer.mlp(normed), residual


class Fusion:
    """States of several of the target's layers side by side → one hidden state. norms: one over all of them, one over
    each, or none; fc: [H, n·H of the target], where there is one."""

    def __init__(self, norms: Sequence[RMSNorm], fc: Linear | None) -> None:
        self.norms = norms
        self.fc = fc

    def __call__(self, features: Tensor) -> Tensor:
        if self.norms:
            parts = features.chunk(len(self.norms), dim=-1)
            normed = [norm(part.contiguous()) for norm, part in zip(self.norms, parts, strict=True)]
            features = torch.cat(normed, dim=-1)
        return features if self.fc is None else self.fc(features)


@dataclass(frozen=True, eq=False)
class Head:
    """lm_head: a Linear of [vocab_size, H]; d2t: int64 [vocab_size], the target's token for each of the
    draft's (None: the same). layers: those behind the first. norm: in front of lm_head (None: no norm).

    aux_layers: the target's layers whose inputs are read (its number of layers: what leaves the last one); none of
    them for heads that read the target's final hidden states. feature_size: width of what is read, per token.
    """

    shape: HeadShape
    aux_layers: tuple[int, ...]
    embed: Embedding
    fusion: Fusion | None
    first: FirstLayer
    layers: Sequence[DecoderLayer]
    norm: RMSNorm | None
    lm_head: Linear
    d2t: Tensor | None

    @property
    def vocab_size(self) -> int:
        return self.shape.draft_vocab_size

    @property
    def feature_size(self) -> int:
        return self.shape.feature_size

    def new_kv_cache(self, num_pages: int, page_size: int) -> KVCache:
        block = self.shape.block
        return new_kv_cache(block, block.num_layers, num_pages, page_size, self.embed.dtype, self.embed.device)

    def features(self, target: TargetStates) -> Tensor:
        """[N, feature_size]: what of the target's pass is needed for each token."""
        return torch.cat(target.aux, dim=-1) if self.aux_layers else target.hidden

    @torch.inference_mode()
    def combine(self, features: Tensor) -> Tensor:
        """[N, feature_size] → [N, H], what `forward` reads in a first step."""
        return features if self.fusion is None else self.fusion(features)

    @torch.inference_mode()
    def forward(self, hidden: Tensor, inputs: ForwardInputs, kv: KVCache) -> tuple[Tensor, Tensor]:
        """Runs the head over hidden states and the tokens behind them. hidden [N, H] of position i beside
        inputs.token_ids of i + 1, at inputs.positions i → ([N, H] for `logits`, [N, H] that the next step reads), of
        the tokens that inputs.kept says."""
        embeds = self.embed(inputs.token_ids)
        through = inputs if not self.layers else replace(inputs, only=None)  # all but the last layer need every token
        x, residual = self.first(embeds, hidden, through, kv)
        for index, layer in enumerate(self.layers, start=1):
            x, residual = layer(x, residual, inputs if layer is self.layers[-1] else through, kv, index)
        if self.norm is None:
            out = x + residual
            return out, out
        out, residual = self.norm.add(x, residual)
        return out, out if self.shape.norm_output else residual

    @torch.inference_mode()
    def logits(self, out: Tensor) -> Tensor:
        """out [M, H] of `forward` → float32 [M, vocab_size]."""
        return self.lm_head(out, torch.float32)

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """The target's token ids for the draft's, int64 of any shape."""
        return draft_ids if self.d2t is None else self.d2t[draft_ids]


def load_head(path: Path, target: Decoder, dtype: torch.dtype, max_positions: int) -> Head:
    """Reads a head's weights as `dtype` to where the target is; rotary tables reach `max_positions`. What the
    checkpoint leaves out is the target's own. Raises CheckpointError, before any weight is read, where the files are
    not exactly the head that they claim to be."""
    checkpoint = HeadCheckpoint(path)
    shape = checkpoint.check()
    block = shape.block
    weights = Weights(checkpoint, dict(shape.tensor_shapes()), dtype, target.device)
    cos_sin = assembly.rotary_table(block, max_positions, target.device)
    embed = target.embed
    if shape.own_embed:
        embed = reading(Embedding(weights.read("embed_tokens.weight")), target.num_tokens)
    fusion = None if shape.method == "EAGLE" else _fusion(weights, shape)
    first = _first_layer(weights, shape, cos_sin)
    layers = [assembly.build_layer(weights, block, f"layers.{i}.", i, cos_sin) for i in range(1, block.num_layers)]
    norm = None if shape.method == "EAGLE" else assembly.build_norm(weights, block, "norm.weight")
    lm_head = target.lm_head
    if shape.lm_head != "target":
        lm_head = read_linear(weights, Rows("lm_head")) if shape.lm_head == "own" else Dense(embed.weight)
    d2t = checkpoint.target_ids()
    return Head(
        shape=shape,
        aux_layers=shape.aux_layers(target.shape.num_layers, checkpoint.where),
        embed=embed,
        fusion=fusion,
        first=first,
        layers=layers,
        norm=norm,
        lm_head=lm_head,
        d2t=None if d2t is None else d2t.to(target.device),
    )


def _fusion(weights: Weights, shape: HeadShape) -> Fusion:
    norms = []
    if shape.norm_before_fc:
        norms = [assembly.build_norm(weights, shape.block, "input_norm.weight")]
    elif shape.fc_norm:
        norms = [assembly.build_norm(weights, shape.block, f"fc_norm.{index}.weight") for index in range(shape.num_aux)]
    return Fusion(norms, _fc(weights, shape) if shape.fc else None)


def _fc(weights: Weights, shape: HeadShape) -> Linear:
    return read_linear(weights, Rows("fc"), bias=shape.fc_bias)


def _first_layer(weights: Weights, shape: HeadShape, cos_sin: Tensor) -> FirstLayer:
    block = shape.block
    if shape.method == "EAGLE3":
        hidden_norm = assembly.build_norm(weights, block, "layers.0.hidden_norm.weight")
        layer = assembly.build_layer(weights, block, "layers.0.", 0, cos_sin)
        return Eagle3Layer(layer, hidden_norm, shape.norm_before_residual)
    return EagleLayer(
        fc=_fc(weights, shape),
        attention=assembly.build_attention(weights, block, "layers.0.self_attn.", cos_sin),
        mlp_norm=assembly.build_norm(weights, block, "layers.0.post_attention_layernorm.weight"),
        mlp=assembly.build_mlp(weights, block, "layers.0.mlp.", 0),
    )
