"""An engine over two processes, served: the answers are those of the model in one, and no rank outlives another."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import httpx
import pytest
import torch
from transformers import LlamaForCausalLM

from pilotfish_engine.config import CapacityConfig, EngineConfig, ModelConfig
from pilotfish_engine.contract.speculation import PLAIN, Settings
from pilotfish_engine.distributed.collectives import check_devices
from pilotfish_engine.distributed.followers import Followers
from pilotfish_engine.errors import UsageError
from pilotfish_engine.group import build
from pilotfish_engine.types import Batch, ForwardMode, Read
from pilotfish_engine.worker.leader import Leader
from pilotfish_engine.worker.target import TargetWorker
from tests.engine.model.tiny import llama
from tests.engine.server.killing import kill_within_a_stream
from tests.engine.server.serving import NAME, ROOT, Engine, alive, children, free_port, ready, wait_until
from tests.engine.test_engine import TOKENIZER

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEF"
START_SECONDS = 120  # three processes that import torch, on a busy machine


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokens are letters; no token ends an answer."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(5)
    llama(vocab_size=len(LETTERS), bos_token_id=None, eos_token_id=None).save_pretrained(folder)
    vocabulary = {"type": "BPE", "vocab": {letter: i for i, letter in enumerate(LETTERS)}, "merges": []}
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER | {"model": vocabulary}))
    return folder


@contextmanager
def served(model: Path, folder: Path, *flags: str) -> Iterator[Engine]:
    port = free_port()
    command = [
        sys.executable, "-W", "error", "-m", "pilotfish_engine.cli", "serve", str(model), "--port", str(port),
        "--dtype", "float32", "--max-running-requests", "2", "--served-name", NAME, *flags,
    ]  # fmt: skip
    variables = {"PYTHONPATH": f"{ROOT}/engine", "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=os.environ | variables, stderr=subprocess.PIPE, text=True)
    started = Engine(process, f"http://127.0.0.1:{port}", folder)
    try:
        yield started
    finally:
        process.kill()
        process.communicate()


def wait_ready(started: Engine) -> None:
    wait_until(lambda: not alive(started.process.pid) or ready(started.url), START_SECONDS)
    assert alive(started.process.pid), started.wait()


def answer(started: Engine, prompt: str) -> str:
    body = {"model": NAME, "prompt": prompt, "max_tokens": 24, "temperature": 0}
    reply = httpx.post(started.url + "/v1/completions", json=body, timeout=60, verify=False)
    text: str = reply.json()["choices"][0]["text"]
    return text


def greedy(model: Path, prompt: str) -> str:
    reference = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    tokens = [LETTERS.index(letter) for letter in prompt]
    with torch.inference_mode():
        for _ in range(24):
            tokens.append(int(reference(torch.tensor([tokens])).logits[0, -1].argmax()))
    return "".join(LETTERS[token] for token in tokens[len(prompt) :])


def test_a_group_answers_like_one_and_ends_with_any_of_its_ranks(model, tmp_path):
    with served(model, tmp_path, "--tensor-parallel-size", "2", "--method", "NGRAM", "--overlap") as started:
        wait_ready(started)
        assert list(tmp_path.iterdir()) == [], "nothing of the group is in the file system"
        for prompt in ("abcabcabcab", "hello"):
            assert answer(started, prompt) == greedy(model, prompt)
        core = started.core_pid()
        (follower,) = children(core)
        assert listeners(core) + listeners(follower) == []
        kill_within_a_stream(started, follower)
        exit_code, errors = started.wait()
        assert exit_code == 1
        assert errors.splitlines()[-1] == "rank 1 of 2 ended unexpectedly (killed by SIGKILL), and the engine with it"


def listeners(pid: int) -> list[str]:
    """Addresses beside the loopback one on which a process listens, as the kernel writes them."""
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        target = os.readlink(entry)
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            listening = fields[3] == "0A"
            address = fields[1].rpartition(":")[0]
            if listening and fields[9] in inodes and address not in ("0100007F", "0" * 24 + "01000000"):
                found.append(fields[1])
    return found


def test_the_followers_of_a_killed_model_process_end(model, tmp_path):
    with served(model, tmp_path, "--tensor-parallel-size", "2", "--method", "None") as started:
        wait_until(lambda: any(children(child) for child in children(started.process.pid)), START_SECONDS)
        core = started.core_pid()
        wait_until(lambda: len(children(core)) == 1, START_SECONDS)
        (follower,) = children(core)
        os.kill(core, signal.SIGKILL)
        wait_until(lambda: not alive(follower), 20)
        exit_code, errors = started.wait()
        assert (exit_code, "the model process ended unexpectedly" in errors) == (1, True)


def test_a_size_that_does_not_fit_the_model_is_refused_before_another_process_starts(model):
    config = EngineConfig(ModelConfig(str(model)), capacity=CapacityConfig(tensor_parallel_size=3))
    before = children(os.getpid())  # of other tests
    with pytest.raises(UsageError, match=r"is 3, and .*model. has 4 attention heads, 2 KV heads.*; 1 or 2 would work"):
        build(config, print)
    assert children(os.getpid()) == before


class Failing:
    def settings_for(self, batch: Batch) -> Settings:
        return PLAIN

    def start(self, batch: Batch, settings: Settings) -> Read:
        raise IndexError("no such row")


def test_a_step_that_fails_on_rank_0_ends_the_group():
    """The others are in the middle of the same step."""
    said: list[str] = []
    followers = Followers(1, (), said.append)
    leader = Leader(cast(TargetWorker, Failing()), followers)
    with pytest.raises(IndexError):
        leader.launch(Batch(ForwardMode.DECODE, rows=[0]))
    assert said == ["rank 0 failed in a step (IndexError: no such row), and the engine with it"]
    followers.close()


@pytest.mark.parametrize(("found", "sentence"), [(1, "has 1 GPU; at most 1 would"), (2, "has 2 GPUs; at most 2 would")])
def test_more_ranks_than_gpus_are_refused(monkeypatch, found, sentence):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: found)
    check_devices(found)
    with pytest.raises(UsageError, match=sentence):
        check_devices(4)
