"""The engine's kernels: `rms_norm`, `add_rms_norm`, `rope_and_write`, `silu_and_mul`, `gelu_and_mul`,
`paged_attention`, `linear`, `match_rows`, `top_log_probs`, `rule_out`.

Each call goes to an implementation of its first tensor's device and dtype (`backend`): C++ on a CPU in float32 and
bfloat16, Triton on a CUDA device in those and float16, else the plain-torch twin in `reference`, where the contracts
stand. All accumulate in float32. Nothing here knows about models or requests.
"""

from __future__ import annotations

import importlib.util
from functools import cache

import torch
from torch import Tensor

from pilotfish_engine.kernels import checks, cpu, reference
from pilotfish_engine.kernels.backend import Backend, Backends, Operation
from pilotfish_engine.kernels.inputs import AttentionInputs

__all__ = [
    "add_rms_norm",
    "gelu_and_mul",
    "linear",
    "match_rows",
    "paged_attention",
    "rms_norm",
    "rope_and_write",
    "rule_out",
    "silu_and_mul",
    "top_log_probs",
]


@cache
def _cuda() -> Backend | None:
    """Imported with the first CUDA tensor, for it brings a compiler along; None where there is no Triton."""
    if importlib.util.find_spec("triton") is None:
        return None
    from pilotfish_engine.kernels import cuda

    return cuda.BACKEND


BACKENDS: Backends = {"cpu": lambda: cpu.BACKEND, "cuda": _cuda}
LINEAR = Operation(reference.linear, checks.linear, lambda backend: backend.linear, BACKENDS)
RMS_NORM = Operation(reference.rms_norm, checks.rms_norm, lambda backend: backend.rms_norm, BACKENDS)
ADD_RMS_NORM = Operation(reference.add_rms_norm, checks.add_rms_norm, lambda backend: backend.add_rms_norm, BACKENDS)
ROPE_AND_WRITE = Operation(
    reference.rope_and_write, checks.rope_and_write, lambda backend: backend.rope_and_write, BACKENDS
)
SILU_AND_MUL = Operation(reference.silu_and_mul, checks.gate, lambda backend: backend.silu_and_mul, BACKENDS)
GELU_AND_MUL = Operation(reference.gelu_and_mul, checks.gate, lambda backend: backend.gelu_and_mul, BACKENDS)
ATTENTION = Operation(
    reference.paged_attention, checks.paged_attention, lambda backend: backend.paged_attention, BACKENDS
)
TOP_LOG_PROBS = Operation(
    reference.top_log_probs, checks.top_log_probs, lambda backend: backend.top_log_probs, BACKENDS
)
RULE_OUT = Operation(reference.rule_out, checks.rule_out, lambda backend: backend.rule_out, BACKENDS)
MATCH_ROWS = Operation(reference.match_rows, checks.match_rows, lambda backend: backend.match_rows, BACKENDS)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
    return LINEAR(x, weight, bias, out_dtype or x.dtype)


def top_log_probs(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    return TOP_LOG_PROBS(x, k)


def rule_out(logits: Tensor, allowed: Tensor) -> Tensor:
    return RULE_OUT(logits, allowed)


def match_rows(logits: Tensor, wanted: Tensor, weights: Tensor) -> Tensor:
    return MATCH_ROWS(logits, wanted, weights)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return RMS_NORM(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return ADD_RMS_NORM(x, residual, weight, eps)


def rope_and_write(
    qkv: Tensor, positions: Tensor, cos_sin: Tensor, slots: Tensor, k_cache: Tensor, v_cache: Tensor
) -> Tensor:
    return ROPE_AND_WRITE(qkv, positions, cos_sin, slots, k_cache, v_cache)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    return SILU_AND_MUL(gate_up)


def gelu_and_mul(gate_up: Tensor) -> Tensor:
    return GELU_AND_MUL(gate_up)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_size: int,
    inputs: AttentionInputs,
    scale: float,
    window: int | None = None,
) -> Tensor:
    return ATTENTION(q, k_cache, v_cache, page_size, inputs, scale, window)
