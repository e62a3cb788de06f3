"""Decode tokens/s by concurrency: an engine without a draft beside one with, when that is told not to draft, as chain,
as tree, and as it adapts.

At each concurrency all are run in turn, ROUNDS times over, and once before that untimed: this is about a load that
lasts, whose steps are recorded. The best of each is shown, and the median of its ratios to plain of the same round,
which something else on the machine disturbs least. Greedy. A request alone is answered to the end; several at once stay
together for MOST_TOKENS tokens each, and no answer ends.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from statistics import median

from benchmarks.acceptance.asked import Prompt
from benchmarks.acceptance.counting import fixed
from benchmarks.acceptance.engines import PLAIN, where
from benchmarks.acceptance.methods import CHAIN, TREE
from benchmarks.acceptance.section import Row, Run, Table, working
from benchmarks.shared import target_of
from pilotfish_engine.contract.speculation import Envelope, EnvelopeUpdate
from pilotfish_engine.engine import Parts
from pilotfish_engine.messages import Grammar, SamplingParams, Submit
from pilotfish_engine.scheduler.scheduler import Scheduler

LEVELS = {"cpu": (1, 2, 4, 8, 16), "cuda": (1, 2, 4, 8, 16, 32, 64, 128, 256)}
ROUNDS = 3
SOLO = {"cpu": 3, "cuda": 12}  # prompts that are run one after another where one runs at once
SOLO_UNTIMED = 3
MOST_TOKENS = {"cpu": 128, "cuda": 512}  # of an answer, where several run at once
ENVELOPE = Envelope(**TREE.model_dump(), tuning="Adaptive", disable_threshold="Auto")
SETTINGS = {
    "plain": EnvelopeUpdate(num_steps=0, topk=1, tuning="Fixed"),
    "disabled": EnvelopeUpdate(num_steps=0, topk=1, tuning="Fixed"),
    "chain": fixed(CHAIN),
    "tree": fixed(TREE),
    "adaptive": EnvelopeUpdate(**ENVELOPE.model_dump()),
}


@dataclass(frozen=True)
class Together:
    """Tokens, steps and seconds of a batch."""

    emitted: int
    steps: int
    seconds: float
    batch: int

    @property
    def rate(self) -> float:
        return self.emitted / self.seconds

    @property
    def step_ms(self) -> float:
        return 1e3 * self.seconds / self.steps

    @property
    def a_step(self) -> float:
        """Of a request."""
        return self.emitted / self.steps / self.batch


@dataclass(frozen=True)
class Timed:
    """An engine of these parts. tokens: of each answer of a batch that are timed; room: of these answers until they
    would end; whole: of an answer that is alone, at most."""

    parts: Parts
    scheduler: Scheduler
    tokens: int
    room: int
    whole: int

    def alone(self, update: EnvelopeUpdate, prompts: Sequence[Prompt]) -> float:
        """Tokens a second of whole answers, one after another. The time until the first tokens is left out."""
        self.scheduler.set_envelope(update)
        emitted, seconds = 0, 0.0
        for prompt in prompts:
            params = SamplingParams(max_tokens=self.whole, temperature=0.0)
            self.scheduler.submit(Submit(request_id="alone", prompt=[*prompt.token_ids], params=params))
            while not self.scheduler.step():
                pass
            begun = time.perf_counter()
            while self.scheduler.has_work:
                emitted += sum(len(output.token_ids) for output in self.scheduler.step())
            seconds += time.perf_counter() - begun
        return emitted / seconds

    def together(self, update: EnvelopeUpdate, prompts: Sequence[Prompt], grammar: Grammar | None = None) -> Together:
        """Runs a batch, all with their first token, until each has `tokens` more on average."""
        self.scheduler.set_envelope(update)
        answered, emitted, steps = self._begun(prompts, self.room, grammar), 0, 0
        begun = time.perf_counter()
        while emitted < self.tokens * len(prompts):
            outputs = self.scheduler.step()
            assert all(output.finish_reason is None for output in outputs), "the batch is whole while it is timed"
            emitted += sum(len(output.token_ids) for output in outputs)
            steps += 1
        seconds = time.perf_counter() - begun
        for request_id in answered:
            self.scheduler.abort(request_id)
        return Together(emitted, steps, seconds, len(prompts))

    def warm(self, prompts: Sequence[Prompt]) -> None:
        """The prompts enter the prefix cache, so that a batch begins together."""
        self._begun(prompts, 1)

    def _begun(self, prompts: Sequence[Prompt], max_tokens: int, grammar: Grammar | None = None) -> set[str]:
        for number, prompt in enumerate(prompts):
            params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, grammar=grammar)
            self.scheduler.submit(Submit(request_id=str(number), prompt=[*prompt.token_ids], params=params))
        answered: set[str] = set()
        while len(answered) < len(prompts):
            answered |= {output.request_id for output in self.scheduler.step()}
        return answered


def engine(given: Run, method: str, rows: int) -> Timed:
    """With a cost profile measured here, as a served engine has one."""
    tokens = min(given.tokens, MOST_TOKENS[where()])
    room = 8 * tokens + 64
    parts: Parts = given.engines.build(method, ENVELOPE, rows, None, max(room, given.tokens))
    return Timed(parts, Scheduler(parts.worker, parts.chunk_size, grammars=parts.grammars), tokens, room, given.tokens)


def run(given: Run) -> list[Row]:
    levels, solo = given.at_once or LEVELS[where()], SOLO[where()]
    drafting = engine(given, given.engines.drafting, max(levels))
    with target_of(drafting.parts):
        plain = engine(given, PLAIN, max(levels))
    prompts = list(islice(cycle(given.prompts), max(levels)))
    for timed in (plain, drafting):
        timed.scheduler.set_envelope(SETTINGS["plain"])
        timed.warm(prompts)
    print(f"decode tokens/s, {given.engines.drafting}: best of {ROUNDS}, and to plain in the same round (median)")
    table = Table({"at once": 7, "plain": 8} | dict.fromkeys(list(SETTINGS)[1:], 15) | {"adaptive runs": -13})
    rows: list[Row] = []
    for level in levels:
        rates: dict[str, list[float]] = {name: [] for name in SETTINGS}
        for turn in range(1 + ROUNDS):
            for name, update in SETTINGS.items():
                working(f"{level} at once, round {turn}/{ROUNDS}, {name}")
                timed = plain if name == "plain" else drafting
                if level > 1:
                    found = timed.together(update, prompts[:level]).rate
                else:
                    found = timed.alone(update, prompts[: solo if turn else SOLO_UNTIMED])
                if turn > 0:
                    rates[name].append(found)
        ratio = {
            name: median(rate / base for rate, base in zip(found, rates["plain"], strict=True))
            for name, found in rates.items()
        }
        ran = drafting.scheduler.report().effective
        chosen = f"{ran.num_steps}/{ran.topk}/{ran.num_draft_tokens}" if ran.num_steps else "plain"
        cells = [f"{max(rates[name]):.0f} ×{ratio[name]:.2f}" for name in SETTINGS if name != "plain"]
        table.row(level, f"{max(rates['plain']):.0f}", *cells, chosen)
        rows += [
            {"at_once": level, "settings": name, "method": given.engines.drafting, "tokens_per_second": rates[name]}
            | {"to_plain": ratio[name], "adaptive_ended_with": chosen}
            for name in SETTINGS
        ]
    return rows
