"""Stop strings of any number and length: what may be shown, and where an answer ends, by enumeration."""

from __future__ import annotations

import random

from pilotfish_engine.source import resolve
from pilotfish_engine.tokenizer import StopStrings, held_back, load
from tests.engine.server.serving import MODEL


def test_what_is_held_back_is_the_longest_beginning_of_a_stop_string() -> None:
    chance = random.Random(1)
    for _ in range(3000):
        text = "".join(chance.choices("aab", k=chance.randrange(12)))
        stops = ["".join(chance.choices("aab", k=chance.randrange(1, 9))) for _ in range(chance.randrange(4))]
        overlaps = [size for stop in stops for size in range(1, len(stop)) if text.endswith(stop[:size])]
        assert held_back(text, stops) == max(overlaps, default=0)


def test_an_answer_ends_at_the_first_token_that_completes_a_stop_string_long_or_short() -> None:
    tokenizer = load(resolve(MODEL))
    tokens = [tokenizer.encode(letter)[0] for letter in "ab"] + tokenizer.encode("aba") + tokenizer.encode("bb")
    chance = random.Random(2)
    for _ in range(300):
        answer = chance.choices(tokens, k=30)
        stops = ["".join(chance.choices("ab", k=chance.choice((2, 5, 9)))) for _ in range(chance.randrange(1, 64))]
        search = StopStrings(tokenizer, stops)
        ends = [search.append(token) for token in answer]
        for count, end in enumerate(ends, 1):
            text = tokenizer.decode(answer[:count])
            starts = [start for stop in stops if (start := text.find(stop)) >= 0]
            assert end == (min(starts) if starts else None)
            if end is not None:
                break
