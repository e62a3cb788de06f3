"""Has chains accepted with a probability that is set. A draw on the device decides, so that graphs hold it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch

from pilotfish_engine.speculation import step
from pilotfish_engine.speculation.tree import DraftTree
from pilotfish_engine.speculation.verify import Verdict, verify


class Acceptance:
    """share: of drafts, those that the target is made to agree with. A change holds for graphs that are there."""

    def __init__(self, device: torch.device) -> None:
        self._share = torch.zeros(1, device=device)

    def set(self, share: float) -> None:
        self._share.fill_(share)

    def verify(self, tree: DraftTree, target_ids: torch.Tensor, num_steps: int) -> Verdict:
        if tree.token_ids.shape[1] > 1:
            drafts = tree.token_ids[:, 1:]
            agrees = torch.rand(drafts.shape, device=drafts.device) < self._share
            forced = torch.where(agrees, drafts, (drafts + 1) % 32000)
            target_ids = torch.cat([forced, target_ids[:, -1:]], dim=1)
        return verify(tree, target_ids, num_steps)


@contextmanager
def forced(device: torch.device) -> Iterator[Acceptance]:
    acceptance = Acceptance(device)
    with patch.object(step, "verify", acceptance.verify):
        yield acceptance


def share_for(tokens_a_step: float, num_steps: int) -> float:
    """The share with which a chain commits so many tokens a step, bonus included."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        if sum(middle**depth for depth in range(num_steps + 1)) < tokens_a_step:
            low = middle
        else:
            high = middle
    return high
