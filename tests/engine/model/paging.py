"""Runs a decoder over ragged batches whose pages lie in random order in a cache that starts as NaN everywhere."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from pilotfish_engine.kernels.inputs import AttentionInputs
from pilotfish_engine.model import Decoder
from pilotfish_engine.model.inputs import ForwardInputs


@dataclass(frozen=True)
class Piece:
    """Tokens of one request in one pass. parents: node → parent node (-1: the root's), for a tree; None: a chain."""

    tokens: list[int]
    parents: list[int] | None = None


@dataclass
class Paged:
    """`lens[b]`: rows of request b that are committed."""

    decoder: Decoder
    num_requests: int
    max_len: int
    page_size: int = 16
    lens: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        pages = -(-self.max_len // self.page_size)
        self.kv = self.decoder.new_kv_cache(self.num_requests * pages, self.page_size)
        self.kv.k.fill_(torch.nan)
        self.kv.v.fill_(torch.nan)
        order = torch.randperm(self.num_requests * pages, generator=torch.Generator().manual_seed(7)) + 1
        self.page_table = order.view(self.num_requests, pages).int()
        self.lens = [0] * self.num_requests

    def inputs(self, pieces: list[Piece]) -> ForwardInputs:
        tokens, positions, slots, masks, indptr = [], [], [], [], [0]
        for request, piece in enumerate(pieces):
            for node in range(len(piece.tokens)):
                row = self.lens[request] + node
                page = int(self.page_table[request, row // self.page_size])
                slots.append(page * self.page_size + row % self.page_size)
                path = ancestors(piece.parents, node)
                positions.append(self.lens[request] + len(path) - 1)
                masks.append(sum(1 << j for j in path) if piece.parents is not None else 0)
            tokens += piece.tokens
            indptr.append(len(tokens))
        has_tree = any(piece.parents is not None for piece in pieces)
        return ForwardInputs(
            token_ids=torch.tensor(tokens),
            positions=torch.tensor(positions),
            slots=torch.tensor(slots),
            attention=AttentionInputs(
                page_table=self.page_table,
                prefix_lens=torch.tensor(self.lens, dtype=torch.int32),
                q_indptr=torch.tensor(indptr, dtype=torch.int32),
                tree_mask=torch.tensor(masks) if has_tree else None,
            ),
        )

    def run(self, pieces: list[Piece], *, commit: bool = True) -> list[Tensor]:
        """Logits of each piece, float32 [len(tokens), V]."""
        hidden, _ = self.decoder.forward(self.inputs(pieces), self.kv)
        logits = torch.split(self.decoder.logits(hidden), [len(piece.tokens) for piece in pieces])
        if commit:
            self.lens = [length + len(piece.tokens) for length, piece in zip(self.lens, pieces, strict=True)]
        return list(logits)


def ancestors(parents: list[int] | None, node: int) -> list[int]:
    """The path from the root to the node, itself included."""
    if parents is None:
        return list(range(node + 1))
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path[::-1]
