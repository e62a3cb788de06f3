"""Mixture of experts: a router, experts of which each token passes a few, and one MLP that all may share.

Tensor code of fixed shape. The N·k pairs of token and expert are sorted by expert and run as two grouped products, so
that every weight of a chosen expert is read once, whatever N is, and no product is wasted (`linear`).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from pilotfish_engine import kernels
from pilotfish_engine.model.layers import GatedMLP
from pilotfish_engine.model.linear import Experts, Linear
from pilotfish_engine.model.shape import RoutingShape


class Router:
    """weight: float32 [E, H]; correction: float32 [E], or None. In float32, as a rounding would change experts."""

    def __init__(self, weight: Tensor, correction: Tensor | None, routing: RoutingShape) -> None:
        self.weight = weight
        self.correction = correction
        self.routing = routing

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [N, H] → the k experts of each token, int64 [N, k], and their weights, float32 [N, k]."""
        routing = self.routing
        logits = functional.linear(x.float(), self.weight)
        scores = logits.sigmoid() if routing.scoring == "sigmoid" else logits.softmax(dim=1)
        choice = scores if self.correction is None else scores + self.correction
        if routing.num_groups > 1:
            choice = self._open_groups(choice)
        experts = choice.topk(routing.top_k, dim=1).indices
        weights = scores.gather(1, experts)
        if routing.normalised:
            weights = weights / (weights.sum(dim=1, keepdim=True) + 1e-20)
        return experts, weights * routing.scaling

    def _open_groups(self, choice: Tensor) -> Tensor:
        """choice [N, E] with -inf outside of each token's best groups."""
        grouped = choice.view(choice.shape[0], self.routing.num_groups, -1)
        best = 2 if self.routing.scoring == "sigmoid" else 1
        groups = grouped.topk(best, dim=2).values.sum(dim=2).topk(self.routing.topk_groups, dim=1).indices
        closed = torch.ones_like(grouped[:, :, 0], dtype=torch.bool).scatter(1, groups, False)
        return grouped.masked_fill(closed.unsqueeze(2), -torch.inf).flatten(1)


class MixtureOfExperts:
    """gate_up: E of [2·F, H], gate first; down: E of [H, F]; shared: the MLP that every token passes; shared_gate: of
    [1, H], whose sigmoid weighs the shared MLP."""

    def __init__(
        self, router: Router, gate_up: Experts, down: Experts, shared: GatedMLP | None, shared_gate: Linear | None
    ) -> None:
        self.router = router
        self.gate_up = gate_up
        self.down = down
        self.shared = shared
        self.shared_gate = shared_gate

    def __call__(self, x: Tensor) -> Tensor:
        routed = self._routed(x)
        if self.shared is None:
            return routed
        shared = self.shared(x)
        if self.shared_gate is not None:
            shared = shared * torch.sigmoid(self.shared_gate(x))
        return routed + shared

    def _routed(self, x: Tensor) -> Tensor:
        experts, weights = self.router(x)
        by_expert, pair = experts.flatten().sort(stable=True)
        token = pair // experts.shape[1]
        numbers = torch.arange(self.down.count, device=x.device)
        ends = torch.searchsorted(by_expert, numbers, right=True).to(torch.int32)
        inner = kernels.silu_and_mul(self.gate_up(x[token], by_expert, ends))
        outputs = torch.empty_like(x[token]).index_copy_(0, pair, self.down(inner, by_expert, ends))
        weighted = outputs.view(*experts.shape, -1).float() * weights.unsqueeze(2)
        return weighted.sum(dim=1).to(x.dtype)
