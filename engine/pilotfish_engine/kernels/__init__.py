"""The engine's kernels: `rms_norm`, `add_rms_norm`, `rope_and_write`, `silu_and_mul`, `paged_attention`, `linear`.

Each call goes to the backend of its tensors' device and dtype, and to the plain-torch twin in `reference` where there is
none. All accumulate in float32. Nothing here knows about models or requests.
"""

from pilotfish_engine.kernels.reference import (
    add_rms_norm,
    linear,
    paged_attention,
    rms_norm,
    rope_and_write,
    silu_and_mul,
)

__all__ = ["add_rms_norm", "linear", "paged_attention", "rms_norm", "rope_and_write", "silu_and_mul"]
