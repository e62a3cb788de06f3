"""Trees beside chains that verify as many tokens, each request alone.

A chain has at most 8 steps (the contract's bound), so of 16 nodes it can use 9.
"""

from __future__ import annotations

from benchmarks.acceptance.counting import Counts, describe
from benchmarks.acceptance.section import Row, Run, Table, working
from pilotfish_engine.contract.speculation import MAX_NUM_STEPS, Settings

NODES = (5, 8, 16)  # roots included
DEPTH = 5  # of a tree at most
TOPK = (1, 2, 4)


def settings_of(nodes: int, topk: int) -> Settings:
    depth = min(nodes - 1, MAX_NUM_STEPS if topk == 1 else DEPTH)
    return Settings(num_steps=depth, topk=topk, num_draft_tokens=nodes)


def run(given: Run) -> list[Row]:
    print("tokens a step at the same number of verified tokens, roots included; all prompts")
    columns = {"chain": 21, "tree, topk 2": 21, "tree, topk 4": 21, "best tree/chain": 15}
    table = Table({"": -8, "T": 3, "nodes": 5, **columns})
    rows: list[Row] = []
    for method, engine in given.engines.counted(given.engines.drafting):
        for temperature in given.temperatures:
            for nodes in NODES:
                cells, lengths = [], []
                for topk in TOPK:
                    settings = settings_of(nodes, topk)
                    working(f"{method}, {describe(settings)}, temperature {temperature:g}")
                    counts = Counts()
                    for step in engine.follow(given.prompts, settings, given.tokens, temperature):
                        counts.add(step)
                    cells.append(f"{counts.plus_minus} (depth {settings.num_steps})")
                    lengths.append(counts.accept_length)
                    rows.append(
                        {"method": method, "temperature": temperature, "budget": nodes, "topk": topk}
                        | {"settings": describe(settings)}
                        | counts.figures(settings.num_steps)
                    )
                table.row(method, f"{temperature:g}", nodes, *cells, f"{max(lengths[1:]) / lengths[0]:.3f}")
    return rows
