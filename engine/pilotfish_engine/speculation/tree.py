"""Draft trees as tensors of fixed shape: candidates are cut to the nodes that one target pass verifies.

B requests, C candidates and m = num_draft_tokens nodes a request, node 0 being the root (the last committed token).
Within a request parents come before their children. Knows nothing about models or how candidates were found.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

ROOT = 0
ABSENT = float("-inf")  # score of a candidate that is only padding


@dataclass(frozen=True)
class Candidates:
    """What a proposer offers. token_ids, parents: int64 [B, C]; parents are candidate numbers, −1 for the root.
    scores: float32 [B, C], log of the product of draft probabilities along the path; ABSENT marks padding.

    A candidate stands behind its parent and never scores above it; siblings have different tokens.
    """

    token_ids: torch.Tensor
    parents: torch.Tensor
    scores: torch.Tensor


@dataclass(frozen=True)
class DraftTree:
    """The nodes of one target pass, [B, m] each. depth: distance from the root. parents: node numbers, the root its
    own.

    ancestors: int64 bit masks over node numbers, own bit included (hence m ≤ 64). real: False for padding nodes, which
    take part in the pass and can never be accepted.
    """

    token_ids: torch.Tensor
    parents: torch.Tensor
    depth: torch.Tensor
    ancestors: torch.Tensor
    real: torch.Tensor


def root_only(root_ids: torch.Tensor) -> DraftTree:
    """Plain decoding's tree. root_ids: int64 [B]."""
    tokens = root_ids.unsqueeze(1)
    zero = torch.zeros_like(tokens)
    return DraftTree(tokens, zero, zero, torch.ones_like(tokens), torch.ones_like(tokens, dtype=torch.bool))


def cut(root_ids: torch.Tensor, candidates: Candidates, num_draft_tokens: int, num_steps: int) -> DraftTree:
    """The tree of the best `num_draft_tokens` − 1 candidates by path score under each root (EAGLE-2, section 4.2).

    A parent never scores below its child and stands before it, and the sort is stable: so the cut is always a tree.
    num_steps bounds the depth.
    """
    batch, count = candidates.token_ids.shape
    kept = num_draft_tokens - 1
    device = root_ids.device
    if kept >= count:
        chosen = torch.arange(count, device=device).expand(batch, count)
    else:
        order = torch.sort(candidates.scores, dim=1, descending=True, stable=True).indices
        chosen = order[:, :kept].sort(dim=1).values  # candidate order again: parents before children
    width = chosen.shape[1]
    # node number of each candidate; entry 0 stands for the root, so that parent −1 finds it
    numbers = torch.zeros(batch, count + 1, dtype=torch.int64, device=device)
    numbers.scatter_(1, chosen + 1, torch.arange(1, width + 1, device=device).expand(batch, width))
    parents = numbers.gather(1, candidates.parents.gather(1, chosen) + 1)
    real = candidates.scores.gather(1, chosen) > ABSENT
    return _assemble(root_ids, candidates.token_ids.gather(1, chosen), parents, real, num_steps)


def _assemble(
    root_ids: torch.Tensor, token_ids: torch.Tensor, parents: torch.Tensor, real: torch.Tensor, num_steps: int
) -> DraftTree:
    root = torch.zeros_like(root_ids).unsqueeze(1)
    tokens = torch.cat([root_ids.unsqueeze(1), torch.where(real, token_ids, 0)], dim=1)
    parents = torch.cat([root, torch.where(real, parents, ROOT)], dim=1)
    real = torch.cat([torch.ones_like(root, dtype=torch.bool), real], dim=1)
    nodes = tokens.shape[1]
    own = torch.ones(nodes, dtype=torch.int64, device=tokens.device) << torch.arange(nodes, device=tokens.device)
    own = own.expand_as(tokens)
    ancestors = own
    depth = torch.zeros_like(tokens)
    below_root = (torch.arange(nodes, device=tokens.device) > ROOT).to(torch.int64)
    for _ in range(num_steps):  # after d rounds right for every node of depth ≤ d
        ancestors = own | ancestors.gather(1, parents)
        depth = (depth.gather(1, parents) + 1) * below_root
    return DraftTree(tokens, parents, depth, ancestors, real)
