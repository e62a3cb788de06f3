"""What `benchmarks.acceptance` counts: on a tiny engine against requests that run alone, and by hand."""

from __future__ import annotations

import itertools
import json
from functools import cache

import pytest
import torch

from benchmarks.acceptance.asked import Asked, Prompt, read
from benchmarks.acceptance.calibration import bins, expected_error
from benchmarks.acceptance.counting import COUNTED, Counted, Counts, own_best
from benchmarks.acceptance.split import kept
from pilotfish_engine.config import CapacityConfig, EngineConfig, ModelConfig, SpeculationConfig
from pilotfish_engine.contract.speculation import Envelope, Settings
from pilotfish_engine.engine import assemble
from pilotfish_engine.errors import UsageError
from pilotfish_engine.speculation.tree import Candidates, cut
from tests.engine.conformance.conftest import checkpoints as checkpoints
from tests.engine.conformance.conftest import target as target
from tests.engine.conformance.conftest import twin as twin
from tests.engine.conformance.models import VOCAB

TREE = Settings(num_steps=3, topk=2, num_draft_tokens=6)
CHAIN = Settings(num_steps=3, topk=1, num_draft_tokens=4)


@pytest.fixture(scope="module")
def engine(checkpoints):
    @cache
    def build(draft: str) -> Counted:
        pair = checkpoints("EAGLE3", draft)
        config = EngineConfig(
            model=ModelConfig(source=str(pair.target), dtype="float32", max_model_len=96),
            speculation=SpeculationConfig(
                method="EAGLE3", draft=str(pair.draft), envelope=Envelope(num_steps=3, topk=2, num_draft_tokens=6)
            ),
            capacity=CapacityConfig(max_running_requests=3, kv_tokens=4096),
        )
        return Counted(assemble(config, COUNTED))

    return build


@pytest.fixture(scope="module")
def asked() -> list[Prompt]:
    generator = torch.Generator().manual_seed(3)
    kinds = itertools.cycle(("chat", "code"))
    return [
        Prompt(next(kinds), (0, 0, 0, *torch.randint(2, VOCAB, (5 + number,), generator=generator).tolist()))
        for number in range(4)
    ]


def counts(engine: Counted, asked: list[Prompt], settings: Settings, temperature: float, evenly: bool) -> list[Counts]:
    """Of all, of chat and of code."""
    found = [Counts(), Counts(), Counts()]
    for step in engine.follow(asked, settings, 16, temperature, evenly):
        for count, kind in zip(found, (None, "chat", "code"), strict=True):
            count.add(step, kind)
    return found


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("settings", [CHAIN, TREE], ids=["chain", "tree"])
def test_a_batch_with_even_budgets_counts_what_each_request_counts_alone(engine, asked, settings, temperature):
    near = engine("near")
    whole, chat, code = counts(near, asked, settings, temperature, evenly=True)
    alone = Counts()
    for number, prompt in enumerate(asked):
        # the same seed as in the batch: a request's is its number
        others = [Prompt("unused", (0, 2))] * number
        for step in near.follow([*others, prompt], settings, 16, temperature, evenly=False, at_once=1):
            alone.add(step, prompt.kind)
    assert whole.lengths == alone.lengths == chat.lengths + code.lengths
    assert whole.nodes == alone.nodes
    assert whole.expected == pytest.approx(alone.expected, rel=1e-4)
    assert 0 < whole.accept(1)[0] < 1, "a draft that is right now and then"
    assert whole.accept_length == pytest.approx(1 + sum(whole.accept(3)))


def test_a_draft_equal_to_the_target_is_counted_as_always_right(engine, asked):
    equal = engine("equal")
    answers_end = 0
    for step in equal.follow(asked, CHAIN, 16, 0.0):
        assert step.drafted.accepted[step.drafted.real].all()
        assert step.drafted.committed.tolist() == [4] * len(step.kinds)
        answers_end += sum(tokens < 4 for tokens in step.tokens)  # behind an end token nothing counts
    assert answers_end <= len(asked)


def test_the_engine_s_own_budget_is_one_for_the_batch(engine, asked):
    """As many nodes as with even budgets, and more promised by the draft's scores."""
    near = engine("near")
    promised = {}
    for evenly in (True, False):
        steps = [s for s in near.follow(asked, TREE, 16, 0.0, evenly) if len(s.kinds) == 3]
        assert {int(step.drafted.real.sum()) for step in steps} == {3 * (TREE.num_draft_tokens - 1)}
        promised[evenly] = float(steps[0].drafted.chance.sum())  # of the same tokens so far
    assert promised[False] > promised[True]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("evenly", [False, True])
def test_what_a_budget_keeps_of_all_candidates_is_what_it_accepts(engine, asked, evenly, temperature):
    """The first step of all requests, which every run begins with: all candidates verified, then cut, and cut first."""
    near = engine("near")
    everything = Settings(num_steps=3, topk=2, num_draft_tokens=11)
    whole, once = (
        near.follow(asked, settings, 16, temperature, even)[0].drafted
        for settings, even in ((everything, True), (TREE, evenly))
    )
    assert len(once.committed) == 3
    tokens, promised = kept(whole, TREE.num_draft_tokens, evenly)
    assert tokens.tolist() == once.committed.tolist()
    assert promised.tolist() == pytest.approx((1 + once.chance.sum(dim=1)).tolist(), rel=1e-4)


def mass(candidates: Candidates, nodes: int, steps: int) -> tuple[float, int]:
    """Path probabilities of the nodes that the engine's cut takes, and their number."""
    numbers = torch.arange(candidates.token_ids.shape[1]).expand_as(candidates.token_ids)
    numbered = Candidates(numbers, candidates.parents, candidates.scores)
    tree = cut(torch.zeros_like(numbers[:, 0]), numbered, nodes, steps)
    real = tree.real[:, 1:]
    taken = candidates.scores.exp().gather(1, tree.token_ids[:, 1:])[real]
    return float(taken.sum()), int(real.sum())


def test_one_budget_never_promises_less_than_the_even_split():
    """Two requests, all pairs of trees of 3 nodes with probabilities of a coarse grid; also that the even split is what
    the engine takes of each alone."""
    parents = (-1, 0, -1)
    grid = [(a, a * b, c) for a, c in ((0.1, 0.1), (0.1, 0.9), (0.5, 0.5), (0.9, 0.1)) for b in (0.1, 0.5, 0.9)]
    more = 0
    for first, second in itertools.combinations_with_replacement(grid, 2):
        scores = torch.tensor([first, second]).log()
        both = Candidates(torch.tensor([[0, 1, 2]] * 2), torch.tensor([parents] * 2), scores)
        for each in (1, 2, 3):
            split = own_best(both, each)
            alone = [
                mass(Candidates(both.token_ids[i : i + 1], both.parents[i : i + 1], scores[i : i + 1]), each + 1, 2)
                for i in (0, 1)
            ]
            even, even_nodes = mass(split, each + 1, 2)
            whole, nodes = mass(both, each + 1, 2)
            assert even == pytest.approx(sum(found for found, _ in alone))
            assert even_nodes == nodes == 2 * each
            assert whole >= even - 1e-6
            more += whole > even + 1e-6
    assert more > 0


def test_bins_and_their_error_by_hand():
    chance = torch.tensor([0.0, 0.05, 0.3, 0.3, 0.95, 1.0])
    accepted = torch.tensor([False, True, True, False, True, True])
    found = bins(chance, accepted, 4)
    assert [one.nodes for one in found] == [2, 2, 0, 2]
    assert [one.predicted for one in found] == pytest.approx([0.025, 0.3, 0.0, 0.975])
    assert [one.accepted for one in found] == [0.5, 0.5, 0.0, 1.0]
    assert expected_error(found) == pytest.approx((2 * 0.475 + 2 * 0.2 + 2 * 0.025) / 6)
    assert expected_error(bins(torch.empty(0), torch.empty(0, dtype=torch.bool))) == 0


def test_prompts_come_back_from_their_file(tmp_path):
    wanted = Asked({"chat": [[1, 2], [3]], "daily": [], "code": [[4]], "sums": []}, ["an answer"])
    wanted.write(tmp_path / "prompts.json")
    assert read(tmp_path / "prompts.json") == wanted
    assert [(p.kind, p.token_ids) for p in wanted.mixed()] == [("chat", (1, 2)), ("code", (4,)), ("chat", (3,))]
    assert list(wanted.first(1).mixed()) == list(wanted.mixed())[:2]


@pytest.mark.parametrize(
    "body",
    [
        {"chat": [[1]]},
        [1],
        {"chat": [[]], "daily": [], "code": [], "sums": []},
        {"chat": [], "daily": [], "code": [], "sums": []},
    ],
)
def test_a_file_without_prompts_is_refused(tmp_path, body):
    (tmp_path / "prompts.json").write_text(json.dumps(body))
    with pytest.raises(UsageError, match=r"prompts\.json"):
        read(tmp_path / "prompts.json")
