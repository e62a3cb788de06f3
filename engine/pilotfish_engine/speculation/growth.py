"""Grows a draft tree a depth at a time (EAGLE-2, section 4.1). It serves every draft model that runs token after token.

Of each depth the best `topk` nodes are run, and each offers `topk` children. B requests, k = topk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from pilotfish_engine.batch.rows import Rows
from pilotfish_engine.batch.state import RequestState
from pilotfish_engine.kernels.inputs import AttentionInputs
from pilotfish_engine.model.inputs import ForwardInputs
from pilotfish_engine.speculation.tree import Candidates


@dataclass(frozen=True)
class Frontier:
    """The k nodes of `depth` ≥ 1 that are run now, [B, k] each: token_ids; came_from, which of the depth before each
    hangs from (0 … k−1; 0 at depth 1); ancestors, int64 bit masks over the draft's rows past the known ones, where node
    n of depth d has row (d − 1) · k + n.
    """

    depth: int
    token_ids: torch.Tensor
    came_from: torch.Tensor
    ancestors: torch.Tensor


class Places:
    """Where the nodes of `depths` frontiers stand, of all depths at once: their rows in the draft's pool begin at
    `first`, int64 [B], where depth 1 has its positions."""

    def __init__(self, state: RequestState, rows: Rows, first: torch.Tensor, depths: int, k: int) -> None:
        depth = torch.arange(depths, device=rows.device).unsqueeze(1)
        self._positions = (first.repeat_interleave(k, output_size=first.shape[0] * k) + depth).unbind()
        at = first.unsqueeze(1) + torch.arange(depths * k, device=rows.device)
        by_depth = state.slots(rows.index, at).view(first.shape[0], depths, k).transpose(0, 1)
        self._slots = by_depth.flatten(1).contiguous().unbind()
        self._page_table = state.page_table[rows.index]
        self._prefix_lens = first.to(torch.int32)
        self._q_indptr = torch.arange(0, (first.shape[0] + 1) * k, k, dtype=torch.int32, device=rows.device)

    def inputs(self, frontier: Frontier) -> ForwardInputs:
        """The pass over these nodes."""
        return ForwardInputs(
            token_ids=frontier.token_ids.flatten(),
            positions=self._positions[frontier.depth - 1],
            slots=self._slots[frontier.depth - 1],
            attention=AttentionInputs(
                page_table=self._page_table,
                prefix_lens=self._prefix_lens,
                q_indptr=self._q_indptr,
                tree_mask=frontier.ancestors.flatten(),
            ),
        )


def rows_needed(num_steps: int, topk: int) -> int:
    """Rows past `first` that growing writes: the nodes of the last depth are never run."""
    return (num_steps - 1) * topk


def grow(
    first_ids: torch.Tensor,
    first_scores: torch.Tensor,
    num_steps: int,
    run: Callable[[Frontier], tuple[torch.Tensor, torch.Tensor]],
) -> Candidates:
    """first_ids int64, first_scores float32 [B, k]: the children of the root, as log-probabilities. `run` gives the
    best k children of each node of a frontier, the same two as [B, k, k]."""
    batch, k = first_ids.shape
    device = first_ids.device
    token_ids, scores = first_ids, first_scores
    all_ids, all_scores, all_parents = [token_ids], [scores], [torch.full_like(token_ids, -1)]
    own = torch.ones(k, dtype=torch.int64, device=device) << torch.arange(k, device=device)
    frontier = Frontier(1, token_ids, torch.zeros_like(token_ids), own.repeat(batch, 1))
    numbers = torch.arange(k, device=device).expand(batch, k)  # candidate number of each frontier node
    from_node = torch.arange(k, device=device).repeat_interleave(k, output_size=k * k).expand(batch, k * k)
    for depth in range(1, num_steps):
        offered_ids, offered = run(frontier)
        path_scores = (scores.unsqueeze(2) + offered).flatten(1)  # [B, k * k]
        ids = offered_ids.flatten(1)
        all_ids.append(ids)
        all_scores.append(path_scores)
        all_parents.append(numbers.gather(1, from_node))
        # of a chain the one that is offered
        scores, best = path_scores.topk(k, dim=1) if k > 1 else (path_scores, torch.zeros_like(ids))
        came_from = from_node.gather(1, best)
        numbers = k + (depth - 1) * k * k + best
        ancestors = frontier.ancestors.gather(1, came_from) | (own << (depth * k))
        frontier = Frontier(depth + 1, ids.gather(1, best), came_from, ancestors)
    return Candidates(torch.cat(all_ids, 1), torch.cat(all_parents, 1), torch.cat(all_scores, 1))
