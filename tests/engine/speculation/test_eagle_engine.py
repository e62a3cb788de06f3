"""Whole engines with an EAGLE and an EAGLE-3 head: answers are the reference library's, and every draft is the one that
the forward in plain torch gives over the tokens known by then, whatever happened before."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from pilotfish_engine.batch.rows import Rows
from pilotfish_engine.config import CapacityConfig, EngineConfig, ModelConfig, SpeculationConfig
from pilotfish_engine.contract.speculation import Envelope
from pilotfish_engine.engine import Parts, assemble
from pilotfish_engine.speculation.tree import Candidates
from tests.contract.synthetic import H200
from tests.engine.conformance.harness import Harness, fixed
from tests.engine.speculation import eagle_heads as reference
from tests.engine.speculation.eagle_formats import FORMATS
from tests.engine.speculation.eagle_heads import VOCAB
from tests.engine.speculation.test_eagle_forward import features_of

pytestmark = pytest.mark.filterwarnings("ignore")  # the reference library's own

STEPS, COUNT, LONGEST = 3, 3, 13
# the formats with something of their own between target and draft: what is read, what recurs, whose vocabulary it is
NAMES = ("EAGLE without embedding", "EAGLE-3", "EAGLE-3 of the final state", "EAGLE-3 of another width", "EAGLE-3.1")


@dataclass
class Drafted:
    """One row of one call of `propose`: all tokens known by then, and the chain that was offered."""

    known: list[int]
    token_ids: list[int]
    scores: list[float]


@dataclass
class Running:
    head: reference.Head
    parts: Parts
    drafted: list[Drafted] = field(default_factory=list)

    def watch(self) -> None:
        proposer, state = self.parts.step.proposer, self.parts.step.state
        assert proposer is not None
        propose = proposer.propose

        def watched(rows: Rows, *rest: Any) -> Candidates:
            lens = state.seq_lens[rows.index].tolist()
            found = propose(rows, *rest)
            for number, (row, length) in enumerate(zip(rows.host, lens, strict=True)):
                known = state.tokens[row, : length + 1].tolist()
                self.drafted.append(Drafted(known, found.token_ids[number].tolist(), found.scores[number].tolist()))
            return found

        setattr(proposer, "propose", watched)  # noqa: B010


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    return reference.target_model()


@pytest.fixture(scope="module")
def folder(target: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("target")
    target.save_pretrained(path)
    return path


@pytest.fixture(scope="module", params=NAMES)
def running(
    request: pytest.FixtureRequest, target: LlamaForCausalLM, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Running:
    head = FORMATS[request.param](target)
    draft = head.write(tmp_path_factory.mktemp("head"))
    config = EngineConfig(
        model=ModelConfig(source=str(folder), dtype="float32", max_model_len=96),
        speculation=SpeculationConfig(draft=str(draft), envelope=Envelope(num_steps=4, topk=4, num_draft_tokens=10)),
        capacity=CapacityConfig(max_running_requests=4, page_size=4),
    )
    parts = assemble(config, H200)  # settings are fixed below, so that no cost decides
    assert parts.worker.speculation_report().method == head.kind.upper()
    found = Running(head, parts)
    found.watch()
    return found


def prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(8)
    return [torch.randint(2, VOCAB, (9 + 4 * i,), generator=generator).tolist() for i in range(count)]


@pytest.fixture(scope="module")
def answers(target: LlamaForCausalLM) -> list[list[int]]:
    """The reference library's to each of the prompts."""
    found = []
    for prompt in prompts(COUNT):
        tokens = list(prompt)
        with torch.inference_mode():
            for _ in range(LONGEST):
                tokens.append(int(target(torch.tensor([tokens])).logits[0, -1].argmax()))
        found.append(tokens[len(prompt) :])
    return found


def chain(head: reference.Head, target: LlamaForCausalLM, known: list[int]) -> tuple[list[int], list[float]]:
    """The head's best STEPS tokens behind the known ones, one after the other, with their path's log-probabilities."""
    tokens = torch.tensor(known)
    hidden = reference.combined(head, features_of(head, target, tokens[:-1]))
    tokens, drafted, scores, score = tokens[1:], [], [], 0.0
    while True:
        rows = len(tokens)
        causal = torch.ones(rows, rows).tril().bool()
        logits, _, recurs = reference.forward(head, hidden, tokens, torch.arange(rows), causal)
        best = logits[-1].log_softmax(-1).max(-1)
        token = int(best.indices) if head.map is None else int(head.map[best.indices])
        score += float(best.values)
        drafted.append(token)
        scores.append(score)
        if len(drafted) == STEPS:
            return drafted, scores
        tokens, hidden = torch.cat((tokens, torch.tensor([token]))), torch.cat((hidden, recurs[-1:]))


def start(running: Running, topk: int = 1, chunk_size: int = 512, overlap: bool = False) -> Harness:
    harness = Harness(running.parts, chunk_size, overlap)
    harness.scheduler.set_envelope(fixed(STEPS, topk))
    running.drafted.clear()
    return harness


def check_drafts(running: Running, target: LlamaForCausalLM) -> None:
    assert running.drafted
    for found in running.drafted[:: max(1, len(running.drafted) // 5)]:
        token_ids, scores = chain(running.head, target, found.known)
        assert found.token_ids == token_ids
        assert found.scores == pytest.approx(scores, abs=1e-3)


@pytest.mark.parametrize("what", ["whole", "chunks", "prefix hit", "overlap", "disabled"])
def test_drafts_are_the_head_s_own(
    running: Running, target: LlamaForCausalLM, answers: list[list[int]], what: str
) -> None:
    harness = start(running, 1, 5 if what == "chunks" else 512, what == "overlap")
    batch = prompts(COUNT)
    if what == "prefix hit":
        harness.run([[*batch[-1], 3]], max_tokens=2, ignore_eos=True)
        running.drafted.clear()
    ids = [harness.submit(prompt, max_tokens=LONGEST, ignore_eos=True) for prompt in batch]
    if what == "disabled":
        for _ in range(3):
            harness.step()
        harness.scheduler.set_envelope(fixed(0, 1))
        for _ in range(6):
            harness.step()
        harness.scheduler.set_envelope(fixed(STEPS, 1))
        running.drafted.clear()
    harness.drain()
    assert [harness.answers[i].token_ids for i in ids] == answers
    if what == "prefix hit":
        last = harness.answers[ids[-1]].last
        assert last is not None
        assert last.cached_tokens > 0
    check_drafts(running, target)


@pytest.mark.parametrize("overlap", [False, True])
def test_trees_are_lossless(running: Running, answers: list[list[int]], overlap: bool) -> None:
    harness = start(running, topk=4, overlap=overlap)
    assert harness.run(prompts(COUNT), max_tokens=LONGEST, ignore_eos=True) == answers
    assert running.drafted
