"""Keeps the rows whose answers follow a grammar. Makes the masks of their nodes as one tensor.

The only part of a step that needs the host, and only while such a row is in the batch: it reads what was drafted, and
makes the masks while the target's pass runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from pilotfish_engine.errors import RequestError
from pilotfish_engine.model.memory import ToHost, put
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
    """The rows whose masks a pass of `size` places needs, by their place in the batch, and the nodes of their trees on
    the way to the host: int64 [members, 4, W], token ids, parents, places and which are real. None: of each row there
    is but the last known token."""

    rows: Sequence[tuple[int, int]]
    nodes: ToHost | None
    size: int


class GrammarRows:
    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._words = -(-vocab_size // 32)
        self._device = device
        self._masks = torch.empty(0, self._words, dtype=torch.int32)
        self._matchers: dict[int, GrammarMatcher] = {}
        self._broken: dict[int, str] = {}  # why a row's matcher is not asked again
        self.catch_up: Callable[[], None] = lambda: None  # brings what was committed to the matchers

    def admit(self, row: int, matcher: GrammarMatcher) -> None:
        self._matchers[row] = matcher
        self._broken.pop(row, None)

    def release(self, row: int) -> None:
        self._matchers.pop(row, None)
        self._broken.pop(row, None)

    def ask(self, host_rows: Sequence[int], nodes: TreeNodes | None = None) -> Asked | None:
        """Says whose masks a pass needs, and waits for nothing; None when no row has a grammar. Without `nodes`, place
        i is the last known token of host_rows[i]."""
        rows = [(at, row) for at, row in enumerate(host_rows) if row in self._matchers]
        if not rows:
            return None
        if nodes is None:
            return Asked(rows, None, len(host_rows))
        which = put([at for at, _ in rows], torch.int64, nodes.flat.device)
        fields = (nodes.token_ids, nodes.parents, nodes.flat, nodes.real)
        packed = torch.stack([field[which].to(torch.int64) for field in fields], dim=1)
        return Asked(rows, ToHost([packed]), nodes.size)

    def allowed(self, asked: Asked | None) -> torch.Tensor | None:
        """int32 [N, ⌈V / 32⌉], a bit for each token that may follow a place, on the device; holds until the next call.
        Waits for what was drafted and for what was committed before, and not for what was launched since."""
        if asked is None:
            return None
        self.catch_up()
        wanted = self._wanted(asked)
        if asked.size > len(self._masks):
            pinned = self._device.type == "cuda"
            self._masks = torch.empty(asked.size, self._words, dtype=torch.int32, pin_memory=pinned)
        masks = self._masks[: asked.size].fill_(-1)
        on_host = masks.numpy().view(np.uint8)
        try:
            fill([one for of_row in wanted.values() for one in of_row], on_host)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # somebody's: each on its own
            for row, of_row in wanted.items():
                with self._blaming(row):
                    fill(of_row, on_host)
        return masks.to(self._device, non_blocking=True)

    def _wanted(self, asked: Asked) -> dict[int, list[tuple[MaskOfNode, int]]]:
        """By row the masks that are to be made, with their places in the pass."""
        found = dict[int, list[tuple[MaskOfNode, int]]]()
        roots = [([0], [0], [at], [1]) for at, _ in asked.rows]
        trees = roots if asked.nodes is None else asked.nodes.read()[0].tolist()
        for (_, row), (token_ids, parents, places, real) in zip(asked.rows, trees, strict=True):
            matcher, count = self._matchers.get(row), sum(real)
            if matcher is None:
                continue
            with self._blaming(row):
                nodes = zip(matcher.ask(token_ids[:count], parents[:count]), places[:count], strict=True)
                found[row] = [(node, place) for node, place in nodes if node is not None]
        return found

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
