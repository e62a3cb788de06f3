"""What is asked: real prompts in a random order, or random ones of one length. Request number n of a run asks the same
whatever server it goes to.

Knows nothing about when anything is asked.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from pilotfish_engine.bench import datasets
from pilotfish_engine.bench.plan import DATASETS, Api, Plan
from pilotfish_engine.errors import UsageError

Body = dict[str, Any]

EVERY = 1 << 20  # of a dataset
FORMS = 'a JSON object a line, {"prompt": "…"} or {"messages": [{"role": "user", "content": "…"}]}'

# about one token each, for every vocabulary that was trained on English
TEXT = """time year people way day man thing woman life child world school state family student group country problem
hand part place case week company system program question work government number night point home water room mother area
money story fact month lot right study book eye job word business issue side kind head house service friend father power
hour game line end member law car city community name president team minute idea body information back parent face
others level office door health person art war history party result change morning reason research girl guy moment air
teacher force education foot boy age policy music food market sense nation plan college interest death experience effect
use class control care field development role effort rate heart drug show leader light voice wife police mind price
report decision son view relationship town road arm difference value building action season society tax director early
position player record paper space ground form event official matter center couple site project activity star table need
court produce eat teach oil half situation cost industry figure street image phone data picture practice piece land
product doctor wall patient worker news test movie north love step machine capital pressure"""
WORDS = TEXT.split()


class Prompts:
    """distinct: how many there are before one comes again; None: each is new."""

    def __init__(self, distinct: int | None, make: Callable[[int], Body]) -> None:
        self.distinct = distinct
        self._make = make

    def body(self, number: int) -> Body:
        """The part of request `number` that says what is asked."""
        return self._make(number)

    def repeated(self, first: int, count: int) -> int:
        """How many of `count` requests from `first` on ask what an earlier one asked."""
        return 0 if self.distinct is None else max(0, first + count - max(first, self.distinct))


def real(plan: Plan) -> Prompts:
    """Raises UsageError where there are none, or none that go with the API."""
    assert plan.prompts is not None
    if plan.prompts in DATASETS:
        texts = {"chat": datasets.chat, "code": datasets.code, "sums": datasets.sums}[plan.prompts](EVERY)
        bodies = [_asked(text, plan.api) for text in texts]
    else:
        bodies = _read(Path(plan.prompts), plan.api)
    random.Random(plan.seed).shuffle(bodies)
    return Prompts(len(bodies), lambda number: bodies[number % len(bodies)])


def synthetic(plan: Plan, token_ids: Sequence[int]) -> Prompts:
    """Of plan.input_len tokens drawn from `token_ids`; without any, or in a chat, of as many words."""

    def make(number: int) -> Body:
        rng = random.Random(f"{plan.seed} {number}")
        if token_ids and plan.api == "completions":
            return {"prompt": rng.choices(token_ids, k=plan.input_len)}
        return _asked(" ".join(rng.choices(WORDS, k=plan.input_len)), plan.api)

    return Prompts(None, make)


def _asked(text: str, api: Api) -> Body:
    return {"messages": [{"role": "user", "content": text}]} if api == "chat" else {"prompt": text}


def _read(file: Path, api: Api) -> list[Body]:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"--prompts {str(file)!r} cannot be read ({error}); {', '.join(DATASETS)} or a JSONL file would work"
        ) from error
    bodies = [
        _body(line, api, f"{file}, line {number}") for number, line in enumerate(text.splitlines(), 1) if line.strip()
    ]
    if not bodies:
        raise UsageError(f"--prompts {str(file)!r} is empty; {FORMS} would work")
    return bodies


def _body(line: str, api: Api, where: str) -> Body:
    try:
        value = msgspec.json.decode(line)
    except msgspec.DecodeError as error:
        raise UsageError(f"{where} is not JSON ({error}); {FORMS} would work") from error
    match value:
        case {"prompt": str(prompt)}:
            return _asked(prompt, api)
        case {"messages": [_, *_] as messages} if all(isinstance(message, Mapping) for message in messages):
            if api == "chat":
                return {"messages": messages}
            raise UsageError(f"{where} holds messages, which --api completions does not take; --api chat would work")
    raise UsageError(f"{where} holds neither a prompt nor messages; {FORMS} would work")
