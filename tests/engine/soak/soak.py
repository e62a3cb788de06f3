"""Random traffic against a tiny model, for every method in turn: no leak, no stuck request, and every answer is the one
that its request has alone.

A round is one engine under one load, drawn by the seed and its own number: so one round can be run again by itself,
step for step. Nothing in it depends on time: the controller's clock is drawn too.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from random import Random

from pilotfish_engine.contract.controller import Controller
from pilotfish_engine.contract.methods import NO_METHOD, Limit, Limits
from pilotfish_engine.contract.speculation import CostProfile, Envelope
from pilotfish_engine.engine import Parts, assemble
from pilotfish_engine.messages import Grammar
from pilotfish_engine.scheduler.request import Request
from pilotfish_engine.types import CompiledGrammar
from pilotfish_engine.worker.target import Speculation, TargetWorker
from tests.engine.conformance import models
from tests.engine.conformance.conftest import variants
from tests.engine.conformance.harness import MAX_MODEL_LEN, MAX_RUNNING, NUM_STEPS, Harness, configuration
from tests.engine.conformance.test_processors import GRAMMARS
from tests.engine.soak import faults
from tests.engine.soak.traffic import Alone, Answered, Asked, difference, draw, envelope

TOPK = 4
PROFILE = CostProfile(
    verify_ms=((1, 5.0), (16, 6.0), (64, 12.0)), draft_ms=((1, 0.5), (64, 2.0)), extend_ms=((1, 0.3), (64, 1.0))
)
STEPS_A_REQUEST = 120  # before one is called stuck


@dataclass
class Sums:
    """Over all rounds."""

    rounds: int = 0
    answers: int = 0
    aborts: int = 0
    faults: int = 0
    retractions: int = 0
    steps: int = 0
    tokens: int = 0


class Failure(AssertionError):
    """Says how to see it again."""


class Soak:
    """folder: for checkpoints. faults: the share of requests with which something is wrong."""

    def __init__(self, folder: Path, seed: int, faults: float = 0.0) -> None:
        self._seed, self._faults = seed, faults
        self._target = folder / "target"
        models.target_model().save_pretrained(self._target)
        self._pair = cache(lambda method, draft: models.build(method, draft, self._target, folder / "drafts"))
        self.engine: Callable[[str, str, int], Parts] = cache(self._load)
        self.variants = [(NO_METHOD, ""), *variants()]
        self._alone = Alone(self._load(NO_METHOD, "", 16))
        self.sums = Sums()

    def round(self, number: int, requests: int) -> None:
        """Raises Failure."""
        method, draft = self.variants[number % len(self.variants)]
        random = Random(f"{self._seed} {number}")
        page_size = random.choice([1, 16])
        try:
            played = _Round(self.engine(method, draft, page_size), method, draft, random, self._faults)
            played.play(requests)
            self._judge(played)
        except Exception as error:
            again = f"python -m tests.engine.soak --seed {self._seed} --round {number} --requests {requests}"
            again += f" --faults {self._faults}" if self._faults else ""
            raise Failure(f"round {number} ({method} {draft}): {error}\nto see it again: {again}") from error

    def _load(self, method: str, draft: str, page_size: int) -> Parts:
        """With a cost profile that is not measured."""
        pair, (num_steps, topk) = models.Pair(self._target, None), (NUM_STEPS, TOPK)
        if method != NO_METHOD:
            pair = self._pair(method, draft)
            num_steps, topk = models.within(method, draft, num_steps, topk)
        return assemble(configuration(pair.target, method, pair.draft, page_size, num_steps, topk), PROFILE)

    def _judge(self, played: _Round) -> None:
        played.nothing_is_left()
        scheduler = played.harness.scheduler
        for request_id, asked in played.asked.items():
            answer = played.harness.answers[request_id]
            refused = request_id in played.faults and answer.finish_reason is not None  # before its abort, maybe
            whole = refused or request_id not in played.aborted
            assert (answer.finish_reason is not None) == whole, f"{request_id} has no end, or one after its abort"
            last = answer.last
            if request_id in played.faults:
                if whole:
                    assert last is not None
                    wrong = faults.wrong(played.faults[request_id], last.error, last.field)
                    assert wrong is None, f"{request_id} {wrong}: {asked}"
                continue
            found = Answered(
                answer.token_ids, answer.finish_reason, None if last is None else last.text_end, answer.logprobs
            )
            wrong = difference(found, self._alone.answer(asked), whole)
            assert wrong is None, f"{request_id} {wrong}: {asked}"
        counters = scheduler.report().counters
        sent = sum(len(answer.token_ids) for answer in played.harness.answers.values())
        assert counters.emitted_tokens == sent, f"{counters.emitted_tokens} tokens counted, {sent} sent"
        sums = self.sums
        sums.rounds += 1
        sums.answers += len(played.asked) - len(played.aborted)
        sums.aborts += len(played.aborted)
        sums.faults += len(played.faults)
        sums.retractions += scheduler.tally.retractions
        sums.steps += played.steps
        sums.tokens += sent


def requests_in_memory() -> int:
    gc.collect()
    return sum(type(thing) is Request for thing in gc.get_objects())


@dataclass
class _Round:
    parts: Parts
    method: str
    draft: str
    random: Random
    share: float
    faults: dict[str, str] = field(default_factory=dict)
    asked: dict[str, Asked] = field(default_factory=dict)
    aborted: set[str] = field(default_factory=set)
    steps: int = 0

    def __post_init__(self) -> None:
        self._before = requests_in_memory()  # others' of the same process
        random, room = self.random, self.parts.worker.limits.num_pages
        self._compiling: list[tuple[int, Grammar, Future[CompiledGrammar]]] = []
        least = (MAX_MODEL_LEN + 2 * MAX_RUNNING * (2 * NUM_STEPS + 2)) // self.parts.worker.limits.page_size + 1
        self.harness = Harness(
            replace(self.parts, worker=self._fresh_worker()),
            chunk_size=random.choice([5, 16, 512]),
            overlap=random.random() < 0.5,
            stop_text=faults.text_of_stops,
            grammars=self._compile,
            max_running_requests=random.randint(2, MAX_RUNNING),
            num_pages=random.randint(min(least, room), room),
        )
        if self.share:
            watched = self.harness.worker
            self.harness.worker = faults.Faulty(watched.parts, watched.steps, watched.tighter)
            self.harness.scheduler._worker = self.harness.scheduler._steps._worker = self.harness.worker

    def _fresh_worker(self) -> TargetWorker:
        """With nothing learnt yet, and a clock that is drawn."""
        worker, now = self.parts.worker, 0.0
        plain = self.method == NO_METHOD
        self._most = (0, 1) if plain else models.within(self.method, self.draft, NUM_STEPS, TOPK)
        steps, topk = (Limit(most, "a draft of the soak does no more") for most in self._most)

        def clock() -> float:
            nonlocal now
            now += self.random.uniform(0.002, 0.02)
            return now

        bounds = Envelope(num_steps=self._most[0], topk=self._most[1], num_draft_tokens=10)
        controller = Controller(bounds, PROFILE, MAX_RUNNING)
        bound = Limits(steps, topk)
        return TargetWorker(self.parts.step, controller, worker.limits, Speculation(self.method, bound, PROFILE), clock)

    def play(self, requests: int) -> None:
        """Bursts of arrivals, and between steps whatever may happen to an engine."""
        random, scheduler = self.random, self.harness.scheduler
        while scheduler.has_work or len(self.asked) < requests:
            if random.random() < 0.4:
                for _ in range(min(random.choice([1, 1, 2, 8]), requests - len(self.asked))):
                    self._submit()
            for request_id in self._living() if len(self.asked) < requests else ():  # later it would hide a stuck one
                if random.random() < 0.015:
                    scheduler.abort(request_id)
                    self.aborted.add(request_id)
            if random.random() < 0.05:
                scheduler.set_envelope(envelope(random, *self._most))
            if random.random() < 0.02:
                scheduler.flush_cache()
            if random.random() < 0.02 and scheduler.set_envelope(envelope(random, *self._most)).running:
                scheduler.retract_latest()
            self._compiled()
            self.harness.step()
            self.steps += 1
            assert self.steps < STEPS_A_REQUEST * requests, f"stuck: {self._living()}"

    def nothing_is_left(self) -> None:
        """What a scheduler that ended all its work still holds, once it has been asked whether there is more."""
        scheduler = self.harness.scheduler
        self._compiled(whatever=True)
        assert self.harness.step() == []
        report = scheduler.report()
        assert (report.running, report.waiting) == (0, 0), f"{report.running} running, {report.waiting} waiting"
        scheduler.flush_cache()
        scheduler.check()
        pool = scheduler.room.pool
        assert pool.num_free == pool.num_pages, f"{pool.num_pages - pool.num_free} pages are held by nobody"
        left = requests_in_memory() - self._before
        assert left <= 0, f"{left} requests are still in memory"

    def _submit(self) -> None:
        asked, kind = draw(self.random), ""
        if self.share and self.random.random() < self.share:
            asked, kind = faults.spoil(asked, self.random)
        request_id = self.harness.submit_params(asked.prompt, asked.params, self.random.choice([0, 0, 0, -1, 2]))
        if kind:
            self.faults[request_id] = kind
            self.harness.faulty.add(request_id)
        self.asked[request_id] = asked

    def _living(self) -> list[str]:
        answers = self.harness.answers
        return [i for i in self.asked if answers[i].finish_reason is None and i not in self.aborted]

    def _compile(self, grammar: Grammar) -> Future[CompiledGrammar]:
        """Ready some steps later, whatever the machine does."""
        future: Future[CompiledGrammar] = Future()
        self._compiling.append((self.steps + self.random.randint(0, 6), grammar, future))
        return future

    def _compiled(self, whatever: bool = False) -> None:
        due = [entry for entry in self._compiling if whatever or entry[0] <= self.steps]
        self._compiling = [entry for entry in self._compiling if entry not in due]
        for _, grammar, future in due:
            compiled = faults.throwing(grammar)
            if compiled is not None:
                future.set_result(compiled)
            elif (error := GRAMMARS.compile(grammar).exception()) is not None:
                future.set_exception(error)
            else:
                future.set_result(GRAMMARS.compile(grammar).result())
