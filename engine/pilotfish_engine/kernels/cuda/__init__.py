"""The Triton kernels, for CUDA tensors of `DTYPES`. Same contracts as their twins in `reference`.

Every call is one launch (attention whose KV is split: two), sizes its grid from shapes alone and reads lengths on the
device, so a CUDA graph can hold it. Matrix products are the library's.
"""

from __future__ import annotations

import torch

from pilotfish_engine.kernels.cuda.attention import paged_attention
from pilotfish_engine.kernels.cuda.elementwise import (
    add_rms_norm,
    gelu_and_mul,
    rms_norm,
    rope_and_write,
    silu_and_mul,
)
from pilotfish_engine.kernels.cuda.matching import match_rows
from pilotfish_engine.kernels.cuda.top import top_log_probs
from pilotfish_engine.kernels.reference import linear

__all__ = [
    "DTYPES",
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

DTYPES = frozenset({torch.bfloat16, torch.float16, torch.float32})
