"""Draft trees as tensors of fixed shape: a batch's candidates are cut to the nodes that one target pass verifies.

B requests, C candidates a request, W nodes a request at most, N tokens in the pass. Node 0 of a request is its root
(the last committed token), and parents come before their children. Knows nothing about models or how candidates were
found.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from pilotfish_engine.contract.speculation import MAX_NUM_DRAFT_TOKENS, Settings
from pilotfish_engine.distributed.collectives import Ranks
from pilotfish_engine.sampling.grammar_rows import TreeNodes

ROOT = 0
ABSENT = float("-inf")  # score of a candidate that is only padding


@dataclass(frozen=True)
class Candidates:
    """What a proposer offers. token_ids, parents: int64 [B, C]; parents are candidate numbers, −1 for the root.
    scores: float32 [B, C], log of the product of draft probabilities along the path; ABSENT marks padding.

    A candidate stands behind its parent and never scores above it; siblings have different tokens. Where this is broken
    another tree is verified, and the answer is the same. C is `most_candidates` at most.
    """

    token_ids: torch.Tensor
    parents: torch.Tensor
    scores: torch.Tensor

    def as_chain(self) -> Candidates:
        """Each candidate behind the one before it, and no surer: what topk 1 means, where no KV row is moved."""
        count = self.token_ids.shape[1]
        parents = torch.arange(-1, count - 1, device=self.token_ids.device).expand_as(self.token_ids)
        return Candidates(self.token_ids, parents, self.scores.cummin(dim=1).values)

    def only(self, wanted: torch.Tensor) -> Candidates:
        """wanted: bool [B]; of other requests nothing is offered, so that the batch's budget is for these."""
        return replace(self, scores=torch.where(wanted.unsqueeze(1), self.scores, ABSENT))

    def broadcast(self, ranks: Ranks) -> Candidates:
        """Rank 0's, on every rank, in one call."""
        bits = self.scores.contiguous().view(torch.int32).to(torch.int64)
        token_ids, parents, bits = ranks.broadcast(torch.stack([self.token_ids, self.parents, bits])).unbind()
        return Candidates(token_ids, parents, bits.to(torch.int32).view(torch.float32))


@dataclass(frozen=True)
class DraftTree:
    """The nodes that one target pass verifies.

    By request, [B, W] each: token_ids, parents (node numbers, the root its own), depth (distance from the root),
    ancestors (int64 bit masks over node numbers, own bit included: hence W ≤ 64), real (False: no such node), and
    `flat`, the node's place in the pass (of the root where it is not real).
    By place in the pass, [N] each: request, node, used (False: padding at the end of the pass). Request b owns the
    places indptr[b] … indptr[b + 1] − 1 (int32 [B + 1]), in the order of its nodes.
    """

    token_ids: torch.Tensor
    parents: torch.Tensor
    depth: torch.Tensor
    ancestors: torch.Tensor
    real: torch.Tensor
    flat: torch.Tensor
    request: torch.Tensor
    node: torch.Tensor
    used: torch.Tensor
    indptr: torch.Tensor

    @property
    def nodes(self) -> TreeNodes | None:
        """What a grammar reads of it; None where nothing was drafted."""
        if self.token_ids.shape[1] == 1:
            return None
        return TreeNodes(self.token_ids, self.parents, self.real, self.flat, self.request.shape[0])

    def packed(self, values: torch.Tensor, padding: int = 0) -> torch.Tensor:
        """[B, W] → [N]: the values of the nodes by their place in the pass."""
        return torch.where(self.used, values[self.request, self.node], padding)


def most_candidates(settings: Settings) -> int:
    """C at most: of each depth `topk` nodes go on, with `topk` children each."""
    return settings.topk + (settings.num_steps - 1) * settings.topk**2


def most_nodes(settings: Settings, batch: int) -> int:
    """W of a step of `batch` requests: how many nodes one of them may get."""
    return min(MAX_NUM_DRAFT_TOKENS, 1 + most_candidates(settings), 1 + batch * (settings.num_draft_tokens - 1))


def root_only(root_ids: torch.Tensor) -> DraftTree:
    """Plain decoding's tree. root_ids: int64 [B]."""
    tokens = root_ids.unsqueeze(1)
    zero, true = torch.zeros_like(tokens), torch.ones_like(tokens, dtype=torch.bool)
    places = torch.arange(root_ids.shape[0] + 1, device=root_ids.device)
    return DraftTree(
        token_ids=tokens,
        parents=zero,
        depth=zero,
        ancestors=torch.ones_like(tokens),
        real=true,
        flat=places[:-1].unsqueeze(1),
        request=places[:-1],
        node=zero[:, 0],
        used=true[:, 0],
        indptr=places.to(torch.int32),
    )


def cut(root_ids: torch.Tensor, candidates: Candidates, num_draft_tokens: int, num_steps: int) -> DraftTree:
    """The best candidates of the whole batch by path score: `num_draft_tokens` nodes a request on average, roots
    included, 64 at most (EAGLE-2, section 4.2, over all requests together). num_steps bounds the depth.

    A sure draft gets a deep tree, a guess only its root. A parent never scores below its child and ties go to the lower
    candidate number: so what is cut is always a tree.
    """
    batch, count = candidates.token_ids.shape
    tokens = batch * min(num_draft_tokens, 1 + count)
    nodes = min(MAX_NUM_DRAFT_TOKENS, 1 + count, 1 + tokens - batch)
    kept = candidates.scores > ABSENT
    if tokens - batch < batch * count:
        kept = _best(candidates.scores, tokens - batch, nodes - 1)
    return _assemble(root_ids, candidates, kept, nodes, tokens, num_steps)


def _best(scores: torch.Tensor, total: int, each: int) -> torch.Tensor:
    """bool [B, C]: the `total` highest scores of all, absent ones apart, of which a request has `each` at most."""
    batch, count = scores.shape
    if each < min(count, total):
        order = scores.sort(dim=1, descending=True, stable=True).indices
        rank = torch.empty_like(order).scatter_(1, order, torch.arange(count, device=scores.device).expand_as(order))
        scores = torch.where(rank < each, scores, ABSENT)
    order = scores.t().flatten().sort(descending=True, stable=True).indices
    best = torch.zeros(batch * count, dtype=torch.bool, device=scores.device)
    best.scatter_(0, order[:total], torch.ones_like(best[:total]))
    return best.view(count, batch).t() & (scores > ABSENT)


def _assemble(
    root_ids: torch.Tensor, candidates: Candidates, kept: torch.Tensor, nodes: int, tokens: int, num_steps: int
) -> DraftTree:
    batch, device = root_ids.shape[0], root_ids.device
    root = torch.zeros_like(root_ids).unsqueeze(1)
    number = torch.cat([root, kept.cumsum(dim=1)], dim=1)  # of each kept candidate; entry 0 stands for parent −1
    column = torch.where(kept, number[:, 1:], nodes)  # a spare column takes what is not kept

    def place(first: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        placed = torch.zeros(batch, nodes + 1, dtype=torch.int64, device=device)
        placed.scatter_(1, column, values)
        placed[:, 0] = first
        return placed[:, :nodes]

    token_ids = place(root_ids, candidates.token_ids)
    parents = place(root[:, 0], number.gather(1, candidates.parents + 1))
    counts = number[:, -1] + 1
    at = torch.arange(nodes, device=device)
    own = (torch.ones_like(at) << at).expand(batch, nodes)
    ancestors, above = own, parents
    for _ in range(num_steps.bit_length()):  # twice as many each round, until the root is among them
        ancestors = ancestors | ancestors.gather(1, above)
        above = above.gather(1, above)
    depth = ((ancestors.unsqueeze(2) >> at) & 1).sum(dim=2) - 1
    ends = counts.cumsum(dim=0)
    real = at < counts.unsqueeze(1)
    places = torch.arange(tokens, device=device)
    request = torch.searchsorted(ends, places, right=True).clamp(max=batch - 1)
    starts = ends - counts
    return DraftTree(
        token_ids=token_ids,
        parents=parents,
        depth=depth,
        ancestors=ancestors,
        real=real,
        flat=starts.unsqueeze(1) + torch.where(real, at, ROOT),
        request=request,
        node=(places - starts[request]).clamp(max=nodes - 1),
        used=places < ends[-1],
        indptr=torch.cat([root[0], ends]).to(torch.int32),
    )
