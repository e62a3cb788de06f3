"""The engine's budget, one for the whole batch, beside the same total split evenly: 16 mixed requests at once.

Steps verify every candidate (of a tree's 68 the best 63), so that it is known which the target accepts; then the
engine's cut is asked what it would have kept under either budget. So both are compared step by step, over the same
tokens. Only steps in which all 16 run are counted.
"""

from __future__ import annotations

from itertools import cycle, islice
from statistics import fmean, stdev

import torch
from torch import Tensor

from benchmarks.acceptance.counting import Drafted, own_best
from benchmarks.acceptance.section import Row, Run, Table, working
from pilotfish_engine.contract.speculation import Settings
from pilotfish_engine.speculation.tree import ABSENT, Candidates, cut

REQUESTS = 16
LEAST_PROMPTS, MOST_PROMPTS = 2 * REQUESTS, 4 * REQUESTS  # the last ones to come run with fewer beside them
# what is verified, and the budgets that are then asked for: nodes a request, roots included
SHAPES = {
    "chain": (Settings(num_steps=8, topk=1, num_draft_tokens=9), (3, 5)),
    "tree": (Settings(num_steps=5, topk=4, num_draft_tokens=64), (4, 8, 16)),
}


def kept(drafted: Drafted, nodes: int, evenly: bool) -> tuple[Tensor, Tensor]:
    """Of each request of a step that verified all there was, [B] each: how many tokens it would have committed with a
    budget of `nodes` nodes a request, and how many the draft's scores promise."""
    numbers = torch.arange(drafted.real.shape[1]).expand_as(drafted.real)
    scores = torch.where(drafted.real, drafted.chance.log(), ABSENT)
    offered = Candidates(numbers, torch.full_like(numbers, -1), scores)  # what is kept goes by scores, not by parents
    if evenly:
        offered = own_best(offered, nodes - 1)
    tree = cut(torch.zeros_like(numbers[:, 0]), offered, nodes, num_steps=1)
    places, real = tree.token_ids[:, 1:], tree.real[:, 1:]
    accepted = drafted.accepted.gather(1, places) & real
    promised = torch.where(real, drafted.chance.gather(1, places), 0.0)
    return 1 + accepted.sum(dim=1), 1 + promised.sum(dim=1)


def run(given: Run) -> list[Row]:
    print(f"tokens a step of a request, {REQUESTS} mixed requests; in brackets what the draft's scores promise")
    table = Table(
        {"": -8, "T": 3, "shape": -6, "nodes": 5, "steps": 5, "even": 12, "global": 12, "gain": 14, "global/even": 11}
    )
    rows: list[Row] = []
    prompts = list(islice(cycle(given.prompts), min(max(LEAST_PROMPTS, len(given.prompts)), MOST_PROMPTS)))
    for method, engine in given.engines.counted(given.engines.drafting):
        for temperature in given.temperatures:
            for shape, (settings, budgets) in SHAPES.items():
                working(f"{method}, {shape}, temperature {temperature:g}")
                steps = [
                    step.drafted
                    for step in engine.follow(prompts, settings, given.tokens, temperature, False, REQUESTS)
                    if len(step.kinds) == REQUESTS
                ]
                for nodes in budgets:
                    row = compared(steps, nodes)
                    rows.append({"method": method, "temperature": temperature, "shape": shape, "budget": nodes} | row)
                    table.row(
                        method,
                        f"{temperature:g}",
                        shape,
                        nodes,
                        len(steps),
                        *(f"{row[split]:.2f} ({row['promised_' + split]:.2f})" for split in ("even", "global")),
                        f"{row['gain']:+.3f} ±{2 * row['error']:.3f}",
                        f"{row['global'] / max(1.0, row['even']):.3f}",
                    )
    return rows


def compared(steps: list[Drafted], nodes: int) -> Row:
    """Means over the steps; error: the standard error of the gain."""
    tokens: dict[str, list[float]] = {"even": [], "global": []}
    promised: dict[str, list[float]] = {"even": [], "global": []}
    for step in steps:
        for split in tokens:
            found, hoped = kept(step, nodes, split == "even")
            tokens[split].append(found.double().mean().item())
            promised[split].append(hoped.double().mean().item())
    gains = [whole - even for whole, even in zip(tokens["global"], tokens["even"], strict=True)]
    return {
        "steps": len(steps),
        **{split: fmean(found or [0.0]) for split, found in tokens.items()},
        **{f"promised_{split}": fmean(found or [0.0]) for split, found in promised.items()},
        "gain": fmean(gains or [0.0]),
        "error": stdev(gains) / len(gains) ** 0.5 if len(gains) > 1 else 0.0,
    }
