"""The folder of an EAGLE or EAGLE-3 head: its tensors under canonical names, and the checks that need no target.

safetensors only: the `pytorch_model.bin` that some of these checkpoints come as is a pickle, and never read.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from pilotfish_engine.errors import CheckpointError
from pilotfish_engine.model.checkpoint import check_tensor_shapes
from pilotfish_engine.model.config_json import architecture_of
from pilotfish_engine.model.eagle_shape import METHODS, HeadShape, Method, canonical, head_shape, method_of
from pilotfish_engine.model.safetensors_checkpoint import SafetensorsFolder

# what some checkpoints carry beside the head, for training
UNUSED = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight")
FIRST_LAYER = "midlayer."  # SafeAILab's and SGLang's name of layers.0; such a head has no other


def head_method(path: Path) -> Method | None:
    """Whose head it is; None: nobody's that is known here. Of weights that cannot be read the config alone is asked."""
    with suppress(CheckpointError):
        return HeadCheckpoint(path).method
    with suppress(CheckpointError):
        return method_of(SafetensorsFolder(path).config, {})
    return None


class HeadCheckpoint:
    """Raises CheckpointError, here and in every method, on what is no such head or cannot run; reads no weights until
    `read`."""

    def __init__(self, path: Path) -> None:
        if not path.is_dir():
            raise CheckpointError(f"{path}: no such head; a folder with config.json and *.safetensors would work")
        pickles = sorted(file.name for file in path.glob("*.bin"))
        if pickles and not any(path.glob("*.safetensors")):
            raise CheckpointError(
                f"{path}: {pickles[0]} is a pickle, which is never read; its tensors as model.safetensors would work"
            )
        self.path = path
        self._folder = SafetensorsFolder(path)
        self.where = str(self._folder.config_file)
        self._names: dict[str, str] = {}
        for name in self._folder.tensor_shapes:
            twin = self._names.setdefault(canonical(name), name)
            if twin != name:
                raise CheckpointError(f"{path}: {twin} and {name} are the same tensor; one of them would work")

    @cached_property
    def tensor_shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: self._folder.tensor_shapes[own] for name, own in self._names.items()}

    @cached_property
    def method(self) -> Method | None:
        """Whose head it is; None: nobody's that is known here."""
        return method_of(self._folder.config, self.tensor_shapes)

    @property
    def kind(self) -> str:
        """What the config says that it is."""
        config = self._folder.config
        return f"of {config.get('speculators_model_type') or architecture_of(config, self.where)}"

    @cached_property
    def shape(self) -> HeadShape:
        assert self.method is not None, "only a head has the shape of one"
        return head_shape(self.method, self._folder.config, self.tensor_shapes, self._one_layer, self.where)

    @property
    def _one_layer(self) -> bool:
        return any(name.removeprefix("model.").startswith(FIRST_LAYER) for name in self._names.values())

    def check(self) -> HeadShape:
        """Returns the shape, once the files hold exactly its tensors. By then d2t is a map into the vocabulary."""
        shape = self.shape
        unused = UNUSED if shape.method == "EAGLE3" else ()
        expected = {self._spelled(name): size for name, size in shape.tensor_shapes()}
        if shape.has_d2t:
            expected[self._spelled("d2t")] = (shape.draft_vocab_size,)
        found = {own: self._folder.tensor_shapes[own] for name, own in self._names.items() if name not in unused}
        check_tensor_shapes(self.path, found, expected, METHODS[shape.method])
        self.target_ids()
        return shape

    def _spelled(self, name: str) -> str:
        """As the files spell it, or would."""
        if name in self._names:
            return self._names[name]
        return name.replace("layers.0.", FIRST_LAYER) if self._one_layer else name

    def read(self, name: str) -> Tensor:
        return self._folder.read(self._names[name])

    def stored_type(self, name: str) -> str:
        return self._folder.stored_type(self._names[name])

    def read_stored(self, name: str) -> Mapping[str, Tensor]:
        return self._folder.read_stored(self._names[name])

    def cut(self, name: str) -> None:
        return None

    def target_ids(self) -> Tensor | None:
        """int64 [draft_vocab_size]: the target's token for each of the draft's, in the files the difference of the two.
        None where they are the same."""
        shape = self.shape
        if not shape.has_d2t:
            return None
        offsets = self._folder.read_raw(self._names["d2t"])
        if offsets.dtype != torch.int64:
            kind = str(offsets.dtype).removeprefix("torch.")
            raise CheckpointError(f"{self.path}: tensor d2t is {kind}; int64 would work")
        ids = torch.arange(shape.draft_vocab_size) + offsets
        outside = (ids < 0) | (ids >= shape.block.vocab_size)
        if outside.any():
            first = int(outside.nonzero()[0])
            raise CheckpointError(
                f"{self.path}: d2t makes draft token {first} token {int(ids[first])} of {shape.block.vocab_size}; "
                "a map into the target's vocabulary would work"
            )
        order = ids.argsort(stable=True)
        same = (ids[order][1:] == ids[order][:-1]).nonzero().flatten().tolist()
        if same:
            first, second = order[same[0] : same[0] + 2].tolist()
            raise CheckpointError(
                f"{self.path}: d2t makes draft tokens {first} and {second} both token {int(ids[first])}; "
                "a different one for each would work"
            )
        return ids
