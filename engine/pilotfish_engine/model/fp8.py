"""Weights stored as 8-bit floats (float8_e4m3fn) beside the scales that give back their values.

`X.weight_scale_inv` has a number for each block of the matrix (DeepSeek-V3's format, and Qwen's); `X.weight_scale` one
for the matrix, for each row or for each block (compressed-tensors, AutoFP8). All are multiplied by, whatever the names
say. Scales of activations are for products in 8 bits; here products are in the dtype that the model is loaded as.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from pilotfish_engine.errors import CheckpointError

STORED = "F8_E4M3"  # as safetensors names the dtype
SCALES = ("_scale_inv", "_scale")  # behind a weight's name
OF_ACTIVATIONS = (".input_scale", ".activation_scale")
FORMATS = ("float-quantized", "naive-quantized", "mixed-precision")  # of compressed-tensors, which it may call fp8

Size = tuple[int, ...]


def read_block(config: Mapping[str, Any], where: str) -> tuple[int, int] | None:
    """Rows and columns of the blocks that scales are of, where a config.json has them. Raises CheckpointError unless
    its weights are as they are, or 8-bit floats."""
    found = config.get("quantization_config")
    if found is None:
        return None
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{where}: quantization_config is {found!r}; an object would work")
    method, block = found.get("quant_method"), found.get("weight_block_size")
    if method == "compressed-tensors" and found.get("format") in (None, *FORMATS):
        groups = [group.get("weights") or {} for group in (found.get("config_groups") or {}).values()]
        runs = all(group.get("num_bits") == 8 and group.get("type") == "float" for group in groups)
        block = next((group["block_structure"] for group in groups if group.get("block_structure")), None)
    else:
        runs = method == "fp8" and found.get("fmt") in (None, "e4m3")
    if not runs:
        raise CheckpointError(
            f"{where}: quantization_config {found!r} is not supported; weights of 8-bit floats, with quant_method "
            "'fp8' or 'compressed-tensors', or unquantised ones would work"
        )
    if block is not None and not (len(block) == 2 and all(type(side) is int and side > 0 for side in block)):
        raise CheckpointError(f"{where}: blocks of {block!r} are not supported; [rows, columns] would work")
    return None if block is None else (block[0], block[1])


def find_scales(
    shapes: Mapping[str, Size], dtypes: Mapping[str, str], block: tuple[int, int] | None, where: str
) -> dict[str, str]:
    """Each 8-bit weight → its scales, by name. Raises CheckpointError where they are missing or of a shape that scales
    nothing."""
    found = {}
    for name in shapes:
        if dtypes[name] != STORED:
            continue
        scale = next((name + end for end in SCALES if name + end in shapes), None)
        if scale is None:
            raise CheckpointError(
                f"{where}: tensor {name} is of 8-bit floats and has no scales; {name}{SCALES[0]} or {name}{SCALES[1]} "
                "would work"
            )
        if _spans(shapes[name], shapes[scale], block) is None:
            sizes = " or ".join(str(list(size)) for size in _sizes(shapes[name], block))
            raise CheckpointError(
                f"{where}: tensor {scale} has shape {list(shapes[scale])}, but {name} has {list(shapes[name])} and its "
                f"config names {'no blocks' if block is None else f'blocks of {list(block)}'}; {sizes} would work"
            )
        found[name] = scale
    return found


def dequantise(weight: Tensor, scale: Tensor, block: tuple[int, int] | None) -> Tensor:
    """float32 of the shape of `weight`; shapes as `find_scales` lets them pass."""
    spans = _spans(tuple(weight.shape), tuple(scale.shape), block)
    assert spans is not None, "shapes were checked"
    grid = scale.float().view(-(-weight.shape[0] // spans[0]), -1)
    columns = grid.repeat_interleave(spans[1], dim=1)[:, : weight.shape[1]]
    return weight.float() * columns.repeat_interleave(spans[0], dim=0)[: weight.shape[0]]


def _spans(weight: Size, scale: Size, block: tuple[int, int] | None) -> tuple[int, int] | None:
    """Rows and columns of a weight that one scale is of; None: no such scale is known."""
    if len(weight) != 2 or scale not in _sizes(weight, block):
        return None
    if scale in ((), (1,)):
        return weight[0], weight[1]
    if block is not None and scale == _grid(weight, block):
        return block
    return 1, weight[1]


def _sizes(weight: Size, block: tuple[int, int] | None) -> list[Size]:
    rows = weight[:1]
    return [(), (1,), rows, (*rows, 1)] + ([] if block is None else [_grid(weight, block)])


def _grid(weight: Size, block: tuple[int, int]) -> Size:
    return tuple(-(-length // side) for length, side in zip(weight, block, strict=False))
