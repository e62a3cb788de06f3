"""Measures acceptance of every method, by kind of prompt, temperature and settings.

Each request has its own tree, as if it ran alone, so that the figures hold for any batch.
"""

from __future__ import annotations

from itertools import product

from benchmarks.acceptance.asked import KINDS
from benchmarks.acceptance.counting import Counts, describe
from benchmarks.acceptance.engines import CORPUS, HEAD, ITSELF, NGRAM
from benchmarks.acceptance.section import Row, Run, Table, shares, working
from pilotfish_engine.contract.speculation import Settings

CHAIN = Settings(num_steps=4, topk=1, num_draft_tokens=5)
TREE = Settings(num_steps=5, topk=4, num_draft_tokens=16)


def run(given: Run) -> list[Row]:
    print("tokens a step, bonus included; of all: nodes of a step, drafts accepted, steps that accept ≥ 1, 2, … drafts")
    columns = {"": -15, "settings": -26, "T": 3} | dict.fromkeys(KINDS.values(), 9)
    table = Table(columns | {"all": 12, "nodes": 6, "rate": 6, "≥ 1, 2, … drafts": 24})
    rows: list[Row] = []
    for method, engine in given.engines.counted(NGRAM, CORPUS, HEAD, ITSELF):
        for settings, temperature in product((CHAIN, TREE), given.temperatures):
            if method == ITSELF and settings == TREE:
                continue  # a bound of chains: a draft that is always right has no use for siblings
            working(f"{method}, {describe(settings)}, temperature {temperature:g}")
            counts = {kind: Counts() for kind in KINDS} | {"all": Counts()}
            for step in engine.follow(given.prompts, settings, given.tokens, temperature):
                for kind in KINDS:
                    counts[kind].add(step, kind)
                counts["all"].add(step)
            found = {kind: count.figures(settings.num_steps) for kind, count in counts.items()}
            rows += [
                {"method": method, "settings": describe(settings), "temperature": temperature, "kind": kind} | figures
                for kind, figures in found.items()
            ]
            everything = found["all"]
            table.row(
                method,
                describe(settings),
                f"{temperature:g}",
                *(f"{found[kind]['accept_length']:.2f}" for kind in KINDS),
                counts["all"].plus_minus,
                f"{everything['nodes']:.1f}",
                f"{everything['rate']:.0%}",
                shares(everything["accept"]),
            )
    return rows
