"""A Hugging Face folder: config.json beside model.safetensors or shards with an index. No pickles, no remote code."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from pilotfish_engine.errors import CheckpointError
from pilotfish_engine.model.families import shape_from_config, token_ids
from pilotfish_engine.model.shape import ModelShape

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class SafetensorsFolder:
    """The folder as it is: `config` is its config.json, and tensors have the names and dtypes of the files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_file = path / "config.json"
        if not self.config_file.exists():
            raise CheckpointError(f"{path}: no config.json; a folder with config.json and *.safetensors would work")
        self.config = _read_json(self.config_file)

    @cached_property
    def _files(self) -> Mapping[str, Any]:
        """Tensor name → the open file that holds it."""
        index_file, single = self.path / INDEX, self.path / SINGLE
        if index_file.exists():
            weight_map = _read_json(index_file).get("weight_map")
            if not isinstance(weight_map, dict):
                raise CheckpointError(f"{index_file}: no weight_map; an index as transformers writes it would work")
            handles = {name: _open(self.path / name) for name in sorted(set(weight_map.values()))}
            present = {name: set(handle.keys()) for name, handle in handles.items()}
            for tensor, name in weight_map.items():
                if tensor not in present[name]:
                    raise CheckpointError(
                        f"{self.path / name}: tensor {tensor} is missing, which {INDEX} places there; "
                        "shards and index of the same checkpoint would work"
                    )
            return {tensor: handle for name, handle in handles.items() for tensor in present[name]}
        if single.exists():
            handle = _open(single)
            return dict.fromkeys(handle.keys(), handle)
        raise CheckpointError(f"{self.path}: neither {SINGLE} nor {INDEX}; one of them beside config.json would work")

    @cached_property
    def tensor_shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {
            name: tuple(file.get_slice(name).get_shape())
            for name, file in self._files.items()
            if not name.endswith(".rotary_emb.inv_freq")  # a constant that early Llama checkpoints carry
        }

    def read(self, name: str) -> Tensor:
        """A weight, in its own floating dtype."""
        tensor = self.read_raw(name)
        if not tensor.is_floating_point() or tensor.itemsize < 2:
            raise CheckpointError(
                f"{self.path}: tensor {name} is {str(tensor.dtype).removeprefix('torch.')}; "
                "float32, float16 and bfloat16 would work"
            )
        return tensor

    def read_raw(self, name: str) -> Tensor:
        """A tensor of any dtype."""
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor


class SafetensorsCheckpoint(SafetensorsFolder):
    """A folder that holds a causal LM."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        shape = shape_from_config(self.config, str(self.config_file))
        generation_file = path / "generation_config.json"
        if generation_file.exists():
            more = token_ids(_read_json(generation_file).get("eos_token_id"))
            shape = replace(shape, eos_token_ids=tuple(dict.fromkeys(shape.eos_token_ids + more)))
        self.shape: ModelShape = shape

    @cached_property
    def tensor_shapes(self) -> Mapping[str, tuple[int, ...]]:
        drafts = self.shape.draft_prefixes
        shapes = {name: shape for name, shape in super().tensor_shapes.items() if not name.startswith(drafts)}
        if self.shape.tie_word_embeddings:  # many tied checkpoints store the shared matrix under both names
            shapes.pop("lm_head.weight", None)
        return shapes


def _open(file: Path) -> Any:
    if not file.exists():
        raise CheckpointError(f"{file}: no such file, though {INDEX} names it; all shards in one folder would work")
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{file}: not a whole safetensors file ({error}); downloading it again would work"
        ) from error


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: not readable as JSON ({error}); the model's own file would work") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: holds {type(value).__name__}, not an object; the model's own file would work")
    return value
