"""Rules 5 and 10: the earliest end wins at every place inside a run of accepted tokens, and counts say what was
sent."""

from __future__ import annotations

import codecs
import re
from typing import cast

import pytest
import torch

from pilotfish_engine.messages import Grammar
from pilotfish_engine.tokenizer import StopStrings, Tokenizer
from pilotfish_engine.tokenizer.pieces import Pieces as Decoding
from tests.engine.conformance.conftest import EOS, prompts, settings_of, variants
from tests.engine.conformance.harness import NUM_STEPS, Harness, fixed
from tests.engine.conformance.models import within
from tests.engine.conformance.test_processors import GRAMMARS

LENGTH = 24


class Pieces:
    """A tokenizer's bytes: whole words, and halves of a character that the next token may complete or break."""

    decoding = Decoding((), {}, fallback=False)
    broken_bytes = "replace"

    def piece(self, token_id: int) -> bytes:
        letter = bytes([97 + token_id % 26])
        return [letter + b"-", b"\xc3", b"\xa9" + letter, letter * 3][token_id % 4]


def text_of(token_ids: list[int]) -> str:
    """As far as it is whole characters."""
    return codecs.getincrementaldecoder("utf-8")("replace").decode(b"".join(map(Pieces().piece, token_ids)))


def start(engine, method, draft, topk=1, overlap=False, **tighter):
    num_steps, topk = within(method, draft, NUM_STEPS, topk)
    harness = Harness(
        engine(method, draft, 1),
        overlap=overlap,
        stop_text=lambda params: StopStrings(cast(Tokenizer, Pieces()), params.stop),
        grammars=GRAMMARS.compile,
        **tighter,
    )
    harness.scheduler.set_envelope(fixed(num_steps, topk))
    return harness


def first(answer, *wanted):
    """The answer up to the first occurrence of one of `wanted`, that one included."""
    for end in range(1, len(answer) + 1):
        if answer[end - 1] in wanted:
            return answer[:end]
    raise AssertionError("none of them occurs")


CAUSES = ["end token", "stop token", "stop string", "max_tokens", "grammar", "context", "abort"]
PROMPTS = dict(zip(CAUSES, prompts(len(CAUSES), seed=25, shortest=8, longest=14), strict=True))
PROMPTS["context"] = prompts(1, seed=26, shortest=40, longest=41)[0]  # the longest, so that it ends alone for it


@pytest.fixture(scope="module")
def scored(reference, greedy):
    """Of a cause's prompt: the reference's greedy answer, and its log-probabilities at each place of it."""
    found = {}
    for cause, prompt in PROMPTS.items():
        answer = greedy(prompt, LENGTH)
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 :]
        found[cause] = answer, torch.log_softmax(logits, dim=1)
    return found


def wanted(cause, answer, at, end_tokens):
    """(what is asked for, the tokens to expect, finish_reason, text_end) of a request that ends for one cause."""
    params, text_end = {"ignore_eos": True}, None
    if cause == "end token":
        return {}, first(answer, *end_tokens), "stop", None
    if cause == "stop token":
        return params | {"stop_token_ids": (answer[at], EOS)}, first(answer, answer[at], EOS), "stop", None
    if cause == "max_tokens":
        return params | {"max_tokens": at + 1}, answer[: at + 1], "length", None
    if cause == "grammar":
        text = "".join(chr(token + 30) for token in answer[: at + 1])
        tokens = first([*answer[: at + 1], EOS], *end_tokens)
        return params | {"grammar": Grammar("regex", re.escape(text))}, tokens, "stop", None
    if cause == "stop string":  # from the middle of a token, over others, to the middle of one
        stop = text_of(answer[: at + 3])[-5:-1]
        ends = next(end for end in range(1, LENGTH + 1) if stop in text_of(answer[:end]))
        text_end = text_of(answer[:ends]).index(stop)
        return params | {"stop": ("never", stop)}, answer[:ends], "stop", text_end
    return params, answer[: at + 1], "length", None


@pytest.mark.parametrize("at", range(0, 12))
@pytest.mark.parametrize(("method", "draft"), variants("random", "near"))
def test_every_cause_at_every_place(engine, scored, method, draft, at):
    """Side by side: tokens, text, log-probabilities, counts and the prefix cache end at the same place."""
    end_tokens = frozenset([EOS, scored["end token"][0][at]])
    harness = start(
        engine, method, draft, topk=1 + at % 3 // 2, overlap=at % 2 == 0,
        eos_token_ids=end_tokens, max_model_len=len(PROMPTS["context"]) + at + 1,
    )  # fmt: skip
    ids, expected = {}, {}
    for cause, prompt in PROMPTS.items():
        params, *expected[cause] = wanted(cause, scored[cause][0], at, end_tokens)
        ids[cause] = harness.submit(prompt, **{"max_tokens": LENGTH, "logprobs": 2} | params)
    gone = harness.answers[ids["abort"]]
    while harness.scheduler.has_work:
        harness.step()
        if len(gone.token_ids) > at and gone.finish_reason is None:
            harness.scheduler.abort(ids["abort"])
            expected["abort"] = [scored["abort"][0][: len(gone.token_ids)], None, None]
            break
    harness.drain()
    lookahead = harness.worker.limits.lookahead
    for cause, (tokens, reason, text_end) in expected.items():
        answer = harness.answers[ids[cause]]
        assert answer.token_ids == tokens, cause
        assert answer.finish_reason == reason
        assert answer.last.text_end == text_end
        for given, token, row in zip(answer.logprobs, tokens, scored[cause][1][: len(tokens)], strict=True):
            assert given.logprob == pytest.approx(float(row[token]), abs=1e-4)
        whole = PROMPTS[cause] + (tokens if cause == "grammar" else scored[cause][0]) + [EOS] * (lookahead + 1)
        known = len(PROMPTS[cause]) + len(tokens)
        cached = harness.scheduler.room.prefix.match(whole)
        harness.scheduler.room.pool.release(cached)
        # the last token has no KV; an abort comes between steps, maybe with one under way
        assert len(cached) == known - max(1, lookahead) or (cause == "abort" and len(cached) < known), cause
    assert harness.scheduler.report().counters.emitted_tokens == sum(len(t) for t, _, _ in expected.values())


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
    went_through = len(answers) + harness.scheduler.tally.retractions
    added = counters.emitted_tokens - counters.accepted_tokens - went_through
    cut_short = counters.steps + counters.plain_steps - added
    assert 0 <= cut_short <= len(answers)
    assert 0 <= counters.accepted_tokens <= counters.drafted_tokens
