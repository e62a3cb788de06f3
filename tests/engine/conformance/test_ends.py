"""Rules 5 and 10: the earliest end wins at every place inside a run of accepted tokens, and counts say what was
sent."""

from __future__ import annotations

import pytest

from pilotfish_engine.scheduler.scheduler import Scheduler
from tests.engine.conformance.conftest import EOS, prompts, settings_of, variants
from tests.engine.conformance.harness import NUM_STEPS, Harness, Watched, fixed
from tests.engine.conformance.models import within


class Letters:
    """Text in which token t is one character, searched for stop strings the slow way."""

    def __init__(self, stops):
        self.stops, self.text = stops, ""

    def append(self, token_id):
        self.text += chr(200 + token_id)
        found = [at for stop in self.stops if (at := self.text.find(stop)) >= 0]
        return min(found) if found else None


def start(engine, method, draft, topk=1, overlap=False):
    num_steps, topk = within(method, draft, NUM_STEPS, topk)
    harness = Harness(engine(method, draft, 1))
    harness.scheduler = Scheduler(Watched(harness.parts), 512, Letters, overlap)
    harness.scheduler.set_envelope(fixed(num_steps, topk))
    return harness


def first(answer, *wanted):
    """The answer up to the first occurrence of the run `wanted`, that run included."""
    for end in range(len(wanted), len(answer) + 1):
        if tuple(answer[end - len(wanted) : end]) == wanted:
            return answer[:end]
    raise AssertionError("the run does not occur")


@pytest.mark.parametrize("at", range(0, 12))
@pytest.mark.parametrize(("method", "draft"), variants("random"))
def test_every_cause_at_every_place(engine, greedy, method, draft, at):
    overlap = at % 2 == 0
    prompt = prompts(1, seed=21, shortest=20)[0]
    answer = greedy(prompt, 16)
    harness = start(engine, method, draft, overlap=overlap)
    stop_token = harness.submit(prompt, ignore_eos=True, stop_token_ids=(answer[at],))
    length = harness.submit(prompt, ignore_eos=True, max_tokens=at + 1)
    run = tuple(answer[at : at + 2])
    stop_string = harness.submit(prompt, ignore_eos=True, stop=("never", "".join(chr(200 + t) for t in run)))
    harness.drain()
    expected = {stop_token: first(answer, answer[at]), length: answer[: at + 1], stop_string: first(answer, *run)}
    for request_id, tokens in expected.items():
        assert harness.answers[request_id].token_ids == tokens
    assert harness.answers[stop_token].finish_reason == "stop"
    assert harness.answers[length].finish_reason == "length"
    assert harness.answers[stop_string].finish_reason == "stop"
    assert harness.answers[stop_string].last.text_end == len(expected[stop_string]) - len(run)
    longest = max(expected.values(), key=len)
    cached = harness.scheduler.prefix.match([*prompt, *answer])
    assert len(cached) <= len(prompt) + len(longest) - 1  # nothing behind the end is kept as generated
    harness.scheduler.pool.release(cached)


@pytest.mark.parametrize(("method", "draft"), variants())
def test_the_end_token_ends_unless_it_is_ignored(engine, greedy, method, draft):
    found = 0
    for prompt in prompts(24, seed=22):
        answer = greedy(prompt, 60)
        if EOS not in answer:
            continue
        found += 1
        harness = start(engine, method, draft, topk=2)
        assert harness.run([prompt], max_tokens=60) == [first(answer, EOS)]
        assert harness.run([prompt], max_tokens=60, ignore_eos=True) == [answer]
        if found == 2:
            return
    assert found, "no prompt of this model comes to an end token"


@pytest.mark.parametrize(("method", "draft", "num_steps", "topk"), settings_of([(NUM_STEPS, 1), (NUM_STEPS, 4)]))
def test_counts_are_what_was_sent(engine, method, draft, num_steps, topk):
    harness = start(engine, method, draft, topk, overlap=topk == 1)
    for number, prompt in enumerate(prompts(9, seed=23)):
        harness.submit(prompt, max_tokens=5 + 3 * number)
    harness.drain()
    counters = harness.scheduler.report().counters
    answers = list(harness.answers.values())
    assert counters.emitted_tokens == sum(len(a.token_ids) for a in answers)
    assert counters.drafted_tokens == sum(a.last.drafted_tokens for a in answers)
    assert counters.accepted_tokens == sum(a.last.accepted_tokens for a in answers)
    # every kept token is the first after a prompt went through, an accepted draft, or the one that a step adds itself
    went_through = len(answers) + harness.scheduler.retractions
    added = counters.emitted_tokens - counters.accepted_tokens - went_through
    cut_short = counters.steps + counters.plain_steps - added
    assert 0 <= cut_short <= len(answers)
    assert 0 <= counters.accepted_tokens <= counters.drafted_tokens
