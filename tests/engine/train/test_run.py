"""A whole run: its head serves, it goes on after a kill as if there had been none, and it refuses what cannot work."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pilotfish_engine.config import CapacityConfig, EngineConfig, ModelConfig, SpeculationConfig
from pilotfish_engine.contract.speculation import CostProfile, Envelope
from pilotfish_engine.engine import assemble, schedule
from pilotfish_engine.errors import MethodError, UsageError
from pilotfish_engine.messages import SamplingParams, Submit
from pilotfish_engine.train import fit
from pilotfish_engine.train.head import HeadSizes, TrainedHead
from pilotfish_engine.train.learning import CHAIN, Lesson, held_out
from pilotfish_engine.train.run import train
from pilotfish_engine.train.sequences import Answered
from pilotfish_engine.train.teacher import Teacher
from tests.engine.train.runs import curve, settings, started, wait_for_points
from tests.engine.train.tiny import write_target


def test_the_loss_falls_and_all_is_written(whole: Path) -> None:
    points = curve(whole)
    assert points[-1]["loss"] < 0.9 * points[0]["loss"]
    assert {path.name for path in whole.iterdir()} == {"README.md", "config.json", "model.safetensors", "training"}
    assert "acceptance length" in (whole / "README.md").read_text()
    assert (whole / "training/curve.png").read_bytes().startswith(b"\x89PNG")
    tensors = load_file(whole / "model.safetensors")
    assert tensors["midlayer.self_attn.q_proj.weight"].dtype == torch.bfloat16
    assert tensors["t2d"].sum() == tensors["d2t"].numel() == 30


def answers(target: Path, head: Path | None, prompts: list[list[int]]) -> tuple[list[list[int]], int, int]:
    """Greedy ones by the engine, one by one, and how many tokens its steps gave, and steps."""
    speculation = SpeculationConfig("None")
    if head is not None:
        fixed = Envelope(num_steps=CHAIN, num_draft_tokens=CHAIN + 1, tuning="Fixed", disable_threshold=100)
        speculation = SpeculationConfig("Auto", str(head), fixed)
    config = EngineConfig(ModelConfig(str(target), "float32", 48), speculation, CapacityConfig(4))
    parts = assemble(config, CostProfile(verify_ms=((1, 1.0),)))
    scheduler = schedule(config, parts, parts.worker)
    found, tokens, steps = [], 0, 0
    for prompt in prompts:
        params = SamplingParams(max_tokens=24, temperature=0.0)
        scheduler.submit(Submit(request_id="a", prompt=prompt, params=params))
        committed = []
        while scheduler.has_work:
            committed += [output.token_ids for output in scheduler.step()]
        found.append([token for step in committed for token in step])
        tokens += sum(map(len, committed[1:]))
        steps += len(committed) - 1
    return found, tokens, steps


def test_it_serves_and_its_acceptance_is_what_training_said(whole: Path, target_folder: Path) -> None:
    """The engine drafts with the written head; the tokens are the target's, and so many a step as `held_out` counts."""
    written = load_file(whole / "model.safetensors")
    ids = written["d2t"] + torch.arange(30)
    prompts = [[31, 3, 8, 20, 32], [31, 1, 1, 25, 14, 32], [31, 9, 32], [31, 17, 5, 2, 2, 32]]
    plain, _, _ = answers(target_folder, None, prompts)
    drafted, tokens, steps = answers(target_folder, whole, prompts)
    assert drafted == plain
    parts = assemble(EngineConfig(ModelConfig(str(target_folder), "float32")), CostProfile(verify_ms=((1, 1.0),)))
    target = parts.step.target
    head = TrainedHead(HeadSizes.beside(target.shape, 30))
    head.load_state_dict({name: tensor.float() for name, tensor in written.items() if name not in ("d2t", "t2d")})
    lesson = Lesson(head, Teacher(target, (2, 4, 5), ids), target.embed.weight, steps=5)
    greedy = [Answered(prompt + answer, len(prompt)) for prompt, answer in zip(prompts, plain, strict=True)]
    found = held_out(lesson, greedy, 128, torch.device("cpu"))
    assert found.acceptance_length == pytest.approx(tokens / steps)
    assert tokens > steps, "some drafts are accepted, or this proves little"


def test_the_same_seed_and_a_kill_in_between_give_the_same_weights(
    whole: Path, target_folder: Path, prompts_file: Path, tmp_path: Path
) -> None:
    """SIGKILL of the process while it trains, saving at every step; the next one ends where the run without a break
    did, to the bit."""
    out = tmp_path / "head"
    process = started(target_folder, prompts_file, out, "--save-seconds", "0")
    wait_for_points(process, out, 3)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = curve(out)
    train(settings(target_folder, prompts_file, out))
    after = curve(out)
    assert after[: len(before)] == before
    assert after[-1]["step"] == curve(whole)[-1]["step"]
    found, expected = load_file(out / "training/state.safetensors"), load_file(whole / "training/state.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_finished_run_is_not_run_again(whole: Path, target_folder: Path, prompts_file: Path) -> None:
    before = load_file(whole / "training/state.safetensors")
    points = curve(whole)
    train(settings(target_folder, prompts_file, whole))
    after = load_file(whole / "training/state.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert curve(whole) == points


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"seed": 4}, r"holds a run with seed 3, not 4; the same one again, or a new folder, would work"),
        ({"epochs": 5}, r"holds a run with epochs 4, not 5"),
        ({"held_out": 14}, r"--held-out is 14, and --data .* has 14 usable lines; fewer held out, or more lines"),
        ({"batch_tokens": 1 << 40}, r"training needs about .* GB with --batch-tokens .*, and .* GB are free; --batch-"),
        (
            {"batch_tokens": 1 << 40, "ranks": 2},
            r"needs about .* GB for each rank with --batch-tokens .*; --batch-tokens",
        ),
        ({"data": "/nowhere"}, r"--data /nowhere cannot be read \(No such file or directory\)"),
    ],
)
def test_settings_that_cannot_work(whole: Path, target_folder: Path, prompts_file: Path, fields, sentence) -> None:
    with pytest.raises(UsageError, match=sentence):
        train(replace(settings(target_folder, prompts_file, whole), **fields))


def test_a_folder_with_another_target_s_head(whole: Path, prompts_file: Path, tmp_path: Path) -> None:
    other = write_target(tmp_path / "other", seed=1)
    with pytest.raises(UsageError, match=r"holds a head for another target, .*; a new folder would work"):
        train(settings(other, prompts_file, whole))


def test_a_folder_that_no_run_left(target_folder: Path, prompts_file: Path) -> None:
    before = sorted(target_folder.iterdir())
    with pytest.raises(UsageError, match=r"holds config.json that no run of train-draft left; a new folder would work"):
        train(settings(target_folder, prompts_file, target_folder))
    assert sorted(target_folder.iterdir()) == before


def test_a_target_with_too_few_layers(prompts_file: Path, tmp_path: Path) -> None:
    shallow = write_target(tmp_path / "shallow", num_hidden_layers=6)
    with pytest.raises(MethodError, match=r"the target has 6 layers, .* at least 7 would work"):
        train(settings(shallow, prompts_file, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_too_little_memory_for_any_batch(
    target_folder: Path, prompts_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit, "free_bytes", lambda device: 1000)
    with pytest.raises(UsageError, match=r"0.0 GB are free; more memory would work"):
        train(settings(target_folder, prompts_file, tmp_path / "out"))


def test_answers_that_a_kill_has_cut(whole: Path, target_folder: Path, prompts_file: Path, tmp_path: Path) -> None:
    """Those that are whole are kept, the one that is not is asked for again."""
    (tmp_path / "training").mkdir()
    text = (whole / "training/answers.jsonl").read_bytes()
    lines = text.splitlines(keepends=True)
    (tmp_path / "training/answers.jsonl").write_bytes(b"".join(lines[:6]) + lines[6][:9])
    (tmp_path / "training/run.json").write_bytes((whole / "training/run.json").read_bytes())
    train(settings(target_folder, prompts_file, tmp_path, train_seconds=0.0))
    found = (tmp_path / "training/answers.jsonl").read_bytes()
    assert found.splitlines(keepends=True)[:6] == lines[:6]
    assert sorted(found.splitlines()) == sorted(text.splitlines())
