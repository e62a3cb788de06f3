"""The target over whole sequences at once: what a head reads of it, and what it should say.

The decoder's own code and weights; only attention is another: dense and causal over rows of equal length, without
pages. Knows nothing about heads or losses.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import torch
from torch import Tensor
from torch.nn import functional

from pilotfish_engine.errors import MethodError
from pilotfish_engine.kernels.inputs import AttentionInputs
from pilotfish_engine.model.attention import GroupedQueryAttention
from pilotfish_engine.model.decoder import Decoder
from pilotfish_engine.model.inputs import ForwardInputs, KVCache
from pilotfish_engine.model.layers import DecoderLayer
from pilotfish_engine.model.shape import ModelShape

LOGIT_ROWS = 4096  # whose logits over the whole vocabulary are held at a time


class _DenseAttention(GroupedQueryAttention):
    """Over B rows of T tokens, whose keys and values lie in the cache in the order of the pass."""

    def __init__(self, paged: GroupedQueryAttention) -> None:
        vars(self).update(vars(paged))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, page_size: int, inputs: AttentionInputs) -> Tensor:
        batch = inputs.q_indptr.shape[0] - 1
        length = q.shape[0] // batch

        def rows(x: Tensor) -> Tensor:
            return x.view(batch, length, *x.shape[1:]).transpose(1, 2)

        mask = None
        if self.window is not None and self.window < length:
            mask = torch.ones(length, length, dtype=torch.bool, device=q.device).tril().triu(1 - self.window)
        attended = functional.scaled_dot_product_attention(
            rows(q), rows(k), rows(v), attn_mask=mask, is_causal=mask is None, scale=self.scale, enable_gqa=True
        )
        return attended.transpose(1, 2).flatten(0, 1)


class Teacher:
    """aux_layers: whose inputs are read. token_ids: int64 [V], those of the target's tokens that a draft can say.
    Raises MethodError where the target's attention has no dense form here."""

    def __init__(self, target: Decoder, aux_layers: Sequence[int], token_ids: Tensor) -> None:
        self.aux_layers = tuple(aux_layers)
        self.token_ids = token_ids
        self._decoder = Decoder(
            target.shape, target.embed, [_dense(layer) for layer in target.layers], target.norm, target.lm_head
        )

    @property
    def shape(self) -> ModelShape:
        return self._decoder.shape

    @property
    def dtype(self) -> torch.dtype:
        return self._decoder.dtype

    @property
    def width(self) -> int:
        """Numbers that `read` returns of a token."""
        return self.shape.hidden_size * (1 + len(self.aux_layers))

    @torch.inference_mode()
    def _pass(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        batch, length = tokens.shape
        shape, device = self._decoder.shape, tokens.device
        places = torch.arange(batch * length, device=device)
        inputs = ForwardInputs(
            token_ids=tokens.flatten(),
            positions=places % length,
            slots=places,
            attention=AttentionInputs(
                page_table=torch.zeros(batch, 1, dtype=torch.int32, device=device),
                prefix_lens=torch.zeros(batch, dtype=torch.int32, device=device),
                q_indptr=torch.arange(0, batch * length + 1, length, dtype=torch.int32, device=device),
                tree_mask=None,
            ),
        )
        size = (1, batch * length, shape.num_kv_heads, shape.head_dim)
        k = torch.empty(size, dtype=self._decoder.dtype, device=device)
        v = torch.empty_like(k)
        # every layer writes the same rows anew: what the layer before left there is read by nobody
        kv = KVCache(k.expand(shape.num_layers, -1, -1, -1), v.expand(shape.num_layers, -1, -1, -1), page_size=1)
        hidden, aux = self._decoder.forward(inputs, kv, self.aux_layers)
        return hidden, torch.cat(aux, dim=-1)

    def read(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """tokens int64 [B, T], padded at the end → final hidden states [B·T, H] and what a head reads, [B, T, A·H]."""
        hidden, features = self._pass(tokens)
        return hidden.clone(), features.clone().view(*tokens.shape, -1)  # autograd keeps no inference tensors

    def probabilities(self, hidden: Tensor) -> Tensor:
        """hidden [M, H] → [M, V] in the target's dtype: of the tokens that a draft can say, as shares of the whole
        vocabulary: what the others have is missing, and so counts for nothing."""
        out = torch.empty(len(hidden), len(self.token_ids), dtype=self._decoder.dtype, device=hidden.device)
        for start in range(0, len(hidden), LOGIT_ROWS):
            rows = slice(start, start + LOGIT_ROWS)
            logits = self._decoder.logits(hidden[rows])
            out[rows] = torch.exp(logits[:, self.token_ids] - logits.logsumexp(dim=1, keepdim=True))
        return out


def _dense(layer: DecoderLayer) -> DecoderLayer:
    if not isinstance(layer.attention, GroupedQueryAttention):
        raise MethodError("the target has latent attention; for now a head needs one with grouped-query attention")
    dense = copy(layer)
    dense.attention = _DenseAttention(layer.attention)
    return dense
