"""Has the reference library's own SmolLM2, for numbers beside ours and tests of equality."""

from __future__ import annotations

import hashlib
import tempfile
from contextlib import suppress
from pathlib import Path
from unittest.mock import patch

import torch
import transformers
from transformers import AutoModelForCausalLM, GgufConfig, LlamaForCausalLM

from benchmarks import SOURCE as SOURCE
from pilotfish_engine.source import resolve

KEPT = Path(__file__).parents[1] / ".work/reference"


def smollm2(dtype: torch.dtype) -> LlamaForCausalLM:
    """Reads the reference model. What the library makes of the GGUF file, most of a minute's work, is kept in .work."""
    path = resolve(SOURCE)
    kept = KEPT / f"{hashlib.sha256(path.read_bytes()).hexdigest()[:16]}-{transformers.__version__}"
    if not kept.is_dir():
        _dequantise(path, kept)
    model = LlamaForCausalLM.from_pretrained(kept, dtype=dtype)
    model.requires_grad_(False)
    return model


def _dequantise(path: Path, kept: Path) -> None:
    """In float32. The loader asks for accelerate, which it would use only to spread a model over devices."""
    with patch("transformers.modeling_utils.is_accelerate_available", lambda: True):
        model = AutoModelForCausalLM.from_pretrained(
            str(path.parent),
            gguf_file=path.name,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
        )
    assert isinstance(model, LlamaForCausalLM), f"{path.name} is a Llama checkpoint, and is {type(model).__name__}"
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
        model.save_pretrained(f"{folder}/model")
        with suppress(OSError):  # another process was first
            Path(folder, "model").rename(kept)
