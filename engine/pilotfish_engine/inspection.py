"""`pilotfish-engine inspect`: what a checkpoint is, whether it is whole, and how much memory it takes.

Reads metadata and tensor shapes, no weights.
"""

from __future__ import annotations

from math import prod
from pathlib import Path

from pilotfish_engine.errors import CheckpointError
from pilotfish_engine.model.checkpoint import check_tensors, open_checkpoint
from pilotfish_engine.model.shape import ModelShape
from pilotfish_engine.source import resolve
from pilotfish_engine.tokenizer import load

_BYTES = {"bfloat16": 2, "float32": 4}


def describe(source: str) -> str:
    """Lines of name and value. Raises CheckpointError when the engine could not load it."""
    path = resolve(source)
    checkpoint = open_checkpoint(path)
    check_tensors(checkpoint)
    shape = checkpoint.shape
    parameters = sum(prod(size) for size in checkpoint.tensor_shapes.values())
    lines = {
        "path": str(path),
        "family": shape.architecture,
        "layers": f"{shape.num_layers} of hidden size {shape.hidden_size}, intermediate {shape.intermediate_size}",
        "heads": f"{shape.num_heads} of {shape.head_dim}, {shape.num_kv_heads} for keys and values",
        "vocabulary": f"{shape.vocab_size}{', head tied to the embedding' if shape.tie_word_embeddings else ''}",
        "context": f"{shape.max_position_embeddings} tokens",
        "parameters": f"{parameters / 1e6:.1f} million, {_size(_stored(path))} on disk",
        "tokenizer": _tokenizer(path),
        **{f"memory, {dtype}": _memory(shape, parameters, width) for dtype, width in _BYTES.items()},
    }
    return "\n".join(f"{name:<17} {value}" for name, value in lines.items())


def _memory(shape: ModelShape, parameters: int, width: int) -> str:
    token = shape.kv_elements_per_token * width
    context = token * shape.max_position_embeddings
    return f"{_size(parameters * width)} weights, {_size(token)} KV a token, {_size(context)} a whole context"


def _tokenizer(path: Path) -> str:
    try:
        tokenizer = load(path)
    except CheckpointError as error:
        return f"none that can be used: {error}"
    chat = "with" if tokenizer.chat_template is not None else "without"
    return f"{tokenizer.vocab_size} tokens, {chat} a chat template"


def _stored(path: Path) -> int:
    files = [path] if path.is_file() else path.glob("*.safetensors")
    return sum(file.stat().st_size for file in files)


def _size(count: float) -> str:
    units = ["bytes", "kB", "MB", "GB", "TB"]
    while count >= 1000 and len(units) > 1:
        count /= 1000
        del units[0]
    return f"{count:.3g} {units[0]}"
