"""Rule 14: a request that leaves its engine in the middle of an answer goes on in another one as if nothing had
happened: the same tokens, and as many drafts accepted in each step."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from pilotfish_engine.engine import Parts
from pilotfish_engine.errors import HandoverError
from pilotfish_engine.scheduler.handover import Handover
from tests.engine.conformance.conftest import prompts, settings_of
from tests.engine.conformance.harness import NUM_STEPS, Answer, Harness, fixed, load
from tests.engine.conformance.test_processors import GRAMMARS, LONE_DIGITS, PAIRS

LENGTH = 32
KINDS: list[dict[str, Any]] = [
    {"ignore_eos": True},
    {"temperature": 0.8, "seed": 5, "top_k": 20, "logprobs": 2, "ignore_eos": True},
    {"temperature": 1.1, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "logit_bias": ((9, 2.0),), "seed": 8},
    {"grammar": PAIRS, "min_tokens": 8, "temperature": 0.7, "seed": 2},
    {"grammar": LONE_DIGITS, "min_tokens": 20},
]
PROMPTS = prompts(len(KINDS), seed=81, shortest=12)
MOVES = (0, 1, 3, 4, 8)  # before which of its steps a request goes over: waiting, drafted for, behind plain steps


@cache
def other(target: Path, method: str, draft: Path | None, page_size: int, num_steps: int, topk: int) -> Parts:
    return load(target, method, draft, page_size, num_steps, topk)


def moved(source: Harness, goal: Harness, request_id: str) -> None:
    """By way of bytes."""
    sent = msgspec.msgpack.encode(source.scheduler.hand_over(request_id))
    source.drain(limit=2)  # what a step under way committed is still put out here
    source.scheduler.check()
    goal.answers[request_id] = source.answers[request_id]
    goal.scheduler.take_over(msgspec.msgpack.decode(sent, type=Handover))


def answered(
    engines: list[Harness], number: int, drafting: tuple[int, int], moves: tuple[int, ...] = ()
) -> tuple[Answer, list[int]]:
    """The answer to a prompt in one engine, or in both of them in turn; and what each step accepted."""
    here, there = engines
    request_id, lengths = here.submit(PROMPTS[number], max_tokens=LENGTH, **KINDS[number]), list[int]()
    for step in range(2 * LENGTH):
        if step in moves:
            moved(here, there, request_id)
            here, there = there, here
        here.scheduler.set_envelope(fixed(*((0, 1) if step % 6 in (2, 3) else drafting)))
        seen = len(here.worker.steps)
        here.step()
        lengths += [length for _, result in here.worker.steps[seen:] for length in result.accept_lens]
        if here.answers[request_id].finish_reason is not None:
            return here.answers[request_id], lengths
    raise AssertionError("it does not end")


@pytest.mark.parametrize("page_size", [16, 4])
@pytest.mark.parametrize(
    ("method", "draft", "num_steps", "topk"), settings_of([(NUM_STEPS, 1), (NUM_STEPS, 3)], "equal", "random")
)
def test_an_answer_goes_on_elsewhere(engine, checkpoints, method, draft, num_steps, topk, page_size):
    """Between engines whose pages are in another order, and of another size. With the same size the bits are the
    same, and so is what each step accepts."""
    pair = checkpoints(method, draft, 16)
    second = other(pair.target, method, pair.draft, page_size, num_steps, topk)
    used = Harness(second)
    used.run(prompts(3, seed=83), max_tokens=9)
    for number, params in enumerate(KINDS):
        first = Harness(engine(method, draft, 16), grammars=GRAMMARS.compile)
        expected, lengths = answered([first, first], number, (num_steps, topk))
        engines = [Harness(parts, grammars=GRAMMARS.compile) for parts in (engine(method, draft, 16), second)]
        engines[1].run(prompts(2, seed=82 + number), max_tokens=5)
        found, found_lengths = answered(engines, number, (num_steps, topk), MOVES)
        assert found.token_ids == expected.token_ids, params
        assert found.finish_reason == expected.finish_reason
        assert [s is None for s in found.logprobs] == [s is None for s in expected.logprobs]
        if page_size == 16:
            assert found_lengths == lengths, params


@pytest.mark.parametrize(("method", "draft", "num_steps", "topk"), settings_of([(NUM_STEPS, 1)], "equal", "random"))
def test_it_goes_on_among_others(engine, checkpoints, method, draft, num_steps, topk):
    """In another row, with the next step under way while it comes and goes."""
    pair = checkpoints(method, draft, 16)
    second = other(pair.target, method, pair.draft, 16, num_steps, topk)
    here, there = (Harness(parts, overlap=True) for parts in (engine(method, draft, 16), second))
    for harness in (here, there):
        harness.scheduler.set_envelope(fixed(num_steps, topk))
    expected = here.run([PROMPTS[0]], max_tokens=LENGTH, ignore_eos=True)[0]
    company = there.submit(PROMPTS[1], max_tokens=LENGTH, ignore_eos=True)
    there.step()
    request_id = here.submit(PROMPTS[0], max_tokens=LENGTH, ignore_eos=True)
    for _ in range(3):
        here.step()
    moved(here, there, request_id)
    there.drain()
    assert there.answers[request_id].token_ids == expected
    assert there.answers[company].token_ids == here.run([PROMPTS[1]], max_tokens=LENGTH, ignore_eos=True)[0]


def test_what_does_not_fit_is_said(engine, checkpoints):
    """By an engine with another draft, and of bytes that are not whole; the engine goes on."""
    method, draft, num_steps, topk = next(case for case in settings_of([(2, 1)], "random") if case[1])
    source, goal = Harness(engine(method, draft, 16)), Harness(engine("NGRAM", "", 16))

    def sent() -> Handover:
        source.scheduler.set_envelope(fixed(num_steps, topk))
        request_id = source.submit(PROMPTS[0], max_tokens=LENGTH, ignore_eos=True)
        source.step()
        return source.scheduler.hand_over(request_id)

    whole = sent()
    assert whole.written is not None
    with pytest.raises(HandoverError, match="no request r1 is here"):
        source.scheduler.hand_over("r1")
    cut = replace_written(whole, whole.written[:-9])
    for harness, handover, reason in ((goal, whole, "this engine keeps"), (source, cut, "cannot be read")):
        harness.answers["r1"] = Answer()
        harness.faulty.add("r1")
        harness.scheduler.take_over(handover)
        (output,) = harness.step()
        assert output.finish_reason == "error"
        assert reason in str(output.error)
        assert not torch.isnan(harness.parts.step.state.seq_lens.float()).any()
    # tokens alone are enough where there is nothing else: the prompt goes through once more
    goal.answers["r1"] = Answer()
    goal.scheduler.take_over(replace_written(whole, None))
    goal.drain()
    known = whole.token_ids[len(PROMPTS[0]) :]
    expected = source.run([PROMPTS[0]], max_tokens=LENGTH, ignore_eos=True)[0]
    assert known + goal.answers["r1"].token_ids == expected


def replace_written(handover: Handover, written: bytes | None) -> Handover:
    return msgspec.structs.replace(handover, written=written)
