"""A client may go at any moment: what its request held is free, nothing more is said of it, and nobody notices."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from pilotfish_engine.errors import RequestError
from pilotfish_engine.messages import Grammar, Output
from pilotfish_engine.scheduler.scheduler import Scheduler
from pilotfish_engine.types import CompiledGrammar, WorkerLimits
from tests.engine.scheduler.counting_worker import Counting, answer, drain, submit, tokens

LIMITS = WorkerLimits(max_running_requests=3, max_model_len=128, page_size=4, num_pages=40)
LENGTHS = {"a": 9, "b": 30, "c": 4, "d": 17, "e": 5}


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("victim", LENGTHS)
def test_in_every_iteration(victim, overlap):
    """While it waits, in the middle of its chunks, decoding, in a step under way, sent back, and when it is over."""
    for moment in range(40):
        worker = Counting(LIMITS, tokens_a_step=3)
        scheduler = Scheduler(worker, 7, overlap=overlap)
        prompts = {name: submit(scheduler, name, length, max_tokens=20) for name, length in LENGTHS.items()}
        outputs: dict[str, list[Output]] = {name: [] for name in prompts}
        for iteration in range(moment):
            if iteration in (3, 8) and scheduler.running:
                scheduler.retract_latest()
            for output in scheduler.step():
                outputs[output.request_id].append(output)
        over = bool(outputs[victim]) and outputs[victim][-1].finish_reason is not None
        scheduler.abort(victim)
        scheduler.abort(victim)
        scheduler.check()
        for name, found in drain(scheduler).items():
            assert name != victim or over, "something was said after the abort"
            outputs[name] += found
        for name, prompt in prompts.items():
            got = tokens(outputs[name])
            assert got == answer(prompt, len(got) if name == victim else 20)
        assert not worker.rows
        assert scheduler.room.pool.num_free + scheduler.room.prefix.num_cached == LIMITS.num_pages
        # what the cache keeps is right: asked again, all give the same
        for name in prompts:
            submit(scheduler, name, LENGTHS[name], max_tokens=20)
        again = drain(scheduler)
        assert all(tokens(again[name]) == answer(prompt, 20) for name, prompt in prompts.items())


@pytest.mark.parametrize("outcome", ["compiled", "refused"])
def test_while_its_grammar_is_compiled(outcome):
    compiling: list[Future[CompiledGrammar]] = []

    def compiler(grammar: Grammar) -> Future[CompiledGrammar]:
        compiling.append(Future())
        return compiling[-1]

    worker = Counting(LIMITS)
    scheduler = Scheduler(worker, 16, grammars=compiler)
    for name in ("gone", "stays"):
        submit(scheduler, name, 4, grammar=Grammar("regex", "a"))
    assert scheduler.report().waiting == 2
    assert scheduler.step() == []
    scheduler.abort("gone")
    assert scheduler.report().waiting == 1
    for future in compiling:
        if outcome == "compiled":
            future.set_result(None)  # type: ignore[arg-type]
        else:
            future.set_exception(RequestError("no grammar", "grammar"))
    outputs = drain(scheduler)
    assert list(outputs) == ["stays"]
    last = outputs["stays"][-1]
    assert (last.finish_reason, last.field) == (("length", None) if outcome == "compiled" else ("error", "grammar"))
