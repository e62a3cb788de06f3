"""Checks the arguments of each operation, once for all its implementations: types, gaps, sizes and places."""

from __future__ import annotations

import torch
from torch import Tensor

from pilotfish_engine.kernels.inputs import AttentionInputs


def dense(dtype: torch.dtype, *tensors: Tensor) -> None:
    """Raises TypeError where one is of another type, on another device, or has gaps."""
    on_cpu = tensors[0].is_cpu
    for tensor in tensors:
        if tensor.dtype is not dtype or tensor.is_cpu is not on_cpu or not tensor.is_contiguous():
            raise TypeError(
                f"kernel takes contiguous tensors of {dtype} on one device, got {tensor.dtype} {list(tensor.shape)} "
                f"with strides {tensor.stride()} on {tensor.device}"
            )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> None:
    dense(x.dtype, x, weight)
    assert weight.shape[1:] == x.shape[1:]
    if bias is not None:
        dense(x.dtype, x, bias)
        assert bias.shape == weight.shape[:1]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> None:
    dense(x.dtype, x, weight)
    assert weight.shape == x.shape[1:]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    dense(x.dtype, x, residual, weight)
    assert weight.shape == x.shape[1:]
    assert residual.shape == x.shape


def rope_and_write(
    qkv: Tensor, positions: Tensor, cos_sin: Tensor, slots: Tensor, k_cache: Tensor, v_cache: Tensor
) -> None:
    dense(qkv.dtype, qkv, k_cache, v_cache)
    dense(torch.int64, positions, slots)
    dense(torch.float32, cos_sin)
    tokens, width = qkv.shape
    _, kv_heads, dim = k_cache.shape
    assert width % dim == 0
    assert width // dim >= 2 * kv_heads
    assert v_cache.shape == k_cache.shape
    assert cos_sin.shape[1] == dim
    assert positions.shape == slots.shape == (tokens,)


def gate(gate_up: Tensor) -> None:
    dense(gate_up.dtype, gate_up)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_size: int,
    inputs: AttentionInputs,
    scale: float,
    window: int | None,
) -> None:
    tokens, heads, dim = q.shape
    requests, _ = inputs.page_table.shape
    dense(q.dtype, q, k_cache, v_cache)
    dense(torch.int32, inputs.page_table, inputs.prefix_lens, inputs.q_indptr)
    assert k_cache.shape == v_cache.shape
    assert heads % k_cache.shape[1] == 0
    assert k_cache.shape[2] == dim
    assert page_size & (page_size - 1) == 0, "a page holds a power of two of slots"
    assert inputs.prefix_lens.shape == (requests,)
    assert inputs.q_indptr.shape == (requests + 1,)
    if inputs.tree_mask is not None:
        dense(torch.int64, inputs.tree_mask)
        assert inputs.tree_mask.shape == (tokens,)


def top_log_probs(x: Tensor, k: int) -> None:
    dense(torch.float32, x)
    assert 0 < k <= x.shape[1]


def rule_out(logits: Tensor, allowed: Tensor) -> None:
    dense(logits.dtype, logits)
    dense(torch.int32, allowed)
    assert allowed.shape == (logits.shape[0], -(-logits.shape[1] // 32))


def match_rows(logits: Tensor, wanted: Tensor, weights: Tensor) -> None:
    dense(logits.dtype, logits, wanted)
    dense(torch.float32, weights)
    assert wanted.shape == logits.shape
    assert weights.shape == logits.shape[:1]
