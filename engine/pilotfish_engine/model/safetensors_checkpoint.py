"""A Hugging Face folder: config.json beside model.safetensors or shards with an index. No pickles, no remote code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from pilotfish_engine import files
from pilotfish_engine.errors import CheckpointError
from pilotfish_engine.files import as_they_should_be
from pilotfish_engine.model import fp8
from pilotfish_engine.model.config_json import Config
from pilotfish_engine.model.families import shape_from_config
from pilotfish_engine.model.shape import ModelShape

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class SafetensorsFolder:
    """`config` is the folder's config.json. Tensors have the names and dtypes of the files, but that those of 8-bit
    floats are read as what their scales make of them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_file = path / "config.json"
        if files.find(path, "config.json") is None:
            raise CheckpointError(f"{path}: no config.json; a folder with config.json and *.safetensors would work")
        self.config = files.read_json(self.config_file)

    @cached_property
    def _block(self) -> tuple[int, int] | None:
        with as_they_should_be(self.config_file):
            return fp8.read_block(self.config, str(self.config_file))

    @cached_property
    def _files(self) -> Mapping[str, Any]:
        """Tensor name in the files → the open one that holds it."""
        if (index := files.find(self.path, INDEX)) is not None:
            weight_map = files.read_json(index, files.LARGE).get("weight_map")
            if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
                raise CheckpointError(f"{index}: no weight_map; an index as transformers writes it would work")
            handles = {name: self._open(name) for name in sorted(set(weight_map.values()))}
            present = {name: set(handle.keys()) for name, handle in handles.items()}
            for tensor, name in weight_map.items():
                if tensor not in present[name]:
                    raise CheckpointError(
                        f"{self.path / name}: tensor {tensor} is missing, which {INDEX} places there; "
                        "shards and index of the same checkpoint would work"
                    )
            return {tensor: handle for name, handle in handles.items() for tensor in present[name]}
        if files.find(self.path, SINGLE) is not None:
            handle = self._open(SINGLE)
            return dict.fromkeys(handle.keys(), handle)
        raise CheckpointError(f"{self.path}: neither {SINGLE} nor {INDEX}; one of them beside config.json would work")

    def _open(self, name: str) -> Any:
        file = files.find(self.path, name)
        if file is None:
            raise CheckpointError(
                f"{self.path / name}: no such file, though {INDEX} names it; all shards in one folder would work"
            )
        try:
            return safe_open(file, framework="pt")
        except (SafetensorError, OSError, RuntimeError) as error:  # torch's own, where the file cannot be mapped
            raise CheckpointError(
                f"{file}: not a whole safetensors file ({error}); downloading it again would work"
            ) from error

    @cached_property
    def tensor_shapes(self) -> Mapping[str, tuple[int, ...]]:
        shapes, scales = self._stored_shapes, set(self._scales.values())
        ends = (".rotary_emb.inv_freq", *fp8.OF_ACTIVATIONS)  # the first: a constant that early Llama checkpoints carry
        return {name: shape for name, shape in shapes.items() if name not in scales and not name.endswith(ends)}

    @cached_property
    def _stored_shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(file.get_slice(name).get_shape()) for name, file in self._files.items()}

    @cached_property
    def _scales(self) -> Mapping[str, str]:
        dtypes = {name: str(file.get_slice(name).get_dtype()) for name, file in self._files.items()}
        return fp8.find_scales(self._stored_shapes, dtypes, self._block, str(self.path))

    @cached_property
    def stored_as(self) -> Mapping[str, int]:
        counts: Counter[str] = Counter()
        for name, shape in self._stored_shapes.items():
            counts[self._files[name].get_slice(name).get_dtype()] += prod(shape)
        return counts

    def read(self, name: str) -> Tensor:
        """A weight, in its own floating dtype, or float32 where it was quantised."""
        tensor = self.read_raw(name)
        if name in self._scales:
            return fp8.dequantise(tensor, self.read_raw(self._scales[name]), self._block)
        if not tensor.is_floating_point() or tensor.itemsize < 2:
            raise CheckpointError(
                f"{self.path}: tensor {name} is {str(tensor.dtype).removeprefix('torch.')}; "
                "float32, float16 and bfloat16 would work"
            )
        return tensor

    def stored_type(self, name: str) -> str:
        found: str = self._files[name].get_slice(name).get_dtype()
        return found

    def read_stored(self, name: str) -> Mapping[str, Tensor]:
        found = {"weight": self.read_raw(name)}
        return found | ({"scale": self.read_raw(self._scales[name])} if name in self._scales else {})

    def cut(self, name: str) -> None:
        return None

    def read_raw(self, name: str) -> Tensor:
        """A tensor of any dtype that torch has."""
        try:
            tensor: Tensor = self._files[name].get_tensor(name)
        except (SafetensorError, RuntimeError, AttributeError, ValueError, TypeError) as error:
            raise CheckpointError(
                f"{self.path}: tensor {name} cannot be read ({error}); float32, float16 and bfloat16 would work"
            ) from error
        return tensor


class SafetensorsCheckpoint:
    """A folder that holds a causal LM."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._folder = SafetensorsFolder(path)
        shape = shape_from_config(self._folder.config, str(self._folder.config_file))
        if (generation := files.find(path, "generation_config.json")) is not None:
            more = Config(files.read_json(generation), str(generation)).token_ids("eos_token_id")
            shape = replace(shape, eos_token_ids=tuple(dict.fromkeys(shape.eos_token_ids + more)))
        self.shape: ModelShape = shape

    @cached_property
    def _names(self) -> Mapping[str, str]:
        """Of the model's own tensors: each name here → that in the files."""
        names = {}
        for stored in self._folder.tensor_shapes:
            if stored.startswith(self.shape.unread_prefixes):
                continue
            name = stored
            for prefix, own in self.shape.spellings:
                if stored.startswith(prefix):
                    name = own + stored.removeprefix(prefix)
            names[name] = stored
        if self.shape.tie_word_embeddings:  # many tied checkpoints store the shared matrix under both names
            names.pop("lm_head.weight", None)
        return names

    @cached_property
    def tensor_shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: self._folder.tensor_shapes[stored] for name, stored in self._names.items()}

    @property
    def stored_as(self) -> Mapping[str, int]:
        return self._folder.stored_as

    def read(self, name: str) -> Tensor:
        return self._folder.read(self._names[name])

    def stored_type(self, name: str) -> str:
        return self._folder.stored_type(self._names[name])

    def read_stored(self, name: str) -> Mapping[str, Tensor]:
        return self._folder.read_stored(self._names[name])

    def cut(self, name: str) -> None:
        return None
