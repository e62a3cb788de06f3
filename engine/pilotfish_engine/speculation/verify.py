"""The verdict over a draft tree: which nodes the target would have produced itself.

The target's own token after every node is drawn first (argmax, or a draw keyed by seed and position), and the walk from
the root follows the child that equals it. With drafts that are picked, not sampled, this accepts with the highest
probability that any exact rule can (the sum of the target's probabilities of the children; SpecInfer, theorem 4.2), the
distribution is the target's by construction, and a seeded request gives the tokens of plain decoding, one by one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pilotfish_engine.distributed.collectives import Ranks
from pilotfish_engine.speculation.tree import DraftTree


@dataclass(frozen=True)
class Verdict:
    """D = the most tokens that a step can commit: num_steps + 1, or fewer where there are fewer nodes.

    next_token_ids: int64 [B, D], the first accept_lens[i] committed, the rest 0. accept_lens: int64 [B], ≥ 1, bonus
    included. path: int64 [B, D]; path[i, d] is the accepted node of depth d, for d < accept_lens[i], else 0.
    flat: int64 [B, D], the places of these nodes in the pass.
    """

    next_token_ids: torch.Tensor
    accept_lens: torch.Tensor
    path: torch.Tensor
    flat: torch.Tensor

    def broadcast(self, ranks: Ranks) -> Verdict:
        """Rank 0's, on every rank, in one call."""
        length = self.path.shape[1]
        packed = torch.cat([self.next_token_ids, self.path, self.flat, self.accept_lens.unsqueeze(1)], dim=1)
        sent = ranks.broadcast(packed)
        next_token_ids, path, flat, accept_lens = torch.split(sent, [length, length, length, 1], dim=1)
        return Verdict(next_token_ids, accept_lens.squeeze(1), path, flat)


def verify(tree: DraftTree, target_ids: torch.Tensor, num_steps: int) -> Verdict:
    """target_ids: int64 [B, W], the target's token after each node. num_steps bounds the tree's depth."""
    batch, nodes = tree.token_ids.shape
    if nodes == 1:  # nothing was drafted
        none = torch.zeros_like(target_ids)
        return Verdict(target_ids, torch.ones_like(target_ids[:, 0]), none, tree.flat)
    length = min(nodes, num_steps + 1)
    number = torch.arange(nodes, device=target_ids.device).expand(batch, nodes)
    agrees = (tree.token_ids == target_ids.gather(1, tree.parents)) & tree.real
    # as bits: a node is accepted where it and all above it but the root agree. Siblings differ, so at each depth one
    # node is accepted at most; of twins any serves
    agreeing = (agrees.to(torch.int64) << number).sum(dim=1, keepdim=True) & ~1
    # the root's bit is turned, so that a node too deep for its ancestors to have been found is not accepted
    accepted = (((tree.ancestors ^ 1) & ~agreeing) == 0) & (tree.depth <= num_steps)
    accept_lens = torch.where(accepted, tree.depth, 0).amax(dim=1) + 1
    # one spare column takes what was not accepted
    path = torch.zeros(batch, length + 1, dtype=torch.int64, device=target_ids.device)
    path.scatter_(1, torch.where(accepted, tree.depth, length), number)
    path = path[:, :length]
    at = torch.arange(length, device=target_ids.device)
    path = torch.where(at < accept_lens.unsqueeze(1), path, 0)
    # the target agrees with every accepted node, so its tokens along the path are those, and then the bonus token
    next_token_ids = torch.where(at < accept_lens.unsqueeze(1), target_ids.gather(1, path), 0)
    return Verdict(next_token_ids, accept_lens, path, tree.flat.gather(1, path))
