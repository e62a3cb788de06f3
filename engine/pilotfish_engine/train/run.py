"""`pilotfish-engine train-draft`: everything in order, each refusal before the first step, all of it resumable."""

from __future__ import annotations

import hashlib
import math
import time
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm  # type: ignore[import-untyped]

from pilotfish_engine.distributed.collectives import check_devices
from pilotfish_engine.errors import UsageError
from pilotfish_engine.model.checkpoint import open_checkpoint
from pilotfish_engine.model.decoder import Decoder
from pilotfish_engine.source import default_name
from pilotfish_engine.train.answers import AnswerFile, counted
from pilotfish_engine.train.group import Group
from pilotfish_engine.train.learning import CHAIN, Lesson, held_out
from pilotfish_engine.train.preparing import Material, Subject, answering, begin, gather, survey
from pilotfish_engine.train.progress import Progress, RunFolder
from pilotfish_engine.train.publish import draw, publish, write_card
from pilotfish_engine.train.settings import TrainSettings
from pilotfish_engine.train.steps import Steps

WARM_UP = 0.03  # of the run
POINTS = 40  # of the curve, at least

FINGERPRINT = ("model.norm.weight", "model.layers.0.self_attn.q_proj.weight")


def train(settings: TrainSettings) -> Path:
    """Returns the head's folder. Raises UsageError."""
    check_devices(settings.ranks, "--ranks")
    subject = survey(settings)
    if subject.skipped.lines:
        print(subject.skipped, flush=True)
    if not subject.others:
        raise UsageError(
            f"--held-out is {settings.held_out}, and --data {settings.data} has {subject.usable} usable lines; "
            "fewer held out, or more lines, would work"
        )
    folder = RunFolder(Path(settings.out))
    folder.claim(_identity(settings, subject.path))
    with Group(settings) as group:
        answers = AnswerFile(folder.answers)
        target = None if answers.done else _answered(settings, subject, answers, group)
        material = gather(settings, subject, answers)
        group.learn()
        words = f"{len(material.vocabulary.token_ids)} tokens, {material.vocabulary.coverage:.2%} of the answers"
        print(f"draft vocabulary: {words}", flush=True)
        lesson = begin(settings, subject, material, target or subject.load())
        progress = _Course(settings, lesson, material, folder, subject, group).run()
        _finish(settings, folder, lesson, material, subject, progress)
    return folder.out


def _identity(settings: TrainSettings, path: Path) -> dict[str, Any]:
    checkpoint = open_checkpoint(path)
    digest = hashlib.sha256(repr(checkpoint.shape).encode())
    for name in FINGERPRINT:
        digest.update(checkpoint.read(name).float().numpy().tobytes())
    data = hashlib.sha256(Path(settings.data).read_bytes()).hexdigest()
    return {
        "target": digest.hexdigest(),
        "target_name": default_name(settings.target),
        "data": data,
        **settings.identity(),
    }


def _answered(settings: TrainSettings, subject: Subject, answers: AnswerFile, group: Group) -> Decoder:
    """The target, which has answered what had no answer yet."""
    asked = [one for one in subject.asked() if one[0].line not in answers.answers]
    target, own = answering(settings, group.share_out(asked))
    answers.write(counted(group.together(own, asked), len(asked)))
    return target


class _Course:
    """The optimizer's steps from wherever the run was to its end."""

    def __init__(
        self,
        settings: TrainSettings,
        lesson: Lesson,
        material: Material,
        folder: RunFolder,
        subject: Subject,
        group: Group,
    ) -> None:
        self._settings = settings
        self._lesson = lesson
        self._material = material
        self._folder = folder
        self._device = subject.device
        self._group = group
        self._steps = Steps(settings, lesson, material.taught, group.ranks, subject.device)
        self._progress = folder.load(lesson.head, self._steps.optimizer)
        self._steps.agree()
        self._total = settings.epochs * self._steps.per_epoch
        self._losses: list[torch.Tensor] = []

    def run(self) -> Progress:
        progress, settings, total = self._progress, self._settings, self._total
        every = max(1, total // POINTS)
        saved = begun = time.monotonic() - progress.seconds
        saved += progress.seconds
        with tqdm(total=total, initial=progress.step, desc="training", unit="step", dynamic_ncols=True) as bar:
            while progress.step < total and self._share() < 1:
                self._step()
                progress.seconds = time.monotonic() - begun
                bar.update()
                if progress.step % every == 0 or time.monotonic() - saved > settings.save_seconds:
                    bar.set_postfix_str(self._try_and_save())
                    saved = time.monotonic()
            if self._losses or not progress.curve:
                bar.set_postfix_str(self._try_and_save())
        return progress

    def _share(self) -> float:
        """Of the run that is done."""
        share = self._progress.step / self._total
        if self._settings.train_seconds is None:
            return share
        return max(share, self._progress.seconds / max(1e-9, self._settings.train_seconds))

    def _step(self) -> None:
        step, share = self._progress.step, self._share()
        warm = min(1.0, share / WARM_UP) if share < WARM_UP else 1.0
        rate = self._settings.learning_rate * max(0.02, warm) * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * share)))
        self._group.take(step, rate)
        self._losses.append(self._steps.take(step, rate))
        self._progress.step += 1

    def _try_and_save(self) -> str:
        """Adds a point to the curve; returns it in words."""
        progress = self._progress
        room = self._settings.batch_tokens // self._settings.ranks  # what is known to fit one rank
        found = held_out(self._lesson, self._material.held_out, room, self._device)
        loss = float(torch.stack(self._losses).mean()) if self._losses else math.nan
        self._losses.clear()
        progress.curve.append(
            {
                "step": progress.step,
                "seconds": round(progress.seconds, 1),
                "loss": loss,
                "acceptance_length": found.acceptance_length,
                "agreed": list(found.agreed),
            }
        )
        self._folder.save(progress, self._lesson.head, self._steps.optimizer)
        publish(self._folder.out, self._lesson.head, self._material.vocabulary, self._lesson.teacher.shape)
        agreed = " ".join(f"{share:.2f}" for share in found.agreed)
        return f"loss {loss:.3f}, acceptance {found.acceptance_length:.2f} (by depth {agreed})"


def _finish(
    settings: TrainSettings,
    folder: RunFolder,
    lesson: Lesson,
    material: Material,
    subject: Subject,
    progress: Progress,
) -> None:
    places = sum(one.roots for one in material.taught)
    where = torch.cuda.get_device_name(subject.device) if subject.device.type == "cuda" else "a CPU"
    if settings.ranks > 1:
        where += f", {settings.ranks} ranks"
    facts = {
        "answers": f"{len(material.taught)}, {material.own} of them the target's own; {places} places to draft from",
        "lines skipped": str(sum(map(len, subject.skipped.lines.values()))),
        "coverage of the draft's vocabulary": f"{material.vocabulary.coverage:.2%} of the answers' tokens",
        "steps": f"{progress.step} of {settings.batch_tokens} tokens at most, {settings.epochs} epochs at most",
        "learning rate": f"{settings.learning_rate:g} at its highest, cosine",
        "training-time test": f"{settings.draft_steps} steps",
        "time": f"{progress.seconds:.0f} s of training on {where}",
        "seed": str(settings.seed),
    }
    write_card(folder.out, default_name(settings.target), lesson.head, facts, progress.curve, CHAIN)
    if not draw(folder.picture, progress.curve):
        print("no picture of the curve: matplotlib is not installed", flush=True)
    last = progress.curve[-1]
    print(
        f"{folder.out}: acceptance length {last['acceptance_length']:.2f} with chains of {CHAIN}, held out", flush=True
    )
