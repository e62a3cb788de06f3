"""The Triton kernels, for CUDA tensors. Same contracts as their twins in `reference`.

Every call is one launch (attention whose KV is split: two), sizes its grid from shapes alone and reads lengths on the
device, so a CUDA graph can hold it. Matrix products of more than a few rows are the library's.
"""

from __future__ import annotations

import torch

from pilotfish_engine.kernels.backend import Backend, Implementation
from pilotfish_engine.kernels.cuda import attention, elementwise, linear, matching, ruling, top

BACKEND = Backend(
    dtypes=frozenset({torch.bfloat16, torch.float16, torch.float32}),
    linear=(Implementation(linear.linear, linear.takes),),
    rms_norm=(Implementation(elementwise.rms_norm),),
    add_rms_norm=(Implementation(elementwise.add_rms_norm),),
    rope_and_write=(Implementation(elementwise.rope_and_write),),
    silu_and_mul=(Implementation(elementwise.silu_and_mul),),
    gelu_and_mul=(Implementation(elementwise.gelu_and_mul),),
    paged_attention=(Implementation(attention.paged_attention, attention.takes),),
    top_log_probs=(Implementation(top.top_log_probs, top.takes),),
    rule_out=(Implementation(ruling.rule_out),),
    match_rows=(Implementation(matching.match_rows),),
)
