"""A form of weights that this file alone knows: one class and one `register`, and every layer of a model is of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pilotfish_engine.distributed.collectives import Ranks
from pilotfish_engine.model import linear, load
from pilotfish_engine.model.linear import Dense, Linear, Rows
from pilotfish_engine.model.parallel import Part
from pilotfish_engine.model.safetensors_checkpoint import SafetensorsCheckpoint
from pilotfish_engine.model.weights import Files, Weights
from tests.engine.model.paging import Paged, Piece
from tests.engine.model.test_fp8 import CHANNELS, TOKENS, by_channels, quantised

pytestmark = pytest.mark.filterwarnings("ignore")  # the reference library's own


class Bytes:
    """weight: float8 [out, in]; scale: [out, 1]."""

    made = 0

    def __init__(self, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> None:
        assert weight.dtype is torch.float8_e4m3fn
        self.weight, self.scale, self.bias = weight, scale, bias
        Bytes.made += 1

    def dense(self) -> Tensor:
        return self.weight.float() * self.scale.float()

    def __call__(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        return Dense(self.dense(), self.bias)(x, out_dtype)

    def behind(self, first: int) -> Linear:
        return Bytes(self.weight[first:], self.scale[first:], None if self.bias is None else self.bias[first:])


class BytesOfExperts:
    def __init__(self, matrices: Sequence[Bytes]) -> None:
        self.count = len(matrices)
        self._matrices = matrices

    def __call__(self, x: Tensor, experts: Tensor, ends: Tensor) -> Tensor:
        every = torch.stack([matrix.dense() for matrix in self._matrices])
        return torch.bmm(every[experts], x.unsqueeze(2)).squeeze(2)


class InBytes:
    """With a scale for each row, cut along with it."""

    def holds(self, files: Files, name: str) -> bool:
        return files.stored_type(name) == "F8_E4M3"

    def linear(self, weights: Weights, parts: Sequence[Rows], bias: bool) -> Bytes:
        found = [self._of(weights.files, part) for part in parts]
        biases = [part.of(weights.files.read(f"{part.name}.bias")) for part in parts] if bias else []
        weight, scale = (torch.cat([pair[i] for pair in found]) for i in range(2))
        return Bytes(weight, scale, torch.cat(biases) if bias else None)

    def experts(self, weights: Weights, matrices: Sequence[Sequence[Rows]]) -> BytesOfExperts:
        return BytesOfExperts([self.linear(weights, parts, False) for parts in matrices])

    def _of(self, files: Files, part: Rows) -> tuple[Tensor, Tensor]:
        stored, cut = files.read_stored(f"{part.name}.weight"), files.cut(f"{part.name}.weight")
        rows, columns = cut or (slice(None), slice(None))
        weight, scale = stored["weight"][rows, columns].view(torch.uint8), stored["scale"][rows]
        return part.of(weight).view(torch.float8_e4m3fn), part.of(scale)


@pytest.fixture
def in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "KINDS", list(linear.KINDS))
    linear.register(InBytes())
    monkeypatch.setattr(Bytes, "made", 0)


@pytest.mark.parametrize("name", ["untied", "deepseek v3", "qwen3 moe", "qwen3 next"])
def test_a_model_of_it_gives_the_same_logits(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Attention of both kinds, with and without a gate, plain MLPs and experts."""
    quantised(name, tmp_path, CHANNELS, by_channels)
    expected = Paged(load(tmp_path, torch.float32), 1, max_len=48).run([Piece(TOKENS)])[0]
    dense = memory_of(tmp_path)
    request.getfixturevalue("in_bytes")
    found = Paged(load(tmp_path, torch.float32), 1, max_len=48).run([Piece(TOKENS)])[0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert Bytes.made >= 4 * SafetensorsCheckpoint(tmp_path).shape.num_layers
    assert memory_of(tmp_path) < dense / 2, "room is reserved for what is dense"


def memory_of(folder: Path) -> int:
    """Numbers that there is room for."""
    files, room = SafetensorsCheckpoint(folder), 0
    weights = Weights(files, files.tensor_shapes, torch.float32, torch.device("cpu"))
    while weights.arena.has([room + 1024]):
        room += 1024
    return room


@pytest.mark.usefixtures("in_bytes")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_has_its_part_of_it(rank: int, tmp_path: Path) -> None:
    meant = quantised("untied", tmp_path, CHANNELS, by_channels)
    part = Part(SafetensorsCheckpoint(tmp_path), Ranks(rank, 2, torch.device("cpu")))
    weights = Weights(part, part.tensor_shapes, torch.float32, torch.device("cpu"))
    for name in ("mlp.up_proj", "mlp.down_proj", "self_attn.q_proj", "self_attn.o_proj"):
        layer = linear.read_linear(weights, Rows(f"model.layers.0.{name}"))
        assert isinstance(layer, Bytes)
        whole = meant[f"model.layers.0.{name}.weight"]
        axis = 0 if layer.weight.shape[0] < whole.shape[0] else 1
        torch.testing.assert_close(layer.dense(), whole.chunk(2, axis)[rank], rtol=0, atol=0)


@pytest.mark.usefixtures("in_bytes")
def test_rows_of_several_kinds_are_dense_together(tmp_path: Path) -> None:
    meant = quantised("untied", tmp_path, CHANNELS, by_channels)
    files = SafetensorsCheckpoint(tmp_path)
    names = ["model.layers.0.mlp.up_proj", "lm_head"]
    shapes = {f"{name}.weight": files.tensor_shapes[f"{name}.weight"] for name in names}
    weights = Weights(files, shapes, torch.float32, torch.device("cpu"))
    layer = linear.read_linear(weights, *[Rows(name) for name in names])
    assert isinstance(layer, Dense)
    assert torch.equal(layer.dense(), torch.cat([meant[f"{name}.weight"] for name in names]))
