"""A method that this file alone knows: the functions of its module stand here, one `register` call makes it a method,
and it is under every rule of the suite. Then it lies about its candidates, and no answer changes for it.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import Tensor

from pilotfish_engine.batch.rows import Rows
from pilotfish_engine.contract.methods import Limit, Limits, Method
from pilotfish_engine.contract.speculation import MAX_TOPK, Settings
from pilotfish_engine.errors import MethodError
from pilotfish_engine.speculation import registry
from pilotfish_engine.speculation.growth import Frontier, grow
from pilotfish_engine.speculation.proposer import Models, ProposerContext, TargetHidden
from pilotfish_engine.speculation.tree import Candidates
from pilotfish_engine.speculation.verify import Verdict
from pilotfish_engine.types import Chunk
from tests.engine.conformance import models, test_ends, test_processors
from tests.engine.conformance.conftest import VOCAB, prompts, variants
from tests.engine.conformance.harness import NUM_STEPS, Harness, fixed

TOY = "TOY"

# --- the method


class ToyProposer:
    """A fixed table says what follows each token: what the target would say that reads nothing before it. It asks for
    hidden states which it does not need, and has no KV."""

    lookahead = 0

    def __init__(self, context: ProposerContext) -> None:
        target = context.target
        self.aux_layers = (0, target.shape.num_layers)
        self._state = context.state
        self._hidden_size = target.shape.hidden_size
        every = torch.arange(target.shape.vocab_size, device=target.device)
        log_probs = torch.log_softmax(target.logits(target.norm(target.embed(every))), dim=1)
        self._scores, self._ids = log_probs.topk(MAX_TOPK, dim=1)

    def slots_needed(self, settings: Settings) -> int:
        return 0

    def admit(self, row: int, cached_len: int) -> None:
        pass

    def reusable_len(self, row: int, seq_len: int) -> int:
        return seq_len

    def extend(self, chunks: Sequence[Chunk], target: TargetHidden) -> None:
        self._look_at(target, sum(chunk.end - chunk.start for chunk in chunks))

    def due(self, rows: Rows, settings: Settings) -> list[int] | None:
        return None

    def catch_up(self, rows: Rows, counts: Tensor, width: int) -> None:
        pass

    def propose(self, rows: Rows, settings: Settings) -> Candidates:
        last = self._state.tokens[rows.index].gather(1, self._state.seq_lens[rows.index].unsqueeze(1)).squeeze(1)
        k = settings.topk

        def run(frontier: Frontier) -> tuple[Tensor, Tensor]:
            return self._ids[frontier.token_ids, :k], self._scores[frontier.token_ids, :k]

        return grow(self._ids[last, :k], self._scores[last, :k], settings.num_steps, run)

    def accepted(self, rows: Rows, settings: Settings, verdict: Verdict, target: TargetHidden) -> None:
        assert verdict.path.shape == verdict.flat.shape == verdict.next_token_ids.shape
        assert verdict.path.shape[1] <= settings.num_steps + 1
        self._look_at(target, target.hidden.shape[0])

    def skipped(self, rows: Rows, target: TargetHidden) -> None:
        self._look_at(target, len(rows))

    def _look_at(self, target: TargetHidden, tokens: int) -> None:
        wanted = (tokens, self._hidden_size)
        assert [x.shape for x in (target.hidden, *target.aux)] == [wanted] * (1 + len(self.aux_layers))


def recognises(judged: Models) -> bool:
    return False


def check(judged: Models) -> Limits:
    return Limits(topk=Limit(MAX_TOPK - 1, "this is a toy"))


def build(context: ProposerContext) -> ToyProposer:
    return ToyProposer(context)


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> str:
    """Registered until the test ends."""
    for table in ("_METHODS", "_MODULES"):
        monkeypatch.setattr(registry, table, dict(getattr(registry, table)))
    registry.register(Method(TOY, "for the suite alone"), __name__)
    monkeypatch.setitem(models.BUILDERS, TOY, [("", models.no_draft, ("",))])
    return TOY


# --- the suite's rules, called with this method in the place of one like it

plain, scored = test_processors.plain, test_ends.scored  # fixtures of these rules

# its ranks are processes of their own, which begin with the methods that the engine comes with
NOT_HERE = ("test_ranks", Path(__file__).stem)
OF_A_RULE = 3  # cases: the first, one in the middle, the last


def rules() -> Iterator[tuple[str, FunctionType]]:
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        if path.stem not in NOT_HERE:
            module = importlib.import_module(f"{__name__.rpartition('.')[0]}.{path.stem}")
            for name, rule in vars(module).items():
                if name.startswith("test_") and isinstance(rule, FunctionType):
                    yield f"{path.stem.removeprefix('test_')}: {name.removeprefix('test_')}", rule


def cases_of(rule: FunctionType) -> Iterator[dict[str, Any]]:
    """Every combination of the rule's own parameters; of a rule about families, which has a target of its own, none."""
    marks = [mark for mark in getattr(rule, "pytestmark", []) if mark.name == "parametrize"]
    for chosen in product(*(mark.args[1] for mark in marks)):
        values: dict[str, Any] = {}
        for mark, value in zip(marks, chosen, strict=True):
            names = [mark.args[0]] if isinstance(mark.args[0], str) else mark.args[0]
            values |= zip(names, [value] if isinstance(mark.args[0], str) else value, strict=True)
        if "family" not in values:
            yield values


def method_of(values: dict[str, Any]) -> str | None:
    """Some rules have it by itself, some with what it runs with."""
    method: str | None = values["drafting"][0] if "drafting" in values else values.get("method")
    return method


def with_toy(values: dict[str, Any]) -> dict[str, Any]:
    return values | ({"drafting": (TOY, *values["drafting"][1:])} if "drafting" in values else {"method": TOY})


def share() -> list[Any]:
    """A few cases of every rule that is about methods: those of a registered one that has trees and needs no draft."""
    like = next(m.name for m in registry.methods() if m.trees and models.drafts(m.name) == [""])
    found = []
    for name, rule in rules():
        cases = [values for values in cases_of(rule) if method_of(values) == like]
        for number in sorted({0, len(cases) // 2, len(cases) - 1}) if cases else []:
            found.append(pytest.param(rule, with_toy(cases[number]), id=f"{name}-{number}"))
    return found


@pytest.mark.parametrize(("rule", "values"), share())
def test_the_rules_of_the_suite(request, toy, rule, values):
    wanted = rule.__code__.co_varnames[: rule.__code__.co_argcount]
    rule(**values, **{name: request.getfixturevalue(name) for name in wanted if name not in values})


def test_most_rules_are_among_these():
    about_methods = {name for name, rule in rules() if any(method_of(values) for values in cases_of(rule))}
    # those about drafts that can equal the target have none for a method without a draft
    assert {name for name in about_methods if not any(p.id.startswith(name) for p in share())} == {
        "greedy: a_draft_equal_to_the_target_is_always_accepted"
    }


def test_it_is_a_method_while_it_is_registered(toy, monkeypatch):
    assert (TOY, "") in variants()
    assert TOY in registry.names()
    with pytest.raises(MethodError, match="method 'TOY' is registered already; choose another name"):
        registry.register(Method(TOY, "for the suite alone"), __name__)
    monkeypatch.undo()
    assert (TOY, "") not in variants()


# --- lies about candidates; `truth` int64 [B, D]: what the target will say next, so that a lie can be believed

Lie = Callable[[Candidates, Tensor, int], Candidates]


def told(candidates: Candidates, **changed: Tensor) -> Candidates:
    return Candidates(
        **{name: changed.get(name, getattr(candidates, name)) for name in ("token_ids", "parents", "scores")}
    )


def true_of_depth(candidates: Candidates, truth: Tensor, k: int) -> Tensor:
    """The target's own token at every candidate, so that all siblings are the same and true."""
    depth = [0] * k + [1 + (number - k) // (k * k) for number in range(k, candidates.token_ids.shape[1])]
    return truth[:, depth]


def chained(candidates: Candidates, truth: Tensor, count: int) -> Candidates:
    """One chain of `count` true tokens."""
    number = torch.arange(count, device=truth.device).expand(truth.shape[0], count)
    return Candidates(truth[:, :count].contiguous(), number - 1, -0.1 * number.float())


def twins(c: Candidates, truth: Tensor, k: int) -> Candidates:
    return told(c, token_ids=true_of_depth(c, truth, k))


def wrong_parents(c: Candidates, truth: Tensor, k: int) -> Candidates:
    """Tokens that are true further down, offered right under the root and under nodes of any depth."""
    moved = torch.arange(c.token_ids.shape[1], device=truth.device).expand_as(c.parents) // 2 - 1
    return told(c, token_ids=true_of_depth(c, truth, k), parents=moved)


def above_parents(c: Candidates, truth: Tensor, k: int) -> Candidates:
    rising = torch.arange(c.token_ids.shape[1], device=truth.device).expand_as(c.scores).float() - 100
    return told(c, token_ids=true_of_depth(c, truth, k), scores=rising)


def children_first(c: Candidates, truth: Tensor, k: int) -> Candidates:
    last = c.token_ids.shape[1] - 1
    return Candidates(
        true_of_depth(c, truth, k).flip(1), torch.where(c.parents < 0, -1, last - c.parents).flip(1), c.scores.flip(1)
    )


def own_parents(c: Candidates, truth: Tensor, k: int) -> Candidates:
    themselves = torch.arange(c.token_ids.shape[1], device=truth.device).expand_as(c.parents)
    return told(c, token_ids=true_of_depth(c, truth, k), parents=themselves)


def no_numbers(c: Candidates, truth: Tensor, k: int) -> Candidates:
    return told(c, scores=torch.full_like(c.scores, torch.nan))


def too_deep(c: Candidates, truth: Tensor, k: int) -> Candidates:
    return chained(c, truth, c.token_ids.shape[1])


HARMLESS: list[Lie] = [twins, wrong_parents, above_parents, children_first, own_parents, no_numbers, too_deep]


def too_many(c: Candidates, truth: Tensor, k: int) -> Candidates:
    return chained(c, truth, c.token_ids.shape[1] + 1)


def no_token(c: Candidates, truth: Tensor, k: int) -> Candidates:
    return told(c, token_ids=torch.full_like(c.token_ids, VOCAB))


def no_parent(c: Candidates, truth: Tensor, k: int) -> Candidates:
    return told(c, parents=torch.full_like(c.parents, c.parents.shape[1]))


CAUGHT: dict[Lie, str] = {
    too_many: r"offers 53 candidates, and topk 4 with num_steps 4 make at most 52",
    no_token: r"NaN or infinite numbers|index out of range",  # a row that is no token's is NaN, where there is one
    no_parent: r"index \d+ is out of bounds",
}


def lying(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, lie: Lie, answers: dict[tuple[int, ...], list[int]]
) -> None:
    """answers: of each prompt, as long as any draft reaches."""
    state, proposer = harness.parts.step.state, harness.parts.step.proposer
    assert proposer is not None
    honest = proposer.propose

    def truth(row: int) -> list[int]:
        known = state.tokens[row, : state.seq_lens[row] + 1].tolist()
        prompt = next(prompt for prompt in answers if tuple(known[: len(prompt)]) == prompt)
        at = len(known) - len(prompt)
        return answers[prompt][at : at + 60]

    def propose(rows: Rows, settings: Settings) -> Candidates:
        true = torch.tensor([truth(row) for row in rows.host], device=rows.device)
        return lie(honest(rows, settings), true, settings.topk)

    monkeypatch.setattr(proposer, "propose", propose)
    # the lies are made up on the host, within the step: no graph could hold them
    monkeypatch.setattr(harness.parts.worker, "_graphs", None)


BATCH = prompts(4, seed=71, shortest=8)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("topk", [1, 4])
@pytest.mark.parametrize("lie", HARMLESS, ids=lambda lie: lie.__name__)
def test_lies_change_no_answer(engine, greedy, toy, monkeypatch, lie, topk, page_size):
    harness = Harness(engine(TOY, "", page_size))
    harness.scheduler.set_envelope(fixed(NUM_STEPS, topk))
    lying(harness, monkeypatch, lie, {tuple(prompt): greedy(prompt, 100) for prompt in BATCH})
    assert harness.run(BATCH, max_tokens=20, ignore_eos=True) == [greedy(prompt, 20) for prompt in BATCH]


@pytest.mark.skipif(torch.cuda.is_available(), reason="an index out of bounds ends a CUDA process, not a step")
@pytest.mark.parametrize("lie", CAUGHT, ids=lambda lie: lie.__name__)
def test_lies_that_no_tree_can_hold_end_their_own_step(engine, greedy, toy, monkeypatch, lie):
    harness = Harness(engine(TOY, "", 16))
    harness.scheduler.set_envelope(fixed(NUM_STEPS, 4))
    with monkeypatch.context() as patched:
        lying(harness, patched, lie, {tuple(prompt): greedy(prompt, 100) for prompt in BATCH})
        request_id = harness.submit(BATCH[0], max_tokens=20, ignore_eos=True)
        errors = [output.error for _ in range(3) for output in harness.scheduler.step() if output.error]
    assert len(errors) == 1
    assert re.search(CAUGHT[lie], errors[0]), errors
    harness.scheduler.check()
    assert harness.scheduler.unready is None
    harness.answers.pop(request_id)
    assert harness.run(BATCH, max_tokens=20, ignore_eos=True) == [greedy(prompt, 20) for prompt in BATCH]
