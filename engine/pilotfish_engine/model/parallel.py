"""A decoder shared by the ranks of a tensor-parallel group (Megatron-LM, arXiv 1909.08053).

Each rank holds the same fraction of every attention's heads, of the inner width of every MLP and expert, and of the
vocabulary's rows of embedding and LM head. Norms, routers and what leads to latents are whole on every rank. The parts
are joined by one sum behind attention, one behind the MLP and one behind the embedding, and by a gather of the logits.

Knows nothing about processes, or about what is decided from the logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import gcd
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from pilotfish_engine.distributed.collectives import Ranks
from pilotfish_engine.errors import UsageError
from pilotfish_engine.model.checkpoint import Checkpoint
from pilotfish_engine.model.decoder import Decoder, new_kv_cache
from pilotfish_engine.model.inputs import ForwardInputs, KVCache
from pilotfish_engine.model.layers import MLP, Attention, DecoderLayer, Embedding, RMSNorm
from pilotfish_engine.model.linear import Linear
from pilotfish_engine.model.shape import ModelShape
from pilotfish_engine.model.weights import Cut

VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")  # divided by rows; the last rank's may be fewer
ADDED_ONCE = "o_proj.bias"  # of what is summed over the ranks: rank 0 adds it


def divide(shape: ModelShape, size: int, where: Path) -> ModelShape:
    """What one of `size` ranks holds of the layers; vocabulary and hidden size stay whole. Raises UsageError where
    something cannot be divided; `where` names the model."""
    moe = shape.moe
    whole = {"attention heads": shape.num_heads}
    if shape.latent is None:
        whole["KV heads"] = shape.num_kv_heads
    if moe is None or not all(moe.in_layer(index) for index in range(shape.num_layers)):
        whole["dimensions inside an MLP"] = shape.intermediate_size
    if moe is not None:
        whole["dimensions inside an expert"] = moe.expert_size
        if moe.shared is not None:
            whole["dimensions inside the shared experts"] = moe.shared[1]
    uneven = [f"{number} {name}" for name, number in whole.items() if number % size]
    if uneven:
        most = gcd(*whole.values())
        works = [str(number) for number in range(1, min(most, 64) + 1) if most % number == 0]
        raise UsageError(
            f"--tensor-parallel-size is {size}, and {where} has {', '.join(uneven)}, which so many devices cannot "
            f"share evenly; {' or '.join(works)} would work"
        )
    if moe is not None:
        shared = None if moe.shared is None else (moe.shared[0], moe.shared[1] // size)
        moe = replace(moe, expert_size=moe.expert_size // size, shared=shared)
    return replace(
        shape,
        num_heads=shape.num_heads // size,
        num_kv_heads=shape.num_kv_heads if shape.latent is not None else shape.num_kv_heads // size,
        intermediate_size=shape.intermediate_size // size,
        moe=moe,
    )


class Part:
    """One rank's part of a checkpoint: tensors under their own names, cut as they are read. shape: of its layers."""

    def __init__(self, checkpoint: Checkpoint, ranks: Ranks) -> None:
        self.shape = divide(checkpoint.shape, ranks.size, checkpoint.path)
        self.tensor_shapes = dict(self.shape.tensor_shapes())
        for name in VOCABULARY:
            if name in self.tensor_shapes:
                rows, hidden = self.tensor_shapes[name]
                self.tensor_shapes[name] = (-(-rows // ranks.size), hidden)
        self._checkpoint = checkpoint
        self._rank = ranks.rank

    def read(self, name: str) -> Tensor:
        tensor, size = self._checkpoint.read(name), self.tensor_shapes[name]
        if name.endswith(ADDED_ONCE) and self._rank > 0:
            return torch.zeros_like(tensor)
        part = tensor[self._cut(tuple(tensor.shape), size)]
        if part.shape == size:
            return part
        assert name in VOCABULARY, "all else is divided evenly"
        return functional.pad(part, (0, 0, 0, size[0] - part.shape[0]))

    def stored_type(self, name: str) -> str:
        return self._checkpoint.stored_type(name)

    def read_stored(self, name: str) -> Mapping[str, Tensor]:
        return self._checkpoint.read_stored(name)

    def cut(self, name: str) -> Cut | None:
        return self._cut(self._checkpoint.tensor_shapes[name], self.tensor_shapes[name])

    def _cut(self, whole: tuple[int, ...], own: tuple[int, ...]) -> Cut:
        def cut(length: int, part: int) -> slice:
            if part >= length:
                return slice(None)
            return slice(min(self._rank * part, length), min((self._rank + 1) * part, length))

        return tuple(cut(length, part) for length, part in zip(whole, own, strict=True))


class SharedEmbedding(Embedding):
    """weight: [⌈V / size⌉, H], this rank's rows."""

    def __init__(self, weight: Tensor, ranks: Ranks) -> None:
        super().__init__(weight)
        self._ranks = ranks

    def __call__(self, token_ids: Tensor) -> Tensor:
        row = token_ids - self._ranks.rank * self.weight.shape[0]
        mine = (row >= 0) & (row < self.weight.shape[0])
        found = functional.embedding(torch.where(mine, row, 0), self.weight)
        return self._ranks.all_reduce(torch.where(mine.unsqueeze(1), found, 0))


class SharedHead:
    """head: of [⌈V / size⌉, H], this rank's rows of an LM head over vocab_size tokens; every rank gets all logits."""

    def __init__(self, head: Linear, vocab_size: int, ranks: Ranks) -> None:
        self._head = head
        self._vocab_size = vocab_size
        self._ranks = ranks

    def __call__(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        parts = self._ranks.all_gather(self._head(x, out_dtype))
        return parts.transpose(0, 1).flatten(1)[:, : self._vocab_size]

    def behind(self, first: int) -> Linear:
        """Of this rank's rows."""
        return self._head.behind(first)

    def dense(self) -> Tensor:
        """This rank's rows."""
        return self._head.dense()


class SharedAttention:
    """What the ranks' heads give together."""

    def __init__(self, part: Attention, ranks: Ranks) -> None:
        self.cos_sin = part.cos_sin
        self._part = part
        self._ranks = ranks

    def __call__(self, x: Tensor, inputs: ForwardInputs, kv: KVCache, layer: int) -> Tensor:
        return self._ranks.all_reduce(self._part(x, inputs, kv, layer))


class SharedMLP:
    """What the ranks' shares of the inner width give together; of experts too, as all ranks choose the same ones."""

    def __init__(self, part: MLP, ranks: Ranks) -> None:
        self._part = part
        self._ranks = ranks

    def __call__(self, x: Tensor) -> Tensor:
        return self._ranks.all_reduce(self._part(x))


class SharedDecoder(Decoder):
    """shape: the whole model's; part: what this rank holds of its layers, and keeps in its KV cache."""

    def __init__(
        self,
        shape: ModelShape,
        part: ModelShape,
        embed: Tensor,
        layers: list[DecoderLayer],
        norm: RMSNorm,
        lm_head: Linear,
        ranks: Ranks,
    ) -> None:
        shared = [
            DecoderLayer(
                layer.attention_norm,
                SharedAttention(layer.attention, ranks),
                layer.mlp_norm,
                SharedMLP(layer.mlp, ranks),
                layer.output_norms,
            )
            for layer in layers
        ]
        super().__init__(
            shape, SharedEmbedding(embed, ranks), shared, norm, SharedHead(lm_head, shape.vocab_size, ranks)
        )
        self._part = part

    def new_kv_cache(self, num_pages: int, page_size: int) -> KVCache:
        part = self._part
        return new_kv_cache(part, part.num_layers, num_pages, page_size, self.dtype, self.device)
