"""Keeps the rows whose answers follow a grammar, and makes the masks of their nodes as one tensor.

The only part of a step that needs the host, and only while such a row is in the batch: it reads what was drafted, and
makes the masks while the target's pass runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from pilotfish_engine.errors import RequestError
from pilotfish_engine.sampling.matcher import fill
from pilotfish_engine.types import GrammarMatcher, MaskOfNode


@dataclass(frozen=True)
class TreeNodes:
    """The nodes of B trees, [B, W] each, of which `real` exist: token_ids, parents (node numbers), and `flat`, each
    one's place among the N of a pass."""

    token_ids: torch.Tensor
    parents: torch.Tensor
    real: torch.Tensor
    flat: torch.Tensor
    size: int  # N


@dataclass(frozen=True)
class Asked:
    """By row the masks that are to be made, with their places in a pass of `size` places."""

    wanted: Mapping[int, Sequence[tuple[MaskOfNode, int]]]
    size: int


class GrammarRows:
    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._words = -(-vocab_size // 32)
        self._device = device
        self._masks = torch.empty(0, self._words, dtype=torch.int32)
        self._matchers: dict[int, GrammarMatcher] = {}
        self._broken: dict[int, str] = {}  # why a row's matcher is not asked again

    def admit(self, row: int, matcher: GrammarMatcher) -> None:
        self._matchers[row] = matcher
        self._broken.pop(row, None)

    def release(self, row: int) -> None:
        self._matchers.pop(row, None)
        self._broken.pop(row, None)

    def ask(self, host_rows: Sequence[int], nodes: TreeNodes | None = None) -> Asked | None:
        """Whose masks a pass needs; None when no row has a grammar. Without `nodes`, place i is the last known token of
        host_rows[i]. Waits for the draft's tokens, where there are some, and not for what is launched behind this."""
        members = [(at, self._matchers[row]) for at, row in enumerate(host_rows) if row in self._matchers]
        if not members:
            return None
        wanted = dict[int, list[tuple[MaskOfNode, int]]]()
        for (at, matcher), (token_ids, parents, places) in zip(members, _copied(members, nodes), strict=True):
            with self._blaming(host_rows[at]):
                asked = zip(matcher.ask(token_ids, parents), places, strict=True)
                wanted[host_rows[at]] = [(one, place) for one, place in asked if one is not None]
        return Asked(wanted, len(host_rows) if nodes is None else nodes.size)

    def allowed(self, asked: Asked | None) -> torch.Tensor | None:
        """int32 [N, ⌈V / 32⌉], a bit for each token that may follow a place, on the device; holds until the next call.
        The device may be at work meanwhile."""
        if asked is None:
            return None
        if asked.size > len(self._masks):
            pinned = self._device.type == "cuda"
            self._masks = torch.empty(asked.size, self._words, dtype=torch.int32, pin_memory=pinned)
        masks = self._masks[: asked.size].fill_(-1)
        on_host = masks.numpy().view(np.uint8)
        try:
            fill([one for wanted in asked.wanted.values() for one in wanted], on_host)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # somebody's: each on its own
            for row, wanted in asked.wanted.items():
                with self._blaming(row):
                    fill(wanted, on_host)
        return masks.to(self._device, non_blocking=True)

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
