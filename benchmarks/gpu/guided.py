"""What it costs that answers follow a grammar: the same load free and guided, in turn, over a vocabulary of real size.

The model's weights are random, so what it says is any of what the grammar allows; the masks, their way to the device
and the graphs are a served model's. Words come from the source of Python's own library.
"""

from __future__ import annotations

import json
import re
import sysconfig
from collections import Counter
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import median

from benchmarks.gpu import steps
from pilotfish_engine.contract.speculation import EnvelopeUpdate
from pilotfish_engine.engine import Parts
from pilotfish_engine.messages import Grammar
from pilotfish_engine.sampling.grammar import Grammars

ROUNDS = 5
STEPS = 60  # of a round
LONGEST_WORD = 16
TEXT = {"type": "string", "minLength": 20000}  # no answer ends while it is timed
ANSWERS = {
    "schema": Grammar("json_schema", json.dumps({"type": "object", "properties": {"a": TEXT}, "required": ["a"]})),
    "list": Grammar("json_schema", json.dumps({"type": "array", "minItems": 20000, "items": {"type": "integer"}})),
    "regex": Grammar("regex", "[A-Za-z ,.\n]{20000,}"),
}


def vocabulary(size: int, end: int) -> list[bytes]:
    """`size` tokens: the bytes, then the likeliest words and beginnings of words; `end` has no text."""
    counted = Counter[bytes]()
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for word in re.findall(rb" ?[A-Za-z]+|[ \n]+|[^ \nA-Za-z]+", file.read_bytes()):
            counted.update(word[:length] for length in range(2, min(len(word), LONGEST_WORD) + 1))
    single = [bytes([byte]) for byte in range(256)]
    words = [word for word, _ in counted.most_common(size - len(single))]
    numbers = (str(number).encode() for number in range(10**6, 10**7))
    pieces = [*single, *words]
    pieces += [next(numbers) for _ in range(size - len(pieces))]
    pieces[end] = b""
    return pieces


def grammars_of(parts: Parts) -> Grammars:
    limits = parts.worker.limits
    assert limits.vocab_size is not None
    pieces = vocabulary(limits.vocab_size, min(limits.eos_token_ids))
    return Grammars(pieces, limits.eos_token_ids, limits.vocab_size, lambda text: list(text.encode()))


def show(parts: Parts, rows: dict[str, EnvelopeUpdate], batches: Sequence[int], overlap: bool) -> None:
    compile_ = grammars_of(parts).compile
    print(f"with a grammar beside without, {ROUNDS} rounds in turn, overlap {overlap}: ms a step, and tokens/s to free")
    for batch, (name, envelope), (answers, grammar) in product(batches, rows.items(), ANSWERS.items()):
        free, guided = list[steps.Cell](), list[steps.Cell]()
        for turn in range(1 + ROUNDS):
            for found, asked in ((free, None), (guided, grammar)):
                load = steps.Load(batch, seed=batch, steps=STEPS, grammar=asked, grammars=compile_)
                cell = steps.run(parts, envelope, load, overlap)
                if turn > 0:  # before that steps are recorded
                    found.append(cell)
        cost = median(b.step_ms / a.step_ms for a, b in zip(free, guided, strict=True))
        rate = median(b.tokens_per_second / a.tokens_per_second for a, b in zip(free, guided, strict=True))
        before, after = (median(cell.step_ms for cell in found) for found in (free, guided))
        print(f"{name:>14} {batch:>5} {answers:>8} {before:8.2f} {after:8.2f} ×{cost:.3f} ×{rate:.3f}", flush=True)
