"""Plain-torch twins of every kernel: the definition that the fast ones are tested against, and the fallback.

Works in the dtype of its inputs, accumulating in float32 at least (float64 in, float64 throughout). Reads nothing to
the host: sizes come from shapes, lengths stay in tensors. Knows nothing about models, layers or requests' lives.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from pilotfish_engine.kernels.inputs import AttentionInputs

TOKEN_BLOCK = 16  # tokens whose gathered K and V rows are held at a time,
DEVICE_BLOCK = 1 << 28  # and where launches cost more than memory as many as have so many numbers in them


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """x [N, in] · weight [out, in]ᵀ + bias [out] → [N, out] in `out_dtype`: that of x, or float32."""
    return functional.linear(x, weight, bias).to(out_dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [N, H] over its root mean square, times weight [H] → [N, H]."""
    wide = _wide(x)
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * _wide(weight)).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """residual [N, H] += x [N, H], in place, rounded to its dtype; returns (rms_norm(residual), residual)."""
    residual.copy_(_wide(residual) + _wide(x))
    return rms_norm(residual, weight, eps), residual


def rope_and_write(
    qkv: Tensor, positions: Tensor, cos_sin: Tensor, slots: Tensor, k_cache: Tensor, v_cache: Tensor
) -> Tensor:
    """Rotates Q and K (NeoX: halves paired), writes K and V of token n to row slots[n] of the caches, returns Q.

    qkv [N, (Hq + 2·Hkv)·D], positions and slots int64 [N], cos_sin [max_positions, D] (cosines, then sines, D/2 each),
    caches [num_slots, Hkv, D]; → [N, Hq, D]. Of equal slots (scratch, for padding) any one row wins.
    """
    num_kv_heads, head_dim = k_cache.shape[1:]
    heads = qkv.view(qkv.shape[0], -1, head_dim)
    num_heads = heads.shape[1] - 2 * num_kv_heads
    table = cos_sin[positions].unsqueeze(1)
    cos, sin = table.chunk(2, dim=-1)
    first, second = _wide(heads[:, : num_heads + num_kv_heads]).chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(qkv.dtype)
    k_cache.index_copy_(0, slots, rotated[:, num_heads:])
    v_cache.index_copy_(0, slots, heads[:, num_heads + num_kv_heads :])
    return rotated[:, :num_heads].contiguous()


def top_log_probs(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k highest of the softmax of each row of x [N, V], highest first: logarithms and places int64, [N, k] each."""
    best, places = x.topk(k, dim=1)
    return best - x.logsumexp(dim=1, keepdim=True), places


def rule_out(logits: Tensor, allowed: Tensor) -> Tensor:
    """logits [N, V] with minus infinity added to tokens whose bit of allowed, int32 [N, ⌈V / 32⌉], is not set. Bits
    count from the lowest; NaN stays NaN."""
    byte, bit = torch.arange(256, device=logits.device), torch.arange(8, device=logits.device)
    by_byte = torch.zeros(256, 8, dtype=logits.dtype, device=logits.device)
    by_byte.masked_fill_((byte.unsqueeze(1) >> bit) & 1 == 0, -torch.inf)
    added = functional.embedding(allowed.view(torch.uint8).to(torch.int32), by_byte)  # words are little-endian
    return added.flatten(1)[:, : logits.shape[1]].add_(logits)


def match_rows(logits: Tensor, wanted: Tensor, weights: Tensor) -> Tensor:
    """Cross-entropy of each row of logits [N, V] with the shares wanted [N, V], times its weight float32 [N] → float32
    [N]. The gradient of their sum is left in place of the logits. Shares need not add up to 1."""
    wide, shares = _wide(logits), _wide(wanted)
    log_total, mass = wide.logsumexp(dim=1, keepdim=True), shares.sum(dim=1, keepdim=True)
    losses = weights * (mass * log_total - (shares * wide).sum(dim=1, keepdim=True)).squeeze(1)
    logits.copy_(weights.unsqueeze(1) * (mass * (wide - log_total).exp() - shares))
    return losses


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """gate_up [N, 2F] → silu(first half) · second half, [N, F]."""
    gate, up = _wide(gate_up).chunk(2, dim=-1)
    return (functional.silu(gate) * up).to(gate_up.dtype)


def gelu_and_mul(gate_up: Tensor) -> Tensor:
    """gate_up [N, 2F] → gelu(first half) · second half, [N, F]; gelu by its approximation with tanh."""
    gate, up = _wide(gate_up).chunk(2, dim=-1)
    return (functional.gelu(gate, approximate="tanh") * up).to(gate_up.dtype)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_size: int,
    inputs: AttentionInputs,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """q [N, Hq, D] over the rows that `inputs` lets each token see of one layer's caches → [N, Hq, D].

    caches: [num_slots, Hkv, D]; page_size: a power of two. Grouped heads: query head h reads KV head h // (Hq / Hkv).
    window: of the rows that a token sees, only those of the last so many positions, its own among them.
    Tokens past q_indptr[B] (padding), and any that see no row, give zeros.
    """
    visible, rows = visible_rows(inputs, q.shape[0], page_size, window)
    group = q.shape[1] // k_cache.shape[1]
    out = torch.empty_like(q)
    tokens = max(TOKEN_BLOCK, 0 if q.is_cpu else DEVICE_BLOCK // (rows.shape[1] * k_cache[0].numel()))
    for start in range(0, q.shape[0], tokens):
        block = slice(start, start + tokens)
        seen, slots = visible[block], rows[block]
        k = _wide(k_cache[slots]).masked_fill(~seen[:, :, None, None], 0)  # [n, L, Hkv, D]
        v = _wide(v_cache[slots]).masked_fill(~seen[:, :, None, None], 0)
        grouped = _wide(q[block]).view(-1, k.shape[2], group, q.shape[2])  # [n, Hkv, G, D]
        scores = torch.einsum("nkgd,nlkd->nkgl", grouped, k) * scale
        scores = scores.masked_fill(~seen[:, None, None, :], -torch.inf)
        weights = torch.softmax(scores, dim=-1).masked_fill(~seen[:, None, None, :], 0)
        out[block] = torch.einsum("nkgl,nlkd->nkgd", weights, v).flatten(1, 2).to(q.dtype)
    return out


def visible_rows(
    inputs: AttentionInputs, num_tokens: int, page_size: int, window: int | None = None
) -> tuple[Tensor, Tensor]:
    """Per token: which of its request's KV rows it sees, bool [N, L], and their slots, int64 [N, L] (unseen: 0).

    Where there is a window, a tree's masks are whole paths: of each token, and of each row on its path, the position
    past the prefix is the number of bits below its own.
    """
    num_requests, device = inputs.page_table.shape[0], inputs.page_table.device
    token = torch.arange(num_tokens, device=device)
    row = torch.arange(inputs.page_table.shape[1] * page_size, device=device)
    request = torch.searchsorted(inputs.q_indptr[1:].contiguous(), token, right=True)
    is_real = request < num_requests
    request = request.clamp(max=num_requests - 1)
    prefix = inputs.prefix_lens.long()[request][:, None]  # [N, 1]
    own = row[None, :] - prefix  # [N, L], j of row prefix + j; negative in the prefix
    if inputs.tree_mask is None:
        depth = token - inputs.q_indptr.long()[request]
        sees_own, row_depth = own <= depth[:, None], own
    else:
        path = (inputs.tree_mask[:, None] >> torch.arange(64, device=device)) & 1  # [N, 64]
        node = own.clamp(0, 63)
        sees_own = (own < 64) & (path.gather(1, node) == 1)
        depth = path.sum(1) - 1
        row_depth = torch.where(own < 0, own, (path.cumsum(1) - 1).gather(1, node))
    visible = is_real[:, None] & ((own < 0) | sees_own)
    if window is not None:
        visible = visible & (row_depth > depth[:, None] - window)
    slots = inputs.page_table.long()[request][:, row // page_size] * page_size + row % page_size
    return visible, slots.masked_fill(~visible, 0)
