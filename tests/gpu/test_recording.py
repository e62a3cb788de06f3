"""A recording that fails leaves the next ones, the graphs there are and the random generator as they were; a thread
that never worked on the device records; a step that is replayed allocates nothing."""

from __future__ import annotations

import threading

import pytest
import torch

from pilotfish_engine.contract.speculation import PLAIN, Settings
from pilotfish_engine.worker.graphs import StepGraphs
from pilotfish_engine.worker.recording import CudaRecorder
from tests.engine.conformance.conftest import (  # noqa: F401 (fixtures)
    checkpoints,
    engine,
    prompts,
    settings_of,
    target,
    twin,
)
from tests.engine.conformance.harness import NUM_STEPS, Harness, fixed

SIZE = 512


def product() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(SIZE, SIZE, device="cuda")
    return x, x @ x


def copied_to_the_host() -> torch.Tensor:
    return torch.ones(1, device="cuda") * torch.ones(1, device="cuda").item()


def too_large() -> torch.Tensor:
    return torch.empty(1 << 50, dtype=torch.uint8, device="cuda")


def broken() -> torch.Tensor:
    torch.ones(SIZE, device="cuda") + 1
    raise RuntimeError("half way")


@pytest.mark.parametrize("fails", [copied_to_the_host, too_large, broken])
def test_a_failed_recording_leaves_everything_as_it_was(fails):
    record = CudaRecorder()
    x, expected = product()
    before = record(lambda: x @ x)
    for _ in range(3):
        with pytest.raises(RuntimeError):
            record(fails)
        torch.rand(1, device="cuda")
        assert torch.equal(before(), expected)
        after = record(lambda: x @ x + 1)
        assert torch.equal(after(), expected + 1)
        assert torch.equal(before(), expected)


def test_a_thread_of_its_own_records():
    record = CudaRecorder()
    x, expected = product()
    found = []

    def work() -> None:
        with torch.inference_mode():
            found.append(record(lambda: torch.nn.functional.linear(x, x.T.contiguous()))())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    torch.testing.assert_close(found[0], expected, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize(("method", "draft", "num_steps", "topk"), settings_of([(0, 1), (NUM_STEPS, 4)], "equal"))
def test_a_replayed_step_allocates_nothing(engine, method, draft, num_steps, topk):  # noqa: F811
    parts = engine(method, draft, 16)
    graphs = StepGraphs(parts.step, CudaRecorder())
    harness = Harness(parts)
    harness.scheduler.set_envelope(fixed(num_steps, topk))
    for prompt in prompts(3, seed=51):
        harness.submit(prompt, max_tokens=40, ignore_eos=True)
    harness.scheduler._admit()
    harness.scheduler._extend()
    harness.scheduler._collect()
    settings = PLAIN if num_steps == 0 else Settings(num_steps=num_steps, topk=topk, num_draft_tokens=8)
    rows = parts.step.state.rows([0, 1, 2])
    with torch.inference_mode():
        for _ in range(2):
            graphs(rows, settings)
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        for _ in range(3):
            graphs.steps.get((3, settings, rows.traits), lambda _: pytest.fail("not recorded"))([0, 1, 2])
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
