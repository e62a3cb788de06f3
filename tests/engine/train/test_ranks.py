"""Two ranks on a CPU, over gloo: the head of one rank, also behind a kill, and no rank outlives another."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from pilotfish_engine.distributed.collectives import Ranks
from pilotfish_engine.distributed.followers import Followers
from pilotfish_engine.errors import UsageError
from pilotfish_engine.train.answers import AnswerFile
from pilotfish_engine.train.learning import Lesson
from pilotfish_engine.train.preparing import begin, gather, survey
from pilotfish_engine.train.run import train
from pilotfish_engine.train.steps import Steps
from tests.engine.server.serving import alive, children, wait_until
from tests.engine.train.runs import START_SECONDS, curve, settings, started, wait_for_points

TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def together(whole: Path, target_folder: Path, prompts_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks, with a point of the curve at each step. A kill left it three answers and a part of one."""
    out = tmp_path_factory.mktemp("together")
    (out / "training").mkdir()
    lines = (whole / "training/answers.jsonl").read_bytes().splitlines(keepends=True)
    (out / "training/answers.jsonl").write_bytes(b"".join(lines[:3]) + lines[3][:9])
    (out / "training/run.json").write_bytes((whole / "training/run.json").read_bytes())
    process = started(target_folder, prompts_file, out, "--ranks", "2")
    assert process.wait(START_SECONDS) == 0
    return out


def state(out: Path) -> dict[str, Tensor]:
    return load_file(out / "training/state.safetensors")


def losses(out: Path) -> Tensor:
    return torch.tensor([point["loss"] for point in curve(out)])


def assert_close(found: Path, expected: Path) -> None:
    """Their losses, step by step, their weights and their moments."""
    torch.testing.assert_close(losses(found), losses(expected), atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(state(found), state(expected), atol=TOLERANCE, rtol=0)


def test_two_ranks_train_the_head_of_one(whole: Path, together: Path) -> None:
    assert len(curve(whole)) == curve(whole)[-1]["step"] > 10, "a point at each step"
    assert_close(together, whole)
    assert ", 2 ranks |" in (together / "README.md").read_text()


def test_two_ranks_write_the_answers_of_one(whole: Path, together: Path) -> None:
    """Each once, those that were there first, and that these were all behind the last."""
    one, two = (path.joinpath("training/answers.jsonl").read_bytes().splitlines() for path in (whole, together))
    assert sorted(two) == sorted(one)
    assert (two[:3], two[-1]) == (one[:3], one[-1])


def test_a_killed_run_leaves_no_rank_and_goes_on(
    whole: Path, together: Path, target_folder: Path, prompts_file: Path, tmp_path: Path
) -> None:
    """With as many ranks as before to the same bits, and with another number to the same head."""
    out, other = tmp_path / "head", tmp_path / "other"
    process = started(target_folder, prompts_file, out, "--ranks", "2")
    wait_for_points(process, out, 3)
    (follower,) = children(process.pid)
    process.send_signal(signal.SIGKILL)
    process.wait()
    wait_until(lambda: not alive(follower), 20)
    before = curve(out)
    assert before[-1]["step"] < curve(whole)[-1]["step"], "it was killed on the way"
    shutil.copytree(out, other)
    assert started(target_folder, prompts_file, out, "--ranks", "2").wait(START_SECONDS) == 0
    assert curve(out)[: len(before)] == before
    assert torch.equal(losses(out), losses(together))
    assert all(torch.equal(tensor, state(together)[name]) for name, tensor in state(out).items())
    train(settings(target_folder, prompts_file, other))
    assert_close(other, whole)


def test_a_rank_that_ends_ends_the_run(target_folder: Path, prompts_file: Path, tmp_path: Path) -> None:
    with (tmp_path / "errors").open("w") as errors:
        flags = ("--ranks", "2", "--epochs", "9999", "--save-seconds", "0")
        process = started(target_folder, prompts_file, tmp_path / "head", *flags, errors=errors)
        wait_for_points(process, tmp_path / "head", 1)
        (follower,) = children(process.pid)
        os.kill(follower, signal.SIGKILL)
        assert process.wait(60) == 1
    assert not alive(follower)
    last = (tmp_path / "errors").read_text().splitlines()[-1]
    assert last == "rank 1 of 2 ended unexpectedly (killed by SIGKILL), and the training with it"


@pytest.mark.parametrize("late", [0.0, 0.5])
def test_a_failure_waits_for_the_word_of_the_rank_that_caused_it(late: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it takes until the death of a process is seen: what it caused is known before."""
    said: list[str] = []
    monkeypatch.setattr("pilotfish_engine.distributed.followers.join", lambda rank, size, store: None)
    program = f"import os, time; time.sleep({late}); os.kill(os.getpid(), 9)"
    followers = Followers(2, [sys.executable, "-c", program], said.append)
    followers.start()
    followers.await_cause()
    followers.close()
    assert said == ["rank 1 of 2 ended unexpectedly (killed by SIGKILL), and the engine with it"]


def test_what_rank_0_refuses_ends_the_others(
    whole: Path, target_folder: Path, prompts_file: Path, tmp_path: Path
) -> None:
    """Here a folder in which nothing was answered."""
    (tmp_path / "training").mkdir()
    (tmp_path / "training/answers.jsonl").write_text('{"done": true}\n')
    (tmp_path / "training/run.json").write_bytes((whole / "training/run.json").read_bytes())
    with (tmp_path / "errors").open("w") as errors:
        process = started(target_folder, prompts_file, tmp_path, "--ranks", "2", errors=errors)
        wait_until(lambda: len(children(process.pid)) == 1, START_SECONDS)
        (follower,) = children(process.pid)
        assert process.wait(START_SECONDS) == 2
    assert not alive(follower)
    assert "led to 0 answers to train on" in (tmp_path / "errors").read_text().splitlines()[-1]


def test_more_ranks_than_gpus(
    target_folder: Path, prompts_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UsageError, match=r"^--ranks is 3, and this machine has 2 GPUs; at most 2 would work$"):
        train(settings(target_folder, prompts_file, tmp_path / "head", ranks=3))
    assert list(tmp_path.iterdir()) == []


class Threads(Ranks):
    """Ranks that are threads of this process. parts: what each has put into the sum under way."""

    def __init__(self, rank: int, parts: list[Tensor], meet: threading.Barrier) -> None:
        super().__init__(rank, len(parts), torch.device("cpu"))
        self._parts = parts
        self._meet = meet

    def all_reduce(self, x: Tensor) -> Tensor:
        self._parts[self.rank] = x.clone()
        self._meet.wait()
        x.copy_(torch.stack(self._parts).sum(dim=0))
        self._meet.wait()
        return x


@pytest.mark.parametrize("batch_tokens", [48, 128, 400])
def test_any_batch_is_shared(whole: Path, target_folder: Path, prompts_file: Path, batch_tokens: int) -> None:
    """Three ranks of a batch of one sequence, of some and of all: after each step the same weights on every rank, and
    those of one rank that took the same step."""
    chosen = settings(target_folder, prompts_file, whole, batch_tokens=batch_tokens)
    subject = survey(chosen)
    material = gather(chosen, subject, AnswerFile(whole / "training/answers.jsonl"))
    target = subject.load()
    size = 3
    parts, meet = [torch.empty(0)] * size, threading.Barrier(size, timeout=60)
    first = begin(chosen, subject, material, target)

    def steps(ranks: Ranks | None) -> Steps:
        lesson = Lesson(deepcopy(first.head), first.teacher, first.embedding, first.steps)
        return Steps(chosen, lesson, material.taught, ranks, subject.device)

    alone, shared = steps(None), [steps(Threads(rank, parts, meet)) for rank in range(size)]
    for step in range(3):
        expected = alone.take(step, 1e-3)
        found = dict[int, Tensor]()

        def take(rank: int, step: int, found: dict[int, Tensor]) -> None:
            found[rank] = shared[rank].take(step, 1e-3)

        threads = [threading.Thread(target=take, args=(rank, step, found)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for rank in range(size):
            torch.testing.assert_close(found[rank], expected, atol=TOLERANCE, rtol=0)
            weights = shared[rank].head.state_dict()
            torch.testing.assert_close(weights, alone.head.state_dict(), atol=TOLERANCE, rtol=0)
            assert all(torch.equal(tensor, shared[0].head.state_dict()[name]) for name, tensor in weights.items())
