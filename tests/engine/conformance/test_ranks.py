"""Rule 13: two processes of a tensor-parallel group commit the same tokens, those of one process and of plain decoding,
by every method; and a rank that would decide otherwise follows rank 0."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pilotfish_engine.config import CONFIG
from pilotfish_engine.contract.speculation import CostProfile
from pilotfish_engine.distributed.collectives import Ranks
from pilotfish_engine.distributed.followers import Followers
from pilotfish_engine.engine import Parts, assemble
from pilotfish_engine.scheduler.scheduler import Scheduler
from pilotfish_engine.worker.leader import Leader, Load
from tests.engine.conformance import models
from tests.engine.conformance.conftest import prompts, variants
from tests.engine.conformance.harness import NUM_STEPS, Harness, configuration, fixed
from tests.engine.conformance.test_processors import GRAMMARS, LONE_DIGITS

PROFILE = CostProfile(verify_ms=((1, 1.0),))
BATCH = prompts(5, seed=61, shortest=20)
PARAMS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8, "seed": 5, "top_k": 20, "logprobs": 2},
    {"frequency_penalty": 0.6, "logit_bias": ((7, 2.0),)},
    {"temperature": 1.1, "seed": 6, "top_p": 0.9},
    {"grammar": LONE_DIGITS, "min_tokens": 16},
]


@dataclass
class Group:
    """This process as rank 0, and one follower with an opinion of its own or without."""

    followers: Followers
    ranks: Ranks
    journal: Path

    def load(self, pair: models.Pair, method: str, num_steps: int, topk: int) -> Parts:
        config = configuration(pair.target, method, pair.draft, 16, num_steps, topk, ranks=2)
        self.followers.send(Load(CONFIG.dump_json(config), PROFILE.model_dump_json().encode()))
        parts = assemble(config, PROFILE, lambda: self.ranks)
        return replace(parts, worker=Leader(parts.worker, self.followers))  # type: ignore[arg-type]

    def written(self, steps: int) -> list[list[list[int]]]:
        """What the follower's decode steps committed since this was last asked; it may be a step behind."""
        deadline = time.monotonic() + 20
        while True:
            lines = self.journal.read_text().splitlines()
            if len(lines) >= steps or time.monotonic() > deadline:
                break
            time.sleep(0.01)
        self.journal.write_text("")
        return [json.loads(line) for line in lines]


@contextmanager
def group(folder: Path, opinion: str) -> Iterator[Group]:
    if torch.cuda.is_available() and torch.cuda.device_count() < 2:
        pytest.skip("two ranks need two GPUs, or a machine without any")
    journal = folder / opinion
    journal.touch()
    script = str(Path(__file__).with_name("ranked.py"))
    followers = Followers(2, [sys.executable, script, str(journal), opinion], end=lambda sentence: None)
    try:
        yield Group(followers, followers.start(), journal)
    finally:
        followers.close()


@pytest.fixture(scope="module", params=["honest", "contrary"])
def two(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    with group(tmp_path_factory.mktemp("ranks"), request.param) as made:
        yield made


def story(parts: Parts, settings: Sequence[tuple[int, int]], overlap: bool) -> tuple[Harness, list[list[int]]]:
    """Chunked prompts, a prefix hit, greedy, seeded and ruled requests side by side, a retraction, and each of
    `settings` in turn."""
    harness = Harness(parts)
    harness.scheduler = Scheduler(harness.worker, 24, None, overlap, grammars=GRAMMARS.compile)
    harness.scheduler.set_envelope(fixed(*settings[0]))
    first = harness.submit(BATCH[0], max_tokens=2, ignore_eos=True)
    harness.drain()
    ids = [
        harness.submit(prompt, max_tokens=16, ignore_eos=True, **params)
        for prompt, params in zip(BATCH, PARAMS, strict=True)
    ]
    for number, (num_steps, topk) in enumerate(settings):
        harness.scheduler.set_envelope(fixed(num_steps, topk))
        for _ in range(2):
            harness.step()
        if number == 1:
            harness.scheduler.retract_latest()
    harness.drain()
    last = harness.answers[ids[0]].last
    assert last is not None
    assert last.cached_tokens >= 16
    assert harness.scheduler.tally.retractions > 0
    return harness, [harness.answers[i].token_ids for i in [first, *ids]]


@pytest.mark.parametrize(("method", "draft"), variants("random", "equal"))
def test_ranks_commit_the_same_tokens(
    two: Group, engine: Callable[..., Parts], checkpoints: Callable[..., models.Pair], method: str, draft: str
) -> None:
    num_steps, topk = models.within(method, draft, NUM_STEPS, 4)
    settings = [(num_steps, topk), (num_steps, 1), (0, 1), (num_steps, topk)]
    overlap = two.journal.name == "honest"
    one = engine(method, draft, 16)
    harness, answers = story(two.load(checkpoints(method, draft), method, num_steps, topk), settings, overlap)
    assert answers == story(one, settings, overlap)[1]
    assert answers == story(one, [(0, 1)] * len(settings), overlap=False)[1]
    steps = [result.committed() for _, result in harness.worker.steps]
    assert any(len(tokens) > 1 for step in steps for tokens in step) or draft == "random"
    assert two.written(len(steps)) == steps
