"""From a model file to a Decoder, or only to its shape."""

from __future__ import annotations

from pathlib import Path

import torch

from pilotfish_engine.distributed.collectives import Ranks
from pilotfish_engine.model import assembly
from pilotfish_engine.model.checkpoint import check_tensors, open_checkpoint
from pilotfish_engine.model.decoder import Decoder
from pilotfish_engine.model.layers import Embedding
from pilotfish_engine.model.linear import Dense, Rows, read_linear
from pilotfish_engine.model.parallel import Part, SharedDecoder
from pilotfish_engine.model.shape import ModelShape
from pilotfish_engine.model.weights import Weights


def read_shape(source: Path) -> ModelShape:
    """What `load` would build, from the metadata alone. Raises CheckpointError."""
    return open_checkpoint(source).shape


def load(
    source: Path,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    max_positions: int | None = None,
    ranks: Ranks | None = None,
) -> Decoder:
    """Reads every weight as `dtype` on `device`; rotary tables reach `max_positions`, or the checkpoint's own limit.
    ranks: that share the model, of which this one reads its part.

    Raises CheckpointError, before any weight is read, where the files are not exactly the model that they claim to be.
    """
    checkpoint = open_checkpoint(source)
    check_tensors(checkpoint)
    if ranks is None:
        shape = checkpoint.shape
        weights = Weights(checkpoint, dict(shape.tensor_shapes()), dtype, torch.device(device))
    else:
        part = Part(checkpoint, ranks)
        shape = part.shape
        weights = Weights(part, part.tensor_shapes, dtype, torch.device(device))
    reach = max_positions or shape.max_position_embeddings
    cos_sin = local = assembly.rotary_table(shape, reach, device)
    if shape.window is not None and shape.window.rope != shape.rope:
        local = assembly.rotary_table(shape, reach, device, shape.window.rope)
    layers = [
        assembly.build_layer(
            weights, shape, f"model.layers.{index}.", index, local if shape.window_of(index) is not None else cos_sin
        )
        for index in range(shape.num_layers)
    ]
    norm = assembly.build_norm(weights, shape, "model.norm.weight")
    embed = weights.read("model.embed_tokens.weight")
    head = Dense(embed) if shape.tie_word_embeddings else read_linear(weights, Rows("lm_head"))
    if ranks is None:
        return Decoder(shape, Embedding(embed), layers, norm, head)
    return SharedDecoder(checkpoint.shape, shape, embed, layers, norm, head, ranks)
