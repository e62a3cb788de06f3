"""The C++ kernels, called on the tensors' memory. Same contracts as their twins in `reference`.

`DTYPES` is what they compute in; empty where they were not built, so that every call goes to the twins. Arguments are
those that `checks` lets through.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Callable
from ctypes import c_float, c_int64, c_void_p

import torch
from torch import Tensor

from pilotfish_engine.kernels.backend import Backend, Implementation
from pilotfish_engine.kernels.inputs import AttentionInputs

BUILDS = {"DEFAULT": "_cpu", "NO AVX": "_cpu", "AVX2": "_cpu_v3", "AVX512": "_cpu_v4"}
NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
WIDE = torch.backends.cpu.get_cpu_capability() == "AVX512"
MAX_TOKENS = {torch.float32: 64 if WIDE else 256, torch.bfloat16: 256}  # beyond, the library's product is faster
OUTPUTS = 4  # a matrix must have a multiple of it of rows, and of LANES of columns
LANES = 16  # the attention kernel takes head dimensions that are multiples of it,
MAX_DIM = 512
MAX_GROUP = 32  # and at most so many query heads for a KV head

SIGNATURES = {
    "rms_norm": [c_void_p] * 4 + [c_int64] * 2 + [c_float],
    "rope_and_write": [c_void_p] * 7 + [c_int64] * 4,
    "silu_and_mul": [c_void_p] * 2 + [c_int64] * 2,
    "linear": [c_void_p] * 4 + [c_int64] * 3,
    "paged_attention": [c_void_p] * 8 + [c_int64] * 7 + [c_float],
    "window_attention": [c_void_p] * 8 + [c_int64] * 8 + [c_float],
}


def _load() -> ctypes.CDLL | None:
    """The build for this CPU. Torch is imported above: its OpenMP library is the one that the kernels run on."""
    name = BUILDS.get(torch.backends.cpu.get_cpu_capability(), "_cpu")
    spec = importlib.util.find_spec(f"pilotfish_engine.kernels.{name}")
    return None if spec is None or spec.origin is None else ctypes.CDLL(spec.origin)


_library = _load()
DTYPES = frozenset(NAMES) if _library is not None else frozenset()


def _bind(kernel: str, suffix: str = "") -> dict[torch.dtype, Callable[..., None]]:
    functions = {}
    for dtype in DTYPES:
        function = getattr(_library, f"{kernel}_{NAMES[dtype]}{suffix}")
        function.argtypes, function.restype = SIGNATURES[kernel], None
        functions[dtype] = function
    return functions


_rms_norm, _rope_and_write = _bind("rms_norm"), _bind("rope_and_write")
_linear, _linear_to_float32 = _bind("linear"), _bind("linear", "_to_float32")
_silu_and_mul = _bind("silu_and_mul")
_paged_attention, _window_attention = _bind("paged_attention"), _bind("window_attention")


def _takes_linear(x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> bool:
    tokens, inputs = x.shape
    return tokens <= MAX_TOKENS[x.dtype] and inputs % LANES == 0 and weight.shape[0] % OUTPUTS == 0


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    tokens, inputs = x.shape
    outputs = weight.shape[0]
    out = x.new_empty((tokens, outputs), dtype=out_dtype)
    function = (_linear if out_dtype is x.dtype else _linear_to_float32)[x.dtype]
    function(
        x.data_ptr(), weight.data_ptr(), None if bias is None else bias.data_ptr(), out.data_ptr(),
        tokens, inputs, outputs,
    )  # fmt: skip
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    rows, width = x.shape
    out = torch.empty_like(x)
    _rms_norm[x.dtype](x.data_ptr(), None, weight.data_ptr(), out.data_ptr(), rows, width, eps)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    rows, width = x.shape
    out = torch.empty_like(x)
    _rms_norm[x.dtype](x.data_ptr(), residual.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, width, eps)
    return out, residual


def rope_and_write(
    qkv: Tensor, positions: Tensor, cos_sin: Tensor, slots: Tensor, k_cache: Tensor, v_cache: Tensor
) -> Tensor:
    tokens, width = qkv.shape
    _, kv_heads, dim = k_cache.shape
    heads = width // dim - 2 * kv_heads
    q = qkv.new_empty((tokens, heads, dim))
    _rope_and_write[qkv.dtype](
        qkv.data_ptr(), positions.data_ptr(), cos_sin.data_ptr(), slots.data_ptr(), q.data_ptr(),
        k_cache.data_ptr(), v_cache.data_ptr(), tokens, heads, kv_heads, dim,
    )  # fmt: skip
    return q


def silu_and_mul(gate_up: Tensor) -> Tensor:
    rows, width = gate_up.shape
    out = gate_up.new_empty((rows, width // 2))
    _silu_and_mul[gate_up.dtype](gate_up.data_ptr(), out.data_ptr(), rows, width // 2)
    return out


def _takes_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_size: int,
    inputs: AttentionInputs,
    scale: float,
    window: int | None,
) -> bool:
    _, heads, dim = q.shape
    return dim % LANES == 0 and dim <= MAX_DIM and heads <= MAX_GROUP * k_cache.shape[1]


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_size: int,
    inputs: AttentionInputs,
    scale: float,
    window: int | None,
) -> Tensor:
    tokens, heads, dim = q.shape
    kv_heads = k_cache.shape[1]
    requests, max_pages = inputs.page_table.shape
    mask = inputs.tree_mask
    out = torch.empty_like(q)
    function = (_paged_attention if window is None else _window_attention)[q.dtype]
    function(
        q.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), out.data_ptr(), inputs.page_table.data_ptr(),
        inputs.prefix_lens.data_ptr(), inputs.q_indptr.data_ptr(), None if mask is None else mask.data_ptr(),
        tokens, requests, max_pages, page_size, heads, kv_heads, dim, *([] if window is None else [window]), scale,
    )  # fmt: skip
    return out


BACKEND = Backend(
    dtypes=DTYPES,
    linear=(Implementation(linear, _takes_linear),),
    rms_norm=(Implementation(rms_norm),),
    add_rms_norm=(Implementation(add_rms_norm),),
    rope_and_write=(Implementation(rope_and_write),),
    silu_and_mul=(Implementation(silu_and_mul),),
    paged_attention=(Implementation(paged_attention, _takes_attention),),
)
