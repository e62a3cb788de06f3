"""The verdict over a draft tree: which nodes the target would have produced itself.

The target's own token after every node is drawn first (argmax, or a draw keyed by seed and position), and the walk from
the root follows the child that equals it. With drafts that are picked, not sampled, this accepts with the highest
probability that any exact rule can (the sum of the target's probabilities of the children; SpecInfer, theorem 4.2), the
distribution is the target's by construction, and a seeded request gives the tokens of plain decoding, one by one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pilotfish_engine.speculation.tree import DraftTree


@dataclass(frozen=True)
class Verdict:
    """next_token_ids: int64 [B, m], the first accept_lens[i] committed, the rest 0. accept_lens: int64 [B], ≥ 1, bonus
    included. path: int64 [B, m]; path[i, d] is the accepted node of depth d, for d < accept_lens[i], else 0."""

    next_token_ids: torch.Tensor
    accept_lens: torch.Tensor
    path: torch.Tensor


def verify(tree: DraftTree, target_ids: torch.Tensor, num_steps: int) -> Verdict:
    """target_ids: int64 [B, m], the target's token after each node. num_steps bounds the tree's depth."""
    batch, nodes = tree.token_ids.shape
    number = torch.arange(nodes, device=target_ids.device).expand(batch, nodes)
    agrees = (tree.token_ids == target_ids.gather(1, tree.parents)) & tree.real
    accepted = number == 0
    for _ in range(num_steps):  # siblings differ, so at each depth at most one node is accepted
        accepted = (number == 0) | (agrees & accepted.gather(1, tree.parents))
    accept_lens = accepted.sum(dim=1)
    last = torch.where(accepted, number, 0).amax(dim=1, keepdim=True)
    # one spare column takes what was not accepted
    path = torch.zeros(batch, nodes + 1, dtype=torch.int64, device=target_ids.device)
    path.scatter_(1, torch.where(accepted, tree.depth, nodes), number)
    path = path[:, :nodes]
    following = torch.cat([tree.token_ids.gather(1, path)[:, 1:], torch.zeros_like(last)], dim=1)
    following = torch.where(number < accept_lens.unsqueeze(1) - 1, following, 0)
    next_token_ids = following.scatter(1, accept_lens.unsqueeze(1) - 1, target_ids.gather(1, last))
    path = torch.where(number < accept_lens.unsqueeze(1), path, 0)
    return Verdict(next_token_ids, accept_lens, path)
