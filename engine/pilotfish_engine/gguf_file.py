"""The head of a GGUF file (versions 2 and 3, little-endian): its keys, and where its tensors lie.

Every count, length and offset is checked against the file's length before anything is made of it: a head costs some
times its own bytes, and no more. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pilotfish_engine import files
from pilotfish_engine.errors import CheckpointError

if TYPE_CHECKING:  # both are slow to import, and keys need neither
    import gguf
    import numpy as np

T = TypeVar("T")
LONGEST_HEAD = 256 << 20  # bytes; the largest vocabularies take twenty million
MAX_DIMENSIONS = 4
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_LEAST_KEY, _LEAST_TENSOR = 8 + 4 + 1, 8 + 4 + 4 + 8  # bytes
_ALIGNMENT = "general.alignment"


@dataclass(frozen=True)
class GgufTensor:
    """shape: as torch has it, outermost first. start: in the file."""

    name: str
    kind: gguf.GGMLQuantizationType
    shape: tuple[int, ...]
    start: int
    num_bytes: int

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class GgufHead:
    """keys: arrays as lists. tensors: by name."""

    path: Path
    keys: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    @cached_property
    def _bytes(self) -> np.memmap[Any, np.dtype[np.uint8]]:
        import numpy as np

        return np.memmap(self.path, mode="r", dtype=np.uint8)

    def dequantised(self, tensor: GgufTensor) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Raises NotImplementedError for a type that the library cannot dequantise."""
        import gguf
        import numpy as np

        numbers = gguf.quants.dequantize(self.stored(tensor), tensor.kind)
        return np.array(numbers, dtype=np.float32).reshape(tensor.shape)

    def stored(self, tensor: GgufTensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The bytes of each row. They have the shape of the tensor but for its last axis."""
        return self._bytes[tensor.start : tensor.start + tensor.num_bytes].reshape(*tensor.shape[:-1], -1)


def read_keys(path: Path) -> dict[str, Any]:
    """Arrays as lists. Raises CheckpointError on a file that is damaged, cut short or foreign."""
    return _read(path, lambda reader: reader.keys())


def read_head(path: Path) -> GgufHead:
    """As read_keys, and where the tensors are."""
    return _read(path, lambda reader: GgufHead(path, keys := reader.keys(), reader.tensors(keys)))


def _read(path: Path, how: Callable[[_Reader], T]) -> T:
    files.check_regular(path)
    size = path.stat().st_size
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return how(_Reader(data))
    except (struct.error, OSError, ValueError) as error:
        raise CheckpointError(
            f"{path}: not a whole GGUF file of {size} bytes ({error}); downloading it again would work"
        ) from error


@cache
def _kinds() -> dict[int, tuple[gguf.GGMLQuantizationType, int, int]]:
    """Types by their numbers: how many values one block of them holds, and its bytes."""
    import gguf

    return {int(kind): (kind, *sizes) for kind, sizes in gguf.GGML_QUANT_SIZES.items()}


class _Reader:
    """Raises ValueError, which says what is wrong where."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 4
        self._end = min(len(data), LONGEST_HEAD)
        self._num_tensors = 0

    def keys(self) -> dict[str, Any]:
        if self._data[:4] != b"GGUF":
            raise ValueError(f"it starts with {self._data[:4]!r}")
        version, self._num_tensors, num_keys = self._unpack("IQQ")
        if version not in (2, 3):
            raise ValueError(f"version {version}, where 2 and 3 are known")
        self._check_count(num_keys, _LEAST_KEY, "keys")
        keys: dict[str, Any] = {}
        for _ in range(num_keys):
            name = self._string()
            if name in keys:
                raise ValueError(f"the key {name!r} is there twice")
            keys[name] = self._value(self._unpack("I")[0], name)
        return keys

    def tensors(self, keys: Mapping[str, Any]) -> dict[str, GgufTensor]:
        """Behind the keys."""
        self._check_count(self._num_tensors, _LEAST_TENSOR, "tensors")
        alignment = keys.get(_ALIGNMENT, 32)
        if type(alignment) is not int or alignment not in (1 << power for power in range(3, 21)):
            raise ValueError(f"{_ALIGNMENT} is {alignment!r}, where a power of two from 8 is needed")
        told = [self._tensor() for _ in range(self._num_tensors)]
        first = -(-self._at // alignment) * alignment
        tensors = {tensor.name: tensor for tensor in self._placed(told, first, alignment)}
        if len(tensors) < len(told):
            ((twice, _),) = Counter(tensor.name for tensor in told).most_common(1)
            raise ValueError(f"the tensor {twice!r} is there twice")
        return tensors

    def _unpack(self, form: str) -> tuple[Any, ...]:
        form = "<" + form
        values = struct.unpack_from(form, self._data, self._at)
        self._at += struct.calcsize(form)
        return values

    def _check_count(self, count: int, least_bytes: int, what: str) -> None:
        """So many things of so many bytes each must fit into the rest of the head."""
        if count > (self._end - self._at) // least_bytes:
            raise ValueError(f"{count} {what} at {self._at} run past the end")

    def _string(self) -> str:
        (length,) = self._unpack("Q")
        self._check_count(length, 1, "bytes of a string")
        text = self._data[self._at : self._at + length].decode()
        self._at += length
        return text

    def _value(self, kind: int, name: str) -> Any:
        if kind == _STRING:
            return self._string()
        if kind in _SCALARS:
            return self._unpack(_SCALARS[kind])[0]
        if kind != _ARRAY:
            raise ValueError(f"the key {name!r} is of type {kind}, which is not known")
        inner, count = self._unpack("IQ")
        if inner == _STRING:
            self._check_count(count, 8, "strings")
            return [self._string() for _ in range(count)]
        if inner not in _SCALARS:
            raise ValueError(f"the key {name!r} is an array of type {inner}; numbers and strings are read")
        form = _SCALARS[inner]
        self._check_count(count, struct.calcsize("<" + form), "numbers")
        return list(self._unpack(f"{count}{form}"))

    def _tensor(self) -> GgufTensor:
        """Its start is still the one behind the head."""
        name = self._string()
        (dimensions,) = self._unpack("I")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise ValueError(f"the tensor {name!r} has {dimensions} dimensions, where 1 to {MAX_DIMENSIONS} are known")
        *sizes, number, start = self._unpack(f"{dimensions}QIQ")
        if (known := _kinds().get(number)) is None:
            raise ValueError(f"the tensor {name!r} is of type {number}, which is not known")
        kind, block, block_bytes = known
        if 0 in sizes or sizes[0] % block:
            raise ValueError(f"the tensor {name!r} of {kind.name} has the sizes {sizes}; its rows are of {block}s")
        return GgufTensor(name, kind, tuple(reversed(sizes)), start, math.prod(sizes) // block * block_bytes)

    def _placed(self, told: list[GgufTensor], first: int, alignment: int) -> Iterator[GgufTensor]:
        """With their starts in the file, in which none may stand where another does."""
        placed = sorted(
            (GgufTensor(t.name, t.kind, t.shape, first + t.start, t.num_bytes) for t in told), key=lambda t: t.start
        )
        for tensor in placed:
            if tensor.start % alignment or tensor.start + tensor.num_bytes > len(self._data):
                raise ValueError(
                    f"the tensor {tensor.name!r} of {tensor.num_bytes} bytes at {tensor.start} is not within the file, "
                    f"aligned to {alignment}"
                )
        for before, after in pairwise(placed):
            if before.start + before.num_bytes > after.start:
                raise ValueError(f"the tensors {before.name!r} and {after.name!r} overlap")
        return iter(placed)
