"""Writes prompts as JSON lines: composed ones first, then those that a target writes. `--help` names the flags."""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

from examples.prompts.composing import HERE, Composer
from pilotfish_engine.errors import UsageError
from pilotfish_engine.source import resolve
from pilotfish_engine.tokenizer import Tokenizer, load
from pilotfish_engine.train.answers import counted, generate
from pilotfish_engine.train.preparing import engine
from pilotfish_engine.train.prompts import Prompt
from pilotfish_engine.train.settings import TrainSettings

WARMTH = (0.7, 0.85, 1.0)  # temperatures of what the target writes, in turn


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m examples.prompts", description=__doc__)
    parser.add_argument("--target", required=True, help="the model that writes, as `pilotfish-engine serve` takes it")
    parser.add_argument("--composed", type=int, default=50_000, help="prompts of own words (default: %(default)s)")
    parser.add_argument("--begun", type=int, default=15_000, help="begun here, ended by the target")
    parser.add_argument("--free", type=int, default=25_000, help="the target's own from nothing")
    parser.add_argument("--seconds", type=float, help="the target writes no longer than this")
    parser.add_argument("--tokens", type=int, default=96, help="that the target writes of a prompt at most")
    parser.add_argument("--max-running-requests", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args(arguments)


def composed(count: int, seed: int) -> Iterator[dict[str, Any]]:
    composer = Composer(seed)
    seen = set[str]()
    for _ in range(count):
        messages = composer.messages()
        if (text := json.dumps(messages)) not in seen:
            seen.add(text)
            yield {"messages": messages}


def written(options: argparse.Namespace, tokenizer: Tokenizer) -> Iterator[dict[str, Any]]:
    """User's turns by the target, which ends them where it would end a turn."""
    chats = [tokenizer.encode_chat([{"role": "user", "content": content}]) for content in ("A", "9")]
    before = [one for one, other in takewhile(lambda both: both[0] == both[1], zip(*chats, strict=False))]
    openings = (HERE / "openings.txt").read_text(encoding="utf-8").splitlines()
    dice = random.Random(options.seed)
    begun = [dice.choice(openings) for _ in range(options.begun)] + [""] * options.free
    dice.shuffle(begun)
    asked = [
        (Prompt(number, before + tokenizer.encode(opening)), WARMTH[number % len(WARMTH)])
        for number, opening in enumerate(begun)
    ]
    longest = max(len(prompt.token_ids) for prompt, _ in asked) + options.tokens
    settings = TrainSettings(
        target=options.target, data="", out="", max_length=longest, max_running_requests=options.max_running_requests
    )
    _, core = engine(settings)
    answers = generate(core, asked, options.tokens, options.seed, options.seconds)
    for prompt, answer in counted(answers, len(asked)):
        if answer.tokens[-1] not in tokenizer.eos_token_ids:
            continue  # cut off: a turn without its end
        turn = (begun[prompt.line] + tokenizer.decode(answer.tokens[:-1])).strip()
        if turn and "\ufffd" not in turn:
            yield {"messages": [{"role": "user", "content": turn}]}


def main() -> int:
    options = parse(sys.argv[1:])
    kinds = {"composed": composed(options.composed, options.seed)}
    if options.begun + options.free:
        kinds["written by the target"] = written(options, load(resolve(options.target)))
    with options.out.open("w", encoding="utf-8") as file:
        for kind, lines in kinds.items():
            count = 0
            for count, line in enumerate(lines, start=1):  # noqa: B007
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
            print(f"{count} prompts {kind}", flush=True)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UsageError as error:
        sys.exit(f"error: {error}")
