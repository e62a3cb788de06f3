"""Checkpoints of 8-bit floats, against the formulas of their formats written out here."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pilotfish_engine.distributed.collectives import Ranks
from pilotfish_engine.errors import CheckpointError
from pilotfish_engine.model import load
from pilotfish_engine.model.parallel import Part
from pilotfish_engine.model.safetensors_checkpoint import SafetensorsCheckpoint
from tests.engine.model.paging import Paged, Piece
from tests.engine.model.tiny import MODELS, SMALL

pytestmark = pytest.mark.filterwarnings("ignore")  # the reference library's own

BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [32, 48], "activation_scheme": "dynamic"}
TENSORS = {"quant_method": "fp8", "activation_scheme": "static"}
GROUP = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
GROUPS = {"group_0": {"targets": ["Linear"], "weights": GROUP}}
CHANNELS = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": GROUPS}
TOKENS = torch.randint(0, SMALL["vocab_size"], (40,), generator=torch.Generator().manual_seed(2)).tolist()


def by_blocks(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """What the files hold under the weight's name with each of these endings, and what it means."""
    meant, stored = torch.empty_like(weight), torch.empty_like(weight, dtype=torch.float8_e4m3fn)
    rows, columns = range(0, weight.shape[0], 32), range(0, weight.shape[1], 48)
    scales = torch.empty(len(rows), len(columns))
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            block = (slice(row, row + 32), slice(column, column + 48))
            scales[i, j] = weight[block].abs().max() / 448
            stored[block] = (weight[block] / scales[i, j]).to(torch.float8_e4m3fn)
            meant[block] = stored[block].float() * scales[i, j]
    return {"": stored, "_scale_inv": scales}, meant


def by_channels(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    scales = torch.stack([row.abs().max() / 448 for row in weight]).to(torch.bfloat16)
    stored = torch.stack([row / scale.float() for row, scale in zip(weight, scales, strict=True)])
    stored = stored.to(torch.float8_e4m3fn)
    meant = torch.stack([row.float() * scale.float() for row, scale in zip(stored, scales, strict=True)])
    return {"": stored, "_scale": scales[:, None]}, meant


def by_tensors(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    scale = weight.abs().max() / 448
    stored = (weight / scale).to(torch.float8_e4m3fn)
    return {"": stored, "_scale": scale, "input": torch.tensor(0.5)}, stored.float() * scale


Rule = Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]
FORMATS: dict[str, tuple[dict[str, Any], Rule]] = {
    "blocks": (BLOCKS, by_blocks),
    "channels": (CHANNELS, by_channels),
    "tensors": (TENSORS, by_tensors),
}


def quantised(name: str, folder: Path, quantization: dict[str, Any], rule: Rule) -> dict[str, Tensor]:
    """Saves a model so, with its heads and embeddings as they are; returns what its tensors mean."""
    MODELS[name].save_pretrained(folder)
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "quantization_config": quantization}))
    stored, meant = {}, {}
    for tensor_name, tensor in load_file(folder / "model.safetensors").items():
        meant[tensor_name] = stored[tensor_name] = tensor
        if "_proj" in tensor_name and tensor.ndim == 2:
            parts, meant[tensor_name] = rule(tensor)
            for end, part in parts.items():
                stem = tensor_name.removesuffix("weight")
                stored[f"{stem}input_scale" if end == "input" else tensor_name + end] = part
    save_file(stored, folder / "model.safetensors")
    return meant


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("name", ["untied", "deepseek v3", "qwen3 moe"])
def test_weights_are_what_their_scales_make_of_them(name: str, kind: str, tmp_path: Path) -> None:
    meant = quantised(name, tmp_path / "small", *FORMATS[kind])
    checkpoint = SafetensorsCheckpoint(tmp_path / "small")
    for tensor in checkpoint.tensor_shapes:
        torch.testing.assert_close(checkpoint.read(tensor), meant[tensor], rtol=0, atol=0)
    MODELS[name].save_pretrained(tmp_path / "meant")
    save_file(meant, tmp_path / "meant" / "model.safetensors")
    found, expected = (
        Paged(load(tmp_path / folder, torch.float32), 1, max_len=48).run([Piece(TOKENS)])[0]
        for folder in ("small", "meant")
    )
    assert torch.equal(found, expected)
    (narrow,) = Paged(load(tmp_path / "small", torch.bfloat16), 1, max_len=48).run([Piece(TOKENS)])
    assert torch.nn.functional.cosine_similarity(narrow, expected).mean() > 0.95


def test_ranks_read_their_parts_of_what_the_scales_make(tmp_path: Path) -> None:
    """A rank's rows and columns need not end where a block does."""
    meant = quantised("untied", tmp_path, BLOCKS, by_blocks)
    part = Part(SafetensorsCheckpoint(tmp_path), Ranks(1, 2, torch.device("cpu")))
    up, down = (f"model.layers.0.mlp.{name}_proj.weight" for name in ("up", "down"))
    torch.testing.assert_close(part.read(up), meant[up][56:], rtol=0, atol=0)
    torch.testing.assert_close(part.read(down), meant[down][:, 56:], rtol=0, atol=0)


UP = "model.layers.1.mlp.up_proj.weight"


def edit(change: Callable[[dict[str, Tensor]], Any]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return apply


def config(**quantization: Any) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        file = folder / "config.json"
        values = json.loads(file.read_text())
        file.write_text(json.dumps({**values, "quantization_config": values["quantization_config"] | quantization}))

    return apply


REFUSED: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "other blocks": (
        "blocks",
        edit(lambda t: t.update({f"{UP}_scale_inv": torch.ones(4, 3)})),
        rf"{UP}_scale_inv has shape \[4, 3\], but {UP} has \[112, 64\] .* of \[32, 48\]; .* or \[4, 2\] would work",
    ),
    "blocks of another size": ("blocks", config(weight_block_size=[16, 16]), r"_scale_inv has shape .* of \[16, 16\]"),
    "blocks of no size": ("blocks", config(weight_block_size=None), r"_scale_inv has shape .* config names no bloc"),
    "odd blocks": ("blocks", config(weight_block_size=[32]), r"blocks of \[32\] are not supported; \[rows, columns\]"),
    "no scales": (
        "blocks",
        edit(lambda t: t.pop(f"{UP}_scale_inv")),
        rf"tensor {UP} is of 8-bit floats and has no scales; {UP}_scale_inv or {UP}_scale would work",
    ),
    "scales of nothing": (
        "channels",
        edit(lambda t: t.update({"model.norm.weight_scale": torch.ones(1)})),
        r"tensor model.norm.weight_scale of shape \[1\] is none that",
    ),
    "other floats": (
        "tensors",
        edit(lambda t: t.update({UP: t[UP].to(torch.float8_e5m2)})),
        "_scale of shape .* is none that",
    ),
    "whole numbers": (
        "channels",
        config(config_groups={"0": {"weights": {**GROUP, "type": "int"}}}),
        "quantization_config .* is not supported; weights of 8-bit floats",
    ),
    "another format": ("blocks", config(fmt="e5m2"), "quantization_config .* is not supported; weights of 8-bit"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_scaled_is_refused(name: str, tmp_path: Path) -> None:
    kind, breaks, message = REFUSED[name]
    quantised("untied", tmp_path, *FORMATS[kind])
    load(tmp_path, torch.float32)
    breaks(tmp_path)
    with pytest.raises(CheckpointError, match=message) as caught:
        load(tmp_path, torch.float32)
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)
