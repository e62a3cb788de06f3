"""Knows the rows whose answers follow a grammar. Gives the masks of their nodes as one tensor.

The only part of a step that needs the host between draft and target pass, and it is run only while such a row is in the
batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from pilotfish_engine.errors import RequestError
from pilotfish_engine.types import GrammarMatcher


@dataclass(frozen=True)
class TreeNodes:
    """The nodes of B trees, [B, W] each, of which `real` exist: token_ids, parents (node numbers), and `flat`, each
    one's place among the N of a pass."""

    token_ids: torch.Tensor
    parents: torch.Tensor
    real: torch.Tensor
    flat: torch.Tensor
    size: int  # N


class GrammarRows:
    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._words = -(-vocab_size // 32)
        self._device = device
        self._matchers: dict[int, GrammarMatcher] = {}
        self._broken: dict[int, str] = {}  # why a row's matcher is not asked again

    def admit(self, row: int, matcher: GrammarMatcher) -> None:
        self._matchers[row] = matcher
        self._broken.pop(row, None)

    def release(self, row: int) -> None:
        self._matchers.pop(row, None)
        self._broken.pop(row, None)

    def allowed(self, host_rows: Sequence[int], nodes: TreeNodes | None = None) -> torch.Tensor | None:
        """int32 [N, ⌈V / 32⌉], a bit for each token that may follow a place; None when no row has a grammar. Without
        `nodes`, place i is the last known token of host_rows[i]."""
        members = [(at, self._matchers[row]) for at, row in enumerate(host_rows) if row in self._matchers]
        if not members:
            return None
        words = torch.full((len(host_rows) if nodes is None else nodes.size, self._words), -1, dtype=torch.int32)
        for (at, matcher), (token_ids, parents, places) in zip(members, _copied(members, nodes), strict=True):
            masks: Sequence[bytes | None] = ()
            with self._blaming(host_rows[at]):
                masks = matcher.masks(token_ids, parents)
            for place, mask in zip(places, masks, strict=False):
                if mask is not None:
                    words[place] = torch.frombuffer(bytearray(mask), dtype=torch.int32)[: self._words]
        return words.to(self._device)

    def advance(self, host_rows: Sequence[int], committed: Sequence[Sequence[int]]) -> dict[int, RequestError]:
        """The tokens that a step committed to each row, where there were some. Returns why rows cannot go on, by their
        place in the batch."""
        errors: dict[int, RequestError] = {}
        for at, (row, token_ids) in enumerate(zip(host_rows, committed, strict=True)):
            matcher = self._matchers.get(row)
            if matcher is None:
                continue
            if row not in self._broken and min(token_ids, default=0) >= 0:
                with self._blaming(row):
                    matcher.advance(token_ids)
            if (reason := self._broken.get(row) or matcher.error) is not None:
                errors[at] = RequestError(f"the grammar cannot be followed further: {reason}", "grammar")
        return errors

    @contextmanager
    def _blaming(self, row: int) -> Iterator[None]:
        """What a matcher throws, a panic of the library's included, is its own request's."""
        try:
            yield
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            self._broken[row] = f"{type(error).__name__}: {error}"


def _copied(
    members: Sequence[tuple[int, GrammarMatcher]], nodes: TreeNodes | None
) -> list[tuple[list[int], list[int], list[int]]]:
    """Token ids, parents and places of each member's nodes, on the host."""
    if nodes is None:
        return [([0], [0], [at]) for at, _ in members]
    which = torch.tensor([at for at, _ in members], dtype=torch.int64).to(nodes.flat.device)
    fields = (nodes.token_ids, nodes.parents, nodes.flat, nodes.real)
    copied = torch.stack([field[which].to(torch.int64) for field in fields], dim=1).tolist()
    return [
        (token_ids[: sum(real)], parents[: sum(real)], places[: sum(real)])
        for token_ids, parents, places, real in copied
    ]
