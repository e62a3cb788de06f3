"""Reads a checkpoint's tensors behind one protocol, whatever the file format. Checks that they are all there.

Names are Hugging Face's. Nothing is filled in: a missing, extra or misshaped tensor is an error that names it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

from torch import Tensor

from pilotfish_engine.errors import CheckpointError
from pilotfish_engine.model.gguf_checkpoint import GgufCheckpoint
from pilotfish_engine.model.safetensors_checkpoint import SafetensorsCheckpoint
from pilotfish_engine.model.shape import ModelShape

FORMATS = "a .gguf file, or a folder with config.json and *.safetensors"


class Checkpoint(Protocol):
    @property
    def path(self) -> Path: ...

    @property
    def shape(self) -> ModelShape: ...

    @property
    def tensor_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every tensor in the files by name, without reading their data."""
        ...

    @property
    def stored_as(self) -> Mapping[str, int]:
        """How many numbers the files hold of each type. Types have the format's own names (BF16, Q4_K)."""
        ...

    def read(self, name: str) -> Tensor:
        """The tensor in its own floating dtype, or float32 where it was quantised."""
        ...

    def stored_type(self, name: str) -> str:
        """As weights.Files; so are the others."""
        ...

    def read_stored(self, name: str) -> Mapping[str, Tensor]: ...

    def cut(self, name: str) -> None: ...


def open_checkpoint(path: Path) -> Checkpoint:
    """Opens a model's files by their format. Raises CheckpointError when there is nothing at `path`, or nothing that
    can be read as a model."""
    if path.is_dir():
        return SafetensorsCheckpoint(path)
    if not path.exists():
        raise CheckpointError(f"{path}: no such model; {FORMATS} would work")
    if path.suffix != ".gguf":
        raise CheckpointError(f"{path}: not a model; {FORMATS} would work")
    return GgufCheckpoint(path)


def open_whole(path: Path) -> Checkpoint:
    """As open_checkpoint, once the files hold what the config asks for: before that, nothing of its size is made."""
    checkpoint = open_checkpoint(path)
    check_tensors(checkpoint)
    return checkpoint


def check_tensors(checkpoint: Checkpoint) -> None:
    """Raises CheckpointError unless the files hold exactly the tensors that their config claims."""
    shape = checkpoint.shape
    check_tensor_shapes(checkpoint.path, checkpoint.tensor_shapes, shape.tensor_shapes(), shape.architecture)


def check_tensor_shapes(
    path: Path,
    found: Mapping[str, tuple[int, ...]],
    expected: Mapping[str, tuple[int, ...]] | Iterable[tuple[str, tuple[int, ...]]],
    architecture: str,
) -> None:
    """Raises CheckpointError unless `found` is `expected`. It names the first tensor that is missing, misshaped or
    extra. What a config asks for, however much, is asked for one by one: the first that the files lack ends it."""
    known = set()
    for name, shape in expected.items() if isinstance(expected, Mapping) else expected:
        if name not in found:
            raise CheckpointError(
                f"{path}: tensor {name} is missing; its config asks for shape {list(shape)}, "
                f"and the files hold {len(found)} tensors; a complete checkpoint would work"
            )
        known.add(name)
        if found[name] != shape:
            raise CheckpointError(
                f"{path}: tensor {name} has shape {list(found[name])}, but its config asks for "
                f"{list(shape)}; files and config of the same model would work"
            )
    for name in found:
        if name not in known:
            raise CheckpointError(
                f"{path}: tensor {name} of shape {list(found[name])} is none that "
                f"{architecture} has; a checkpoint without it would work"
            )
