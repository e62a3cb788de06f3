"""Whether a draft's scores mean what they say: of nodes with path probability p, is a share p accepted?

Of chains of 8, and of trees as they are served: the cut goes by these scores, and so bends none of their shares.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.acceptance.engines import HEAD, NGRAM
from benchmarks.acceptance.section import Row, Run, Table, working
from pilotfish_engine.contract.speculation import Settings

BINS = 10
SHAPES = {
    "chain": Settings(num_steps=8, topk=1, num_draft_tokens=9),
    "tree": Settings(num_steps=5, topk=4, num_draft_tokens=16),
}


@dataclass(frozen=True)
class Bin:
    """Of the nodes in it: how many, the mean probability that the draft gave them, and the share accepted."""

    nodes: int
    predicted: float
    accepted: float


def bins(chance: Tensor, accepted: Tensor, count: int = BINS) -> list[Bin]:
    """chance: [N] in [0, 1]; accepted: bool [N]. `count` bins of equal width, the last one with its upper end; an
    empty one is 0 all over."""
    number = (chance.to(torch.float64) * count).long().clamp(max=count - 1)
    nodes = torch.bincount(number, minlength=count)
    at_least_one = nodes.clamp_min(1)
    predicted = torch.bincount(number, chance.to(torch.float64), minlength=count) / at_least_one
    shares = torch.bincount(number, accepted.to(torch.float64), minlength=count) / at_least_one
    return [Bin(*found) for found in zip(nodes.tolist(), predicted.tolist(), shares.tolist(), strict=True)]


def expected_error(found: list[Bin]) -> float:
    """Expected calibration error (Naeini et al., 2015): mean of |predicted − accepted|, by nodes."""
    return sum(b.nodes * abs(b.predicted - b.accepted) for b in found) / max(1, sum(b.nodes for b in found))


def run(given: Run) -> list[Row]:
    print("path probability of drafts by their own scores, and the share of them that is accepted")
    heads = {f"{low / BINS:.1f}–": 9 for low in range(BINS)}
    table = Table({"": -8, "T": 3, "shape": -6, "nodes": 7, "predicted": 9, "accepted": 8, "ECE": 6, **heads})
    rows: list[Row] = []
    for method, engine in given.engines.counted(HEAD, NGRAM):
        for temperature in given.temperatures:
            for shape, settings in SHAPES.items():
                working(f"{method}, {shape}, temperature {temperature:g}")
                chances, verdicts = [], []
                for step in engine.follow(given.prompts, settings, given.tokens, temperature):
                    chances.append(step.drafted.chance[step.drafted.real])
                    verdicts.append(step.drafted.accepted[step.drafted.real])
                chance, accepted = torch.cat(chances), torch.cat(verdicts)
                found = bins(chance, accepted)
                error = expected_error(found)
                mean, share = chance.mean().item(), accepted.float().mean().item()
                table.row(
                    method,
                    f"{temperature:g}",
                    shape,
                    len(chance),
                    f"{mean:.3f}",
                    f"{share:.3f}",
                    f"{error:.3f}",
                    *(f"{b.predicted:.2f}→{b.accepted:.2f}" if b.nodes else "–" for b in found),
                )
                rows.append(
                    {"method": method, "temperature": temperature, "shape": shape, "nodes": len(chance)}
                    | {"predicted": mean, "accepted": share, "ece": error}
                    | {"bins": [[b.nodes, b.predicted, b.accepted] for b in found]}
                )
    return rows
