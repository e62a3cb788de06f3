"""Stop strings of any number and length: what may be shown, and where an answer ends, by enumeration."""

from __future__ import annotations

import random
import re

import msgspec

from pilotfish_engine.messages import Thought
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


THOUGHT = Thought(("<t>", "<th>"), ("</t>", "</th>"))


def content_start(text: str, opened: bool) -> int:
    """Where what is no reasoning begins, and the blanks behind it have ended."""
    found = re.match(r"(\s*<th?>)?(.*?)(</th?>|\Z)\s*" if opened else r"\s*<th?>(.*?)(</th?>|\Z)\s*", text, re.DOTALL)
    return found.end() if found else 0


def test_stop_strings_end_nothing_within_a_thought_however_its_tags_are_cut() -> None:
    tokenizer = load(resolve(MODEL))
    chance = random.Random(3)
    ended = dormant = 0
    for number in range(1500):
        opened = number % 2 == 0
        words = chance.choices(["<t>", "</t>", "<th>", "</th>", "\n", " ", "a", "ab", "<", "a>b"], k=9)
        text = "".join([*chance.choices(["<t>", "<th>", "", "\n<t>"]), *words])
        answer = [token for letter in text for token in tokenizer.encode(letter)]
        if chance.random() < 0.5:
            answer = tokenizer.encode(text)
        stops = chance.choices(["a", "b", "\n", "\n\n", "ba", ">b", "ab a", " a"], k=2)
        search = StopStrings(tokenizer, stops, (), msgspec.structs.replace(THOUGHT, opened=opened))
        for count, token in enumerate(answer, 1):
            seen = tokenizer.decode(answer[:count])
            start = content_start(seen, opened)
            places = [at for stop in stops if (at := seen.find(stop, start)) >= 0]
            end = search.append(token)
            assert end == min(places, default=None), (text, stops, seen)
            if end is not None:
                ended += 1
                break
            dormant += any(stop in seen for stop in stops)
    assert ended > 300
    assert dormant > 300
