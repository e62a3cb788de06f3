"""The engine's kernels: `rms_norm`, `add_rms_norm`, `rope_and_write`, `silu_and_mul`, `gelu_and_mul`,
`paged_attention`, `linear`, `match_rows`, `top_log_probs`.

Each call goes to the backend of its first tensor's device and dtype: C++ on a CPU in float32 and bfloat16, Triton on a
CUDA device in those and float16, else the plain-torch twin in `reference`, where the contracts stand. A backend hands
shapes that it does not take to the twin. All accumulate in float32. Nothing here knows about models or requests.
"""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from pilotfish_engine.kernels import cpu, reference
from pilotfish_engine.kernels.inputs import AttentionInputs

__all__ = [
    "add_rms_norm",
    "gelu_and_mul",
    "linear",
    "match_rows",
    "paged_attention",
    "rms_norm",
    "rope_and_write",
    "silu_and_mul",
    "top_log_probs",
]


@cache
def _cuda() -> ModuleType | None:
    """Imported with the first CUDA tensor, for it brings a compiler along; None where there is no Triton."""
    return None if importlib.util.find_spec("triton") is None else importlib.import_module(f"{__name__}.cuda")


def _backend(x: Tensor) -> ModuleType:
    own = cpu if x.is_cpu else _cuda() if x.is_cuda else None
    return reference if own is None or x.dtype not in own.DTYPES else own


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
    return _backend(x).linear(x, weight, bias, out_dtype or x.dtype)  # type: ignore[no-any-return]


def top_log_probs(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    return _backend(x).top_log_probs(x, k)  # type: ignore[no-any-return]


def match_rows(logits: Tensor, wanted: Tensor, weights: Tensor) -> Tensor:
    return _backend(logits).match_rows(logits, wanted, weights)  # type: ignore[no-any-return]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _backend(x).rms_norm(x, weight, eps)  # type: ignore[no-any-return]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return _backend(x).add_rms_norm(x, residual, weight, eps)  # type: ignore[no-any-return]


def rope_and_write(
    qkv: Tensor, positions: Tensor, cos_sin: Tensor, slots: Tensor, k_cache: Tensor, v_cache: Tensor
) -> Tensor:
    return _backend(qkv).rope_and_write(qkv, positions, cos_sin, slots, k_cache, v_cache)  # type: ignore[no-any-return]


def silu_and_mul(gate_up: Tensor) -> Tensor:
    return _backend(gate_up).silu_and_mul(gate_up)  # type: ignore[no-any-return]


def gelu_and_mul(gate_up: Tensor) -> Tensor:
    return _backend(gate_up).gelu_and_mul(gate_up)  # type: ignore[no-any-return]


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_size: int,
    inputs: AttentionInputs,
    scale: float,
    window: int | None = None,
) -> Tensor:
    backend = _backend(q)
    return backend.paged_attention(q, k_cache, v_cache, page_size, inputs, scale, window)  # type: ignore[no-any-return]
