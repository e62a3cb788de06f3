"""Log-probabilities of chosen tokens and of the likeliest ones: the model's own, before any processor or filter.

So they equal those of scoring the finished text by prefill, whatever the request's parameters.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pilotfish_engine.messages import MAX_LOGPROBS


@dataclass(frozen=True)
class Logprobs:
    """Of M places: chosen float32 [M]; top_ids int32 and top float32 [M, min(20, V)], best first."""

    chosen: torch.Tensor
    top_ids: torch.Tensor
    top: torch.Tensor


def score(logits: torch.Tensor, token_ids: torch.Tensor) -> Logprobs:
    """logits: float32 [M, V], as the model gave them; token_ids: int64 [M]. Natural logarithms."""
    scores = torch.log_softmax(logits, dim=1)
    top, top_ids = scores.topk(min(MAX_LOGPROBS, scores.shape[1]), dim=1)
    return Logprobs(scores.gather(1, token_ids.unsqueeze(1)).squeeze(1), top_ids.to(torch.int32), top)
