"""Measures decode tokens/s of answers that follow a JSON schema, beside free ones. One request runs at a time, without
drafts and with.

A grammar's masks are made on the host, for every node of a tree, while the device waits. What they cost is the
difference in milliseconds a step; in tokens/s the answers differ too.
"""

from __future__ import annotations

import json
from itertools import product

from benchmarks.acceptance.section import Row, Run, Table, working
from benchmarks.acceptance.speed import SETTINGS, engine
from pilotfish_engine.messages import Grammar

PROMPTS = 6
SHORT = {"type": "string", "maxLength": 300}
SCHEMA = {
    "type": "object",
    "properties": {"answer": SHORT, "reason": SHORT, "score": {"type": "integer"}},
    "required": ["answer", "reason", "score"],
    "additionalProperties": False,
}
ANSWERS = {"free": None, "JSON": Grammar("json_schema", json.dumps(SCHEMA))}


def run(given: Run) -> list[Row]:
    drafting = engine(given, given.engines.drafting, 1)
    prompts = given.prompts[:PROMPTS]
    print(f"decode tokens/s of one request at a time, {given.engines.drafting}")
    table = Table({"answers": 7, "settings": -8, "tokens/s": 8, "ms a step": 9, "tokens a step": 13})
    rows: list[Row] = []
    for (answers, grammar), name in product(ANSWERS.items(), ("disabled", "chain", "tree")):
        working(f"{answers}, {name}")
        drafting.alone(SETTINGS[name], prompts[:2], grammar)  # its steps are recorded
        timed = drafting.alone(SETTINGS[name], prompts, grammar)
        step_ms, tokens = 1e3 * timed.seconds / timed.steps, timed.emitted / timed.steps
        table.row(answers, name, f"{timed.rate:.0f}", f"{step_ms:.2f}", f"{tokens:.2f}")
        rows.append(
            {"answers": answers, "settings": name, "method": given.engines.drafting}
            | {"tokens_per_second": timed.rate, "step_ms": step_ms, "tokens_a_step": tokens}
        )
    return rows
