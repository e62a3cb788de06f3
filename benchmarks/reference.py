"""The reference library's own SmolLM2, for the numbers beside ours and for tests of equality."""

from __future__ import annotations

from unittest.mock import patch

import torch
from transformers import AutoModelForCausalLM, GgufConfig, LlamaForCausalLM

from benchmarks import SOURCE as SOURCE
from pilotfish_engine.source import resolve


def smollm2(dtype: torch.dtype) -> LlamaForCausalLM:
    """Reads the reference model. Its GGUF loader asks for accelerate, which it would use only to spread a model over
    devices."""
    path = resolve(SOURCE)
    with patch("transformers.modeling_utils.is_accelerate_available", lambda: True):
        model = AutoModelForCausalLM.from_pretrained(
            str(path.parent), gguf_file=path.name, dtype=dtype, quantization_config=GgufConfig(dequantize=True)
        )
    assert isinstance(model, LlamaForCausalLM), f"{path.name} is a Llama checkpoint, and is {type(model).__name__}"
    model.requires_grad_(False)
    return model
