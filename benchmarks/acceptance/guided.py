"""Times requests whose answers follow a grammar beside the same ones with free answers.

What a grammar costs is judged at equal work: all requests run together, round by round free and guided in turn, each
for as many tokens, and the figure is the median of the rounds' ratios of milliseconds a step. Tokens a step are printed
beside them, for drafts agree with a grammar more or less often than with a free answer.
"""

from __future__ import annotations

import json
from itertools import cycle, islice, product
from statistics import median

from benchmarks.acceptance.section import Row, Run, Table, working
from benchmarks.acceptance.speed import SETTINGS, Together, engine
from pilotfish_engine.messages import Grammar

LEVELS = (1, 16)
ROUNDS = 5
# answers as long as they have room for, so that a batch stays whole while it is timed
TEXT = {"type": "string", "minLength": 4000}
SCHEMA = {"type": "object", "properties": {"answer": TEXT, "score": {"type": "integer"}}, "required": ["answer"]}
ANSWERS = {
    "schema": Grammar("json_schema", json.dumps({**SCHEMA, "additionalProperties": False})),
    "list": Grammar("json_schema", json.dumps({"type": "array", "minItems": 1500, "items": {"type": "integer"}})),
    "regex": Grammar("regex", "[A-Za-z ,.\n]{4000,}"),
}


def run(given: Run) -> list[Row]:
    levels = given.at_once or LEVELS
    drafting = engine(given, given.engines.drafting, max(levels))
    prompts = list(islice(cycle(given.prompts), max(levels)))
    drafting.scheduler.set_envelope(SETTINGS["disabled"])
    drafting.warm(prompts)
    print(f"decoding with a grammar beside without, {ROUNDS} rounds in turn, {given.engines.drafting}")
    table = Table({"at once": 7, "answers": -7, "settings": -8, "ms a step": 20, "tokens a step": 15, "tokens/s": 22})
    rows: list[Row] = []
    for level, (answers, grammar), name in product(levels, ANSWERS.items(), ("disabled", "chain", "tree")):
        rounds: list[tuple[Together, Together]] = []
        for turn in range(1 + ROUNDS):
            working(f"{level} at once, {answers}, {name}, round {turn}/{ROUNDS}")
            free, guided = (drafting.together(SETTINGS[name], prompts[:level], one) for one in (None, grammar))
            if turn > 0:  # before that steps are recorded
                rounds.append((free, guided))
        cost = [guided.step_ms / free.step_ms for free, guided in rounds]
        rate = [guided.rate / free.rate for free, guided in rounds]
        free_ms, ms = (median(one.step_ms for one in found) for found in zip(*rounds, strict=True))
        free_a_step, a_step = (median(one.a_step for one in found) for found in zip(*rounds, strict=True))
        table.row(
            level,
            answers,
            name,
            f"{free_ms:.2f} → {ms:.2f} ×{median(cost):.3f}",
            f"{free_a_step:.2f} → {a_step:.2f}",
            f"×{median(rate):.3f} ({min(rate):.2f}–{max(rate):.2f})",
        )
        rows.append(
            {"at_once": level, "answers": answers, "settings": name, "method": given.engines.drafting}
            | {"step_ms": ms, "step_ms_to_free": cost, "tokens_a_step": a_step, "tokens_per_second_to_free": rate}
        )
    return rows
