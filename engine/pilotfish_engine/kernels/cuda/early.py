"""Lets a kernel begin while the one before it still runs (programmatic dependent launch, from Hopper on).

Between two kernels of a recorded step a device stands still for some microseconds. A kernel that is launched early is
there when the one before it ends; until then it may read only what no kernel writes, such as weights.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

CAPABILITY = 9  # the first that can


@cache
def is_possible() -> bool:
    """Whether this process's device can; False too where kernels are interpreted."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= CAPABILITY


@triton.jit
def await_others(EARLY: tl.constexpr):
    """Waits for the kernel before, then lets the next one begin: two at once, or the one after the next would be in the
    way. Before this nothing is read that a kernel writes."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
