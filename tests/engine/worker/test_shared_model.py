"""A model that two ranks share gives the logits of the whole one, in every family; here the ranks are threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from pilotfish_engine.distributed.collectives import Ranks
from pilotfish_engine.errors import UsageError
from pilotfish_engine.model.loading import load, read_shape
from pilotfish_engine.model.parallel import divide
from tests.engine.model.paging import Paged, Piece
from tests.engine.model.tiny import MODELS, deepseek_v3, llama

T = TypeVar("T")
CPU = torch.device("cpu")


class Meeting:
    """Where `size` threads show each other a tensor."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=60)
        self._shown: list[Tensor] = [torch.empty(0)] * size

    def show(self, rank: int, x: Tensor) -> list[Tensor]:
        self._shown[rank] = x.clone()
        self._barrier.wait()
        shown = list(self._shown)
        self._barrier.wait()
        return shown

    def run(self, work: Callable[[Ranks], T]) -> list[T]:
        """What each rank's thread gives."""

        def one(rank: int) -> T:
            try:
                return work(Thread(rank, self))
            except BaseException:
                self._barrier.abort()
                raise

        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(one, range(self.size)))


class Thread(Ranks):
    def __init__(self, rank: int, meeting: Meeting) -> None:
        super().__init__(rank, meeting.size, CPU)
        self._meeting = meeting

    def all_reduce(self, x: Tensor) -> Tensor:
        return x.copy_(torch.stack(self._meeting.show(self.rank, x)).sum(dim=0))

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.stack(self._meeting.show(self.rank, x))

    def broadcast(self, x: Tensor) -> Tensor:
        return self._meeting.show(self.rank, x)[0]


# prompts, then a chain and a tree over them
PASSES = [
    [Piece(list(range(2, 23))), Piece([5, 6, 5])],
    [Piece([7, 8, 9, 10, 11], parents=[-1, 0, 0, 1, 2]), Piece([30, 31], parents=[-1, 0])],
]


def outputs(folder: Path, ranks: Ranks | None = None) -> list[Tensor]:
    """Logits of every pass, and what drafts read of the target beside them."""
    decoder = load(folder, torch.float32, max_positions=64, ranks=ranks)
    paged = Paged(decoder, num_requests=2, max_len=48)
    found = [logits for pieces in PASSES for logits in paged.run(pieces)]
    hidden, aux = decoder.forward(paged.inputs(PASSES[1]), paged.kv, (1, 2))
    return [*found, hidden, *aux, decoder.embed(torch.arange(decoder.shape.vocab_size))]


def check(folder: Path, size: int) -> None:
    whole = outputs(folder)
    for rank in Meeting(size).run(lambda ranks: outputs(folder, ranks)):
        for shared, expected in zip(rank, whole, strict=True):
            assert torch.isfinite(expected).all()
            torch.testing.assert_close(shared, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("name", [name for name in MODELS if name != "one kv head"])
def test_two_ranks_give_the_logits_of_one(tmp_path, name):
    MODELS[name].save_pretrained(tmp_path)
    check(tmp_path, 2)


@pytest.mark.parametrize("size", [2, 4])
def test_a_vocabulary_that_does_not_divide(tmp_path, size):
    """The last rank has fewer rows, and with four ranks of ten tokens one row less than its share."""
    torch.manual_seed(3)
    llama(vocab_size=33 if size == 2 else 34, num_key_value_heads=4).save_pretrained(tmp_path)
    check(tmp_path, size)


def test_a_latent_is_whole_on_every_rank(tmp_path):
    torch.manual_seed(4)
    deepseek_v3(vocab_size=40, n_shared_experts=1).save_pretrained(tmp_path)
    check(tmp_path, 4)


def test_each_rank_holds_its_part_alone(tmp_path):
    MODELS["untied"].save_pretrained(tmp_path)
    whole = load(tmp_path, torch.float32)
    cache = whole.new_kv_cache(4, 16).k
    for part in Meeting(2).run(lambda ranks: load(tmp_path, torch.float32, ranks=ranks)):
        assert 2 * part.new_kv_cache(4, 16).k.numel() == cache.numel()
        assert 2 * part.embed.weight.numel() == whole.embed.weight.numel()
        assert 2 * part.lm_head.dense().numel() == whole.lm_head.dense().numel()
        assert part.shape == whole.shape


@pytest.mark.parametrize(
    ("name", "size", "sentence"),
    [
        ("untied", 3, "has 4 attention heads, 2 KV heads, 112 dimensions inside an MLP, which .*; 1 or 2 would work"),
        ("one kv head", 2, "--tensor-parallel-size is 2, and .* has 1 KV heads, which .* evenly; 1 would work"),
        ("qwen3 moe", 4, "has 2 KV heads, .*; 1 or 2 would work"),
        ("deepseek v3", 16, "has 4 attention heads, 40 dimensions inside an expert, 40 .* shared experts, .*4 would"),
    ],
)
def test_what_does_not_divide_is_refused(tmp_path, name, size, sentence):
    MODELS[name].save_pretrained(tmp_path)
    with pytest.raises(UsageError, match=sentence):
        divide(read_shape(tmp_path), size, tmp_path)


def test_plain_layers_among_experts_divide_too(tmp_path):
    MODELS["qwen3 moe"].save_pretrained(tmp_path)
    shape = replace(read_shape(tmp_path), intermediate_size=113)
    assert shape.moe is not None
    assert divide(shape, 2, tmp_path).hidden_size == shape.hidden_size
    mixed = replace(shape, moe=replace(shape.moe, dense_layers=frozenset({1})))
    with pytest.raises(UsageError, match="113 dimensions inside an MLP"):
        divide(mixed, 2, tmp_path)
