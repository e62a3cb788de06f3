"""The engine's budget, one for the whole batch, beside the same total split evenly: 16 mixed requests at once.

Only steps in which all 16 run are counted.
"""

from __future__ import annotations

from benchmarks.acceptance.counting import Counts, describe
from benchmarks.acceptance.section import Row, Run, Table, working
from pilotfish_engine.contract.speculation import Settings

REQUESTS = 16
MOST_PROMPTS = 4 * REQUESTS
SETTINGS = [
    Settings(num_steps=8, topk=1, num_draft_tokens=4),
    Settings(num_steps=5, topk=4, num_draft_tokens=4),
    Settings(num_steps=5, topk=4, num_draft_tokens=8),
    Settings(num_steps=5, topk=4, num_draft_tokens=16),
]


def run(given: Run) -> list[Row]:
    print(f"tokens a step of a request, {REQUESTS} mixed requests; in brackets what the draft's scores promise")
    table = Table({"": -8, "T": 3, "settings": -26, "nodes": 5, "even": 20, "global": 20, "global/even": 11})
    rows: list[Row] = []
    prompts = given.prompts[:MOST_PROMPTS]
    for method, engine in given.engines.counted(given.engines.drafting):
        for temperature in given.temperatures:
            for settings in SETTINGS:
                counts = {"even": Counts(), "global": Counts()}
                for budget, count in counts.items():
                    working(f"{method}, {describe(settings)}, {budget}, temperature {temperature:g}")
                    for step in engine.follow(
                        prompts, settings, given.tokens, temperature, budget == "even", at_once=REQUESTS
                    ):
                        if len(step.kinds) == REQUESTS:
                            count.add(step)
                    rows.append(
                        {"method": method, "temperature": temperature, "settings": describe(settings)}
                        | {"budget": settings.num_draft_tokens, "topk": settings.topk, "split": budget}
                        | count.figures(settings.num_steps)
                    )
                table.row(
                    method,
                    f"{temperature:g}",
                    describe(settings),
                    settings.num_draft_tokens,
                    *(f"{c.plus_minus} ({c.expected / max(1, c.steps):.2f})" for c in counts.values()),
                    f"{counts['global'].accept_length / max(1e-9, counts['even'].accept_length):.3f}",
                )
    return rows
