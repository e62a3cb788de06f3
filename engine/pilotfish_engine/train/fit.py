"""What is refused before the first step: targets that the method does not fit, and too little memory."""

from __future__ import annotations

from pathlib import Path

import torch

from pilotfish_engine.errors import MethodError, UsageError
from pilotfish_engine.model.shape import ModelShape
from pilotfish_engine.train.head import HeadSizes
from pilotfish_engine.train.settings import TrainSettings
from pilotfish_engine.train.teacher import LOGIT_ROWS

LEAST_LAYERS = 7  # so that the three that are read differ


def aux_layers(target: ModelShape) -> tuple[int, int, int]:
    """The layers of which an EAGLE-3 head reads the input, where its config names none. Raises MethodError."""
    layers = target.num_layers
    if layers < LEAST_LAYERS:
        raise MethodError(
            f"the target has {layers} layers, and an EAGLE-3 head reads three different ones; "
            f"at least {LEAST_LAYERS} would work"
        )
    if target.latent is not None:
        raise MethodError("the target has latent attention, beside which no head is trained here; another would work")
    return 2, layers // 2, layers - 3


def check_memory(
    settings: TrainSettings, target: ModelShape, head: HeadSizes, dtype: torch.dtype, device: torch.device
) -> None:
    """Raises UsageError where the estimate is above what is free. Ranks on a CPU share its memory; of GPUs each rank
    asks its own."""
    ranks = settings.ranks
    free = free_bytes(device) / (ranks if device.type == "cpu" else 1)
    fixed, each = _estimate(settings, target, head, dtype)
    uneven = (ranks - 1) * settings.max_length  # a rank may have one more sequence than its share
    needed = fixed + each * min(settings.batch_tokens, (settings.batch_tokens + uneven) / ranks)
    if needed <= free:
        return
    fitting = int((free - fixed) / each * ranks - uneven)
    advice = f"--batch-tokens {fitting} would work" if fitting >= settings.max_length else "more memory would work"
    for_each = " for each rank" if ranks > 1 else ""
    raise UsageError(
        f"training needs about {_gigabytes(needed)}{for_each} with --batch-tokens {settings.batch_tokens}, and "
        f"{_gigabytes(free)} are free; {advice}"
    )


def _estimate(settings: TrainSettings, target: ModelShape, head: HeadSizes, dtype: torch.dtype) -> tuple[float, float]:
    """Bytes: whatever the batch, and for each token of it. Tensors that live at the same time, counted by hand."""
    hidden, width, steps = head.hidden_size, dtype.itemsize, settings.draft_steps
    weights = sum(_product(size) for _, size in target.tensor_shapes()) * width
    kv = settings.max_running_requests * settings.max_length * target.kv_elements_per_token * width
    layer = hidden * (3 * hidden + 4 * head.num_heads * head.head_dim + 3 * head.intermediate_size)
    trained = 16 * (layer + hidden * head.draft_vocab_size)
    teacher = 3 * LOGIT_ROWS * target.vocab_size * 4
    attention = 10 * head.num_heads * settings.max_length
    elsewhere = 40 * hidden + 6 * width * head.intermediate_size + 12 * head.draft_vocab_size
    return weights + max(kv, trained + teacher), steps * (attention + elsewhere) + 8 * target.intermediate_size * width


def _product(size: tuple[int, ...]) -> int:
    product = 1
    for one in size:
        product *= one
    return product


def free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 1 << 62


def _gigabytes(count: float) -> str:
    return f"{count / 1e9:.1f} GB"
