"""`pilotfish-engine train-draft`: everything in order, each refusal before the first step, all of it resumable."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm  # type: ignore[import-untyped]

from pilotfish_engine.config import CapacityConfig, EngineConfig, ModelConfig, SpeculationConfig
from pilotfish_engine.contract.speculation import CostProfile
from pilotfish_engine.engine import assemble, resolve_dtype, schedule
from pilotfish_engine.errors import UsageError
from pilotfish_engine.model.checkpoint import open_checkpoint
from pilotfish_engine.model.decoder import Decoder
from pilotfish_engine.model.loading import load, read_shape
from pilotfish_engine.source import default_name, resolve
from pilotfish_engine.tokenizer import load as load_tokenizer
from pilotfish_engine.train import fit
from pilotfish_engine.train.answers import TEMPERATURES, AnswerFile, generate
from pilotfish_engine.train.head import HeadSizes, TrainedHead, initialise
from pilotfish_engine.train.learning import CHAIN, Lesson, held_out
from pilotfish_engine.train.progress import Progress, RunFolder
from pilotfish_engine.train.prompts import Prompt, read_prompts, set_apart
from pilotfish_engine.train.publish import draw, publish, write_card
from pilotfish_engine.train.sequences import Answered, collate, cut_to, plan
from pilotfish_engine.train.settings import TrainSettings
from pilotfish_engine.train.teacher import Teacher
from pilotfish_engine.train.vocabulary import DraftVocabulary, choose

WARM_UP = 0.03  # of the run
POINTS = 40  # of the curve, at least
CLIP = 1.0
CHUNK = 4096  # prompt tokens that go through the target at once

FINGERPRINT = ("model.norm.weight", "model.layers.0.self_attn.q_proj.weight")


@dataclass(frozen=True)
class Material:
    """What there is to learn from: `own`: the target's words among `taught`."""

    taught: Sequence[Answered]
    held_out: Sequence[Answered]
    own: int
    skipped: int


def train(settings: TrainSettings) -> Path:
    """Returns the head's folder. Raises UsageError."""
    path = resolve(settings.target)
    shape = read_shape(path)
    aux_layers = fit.aux_layers(shape)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.enable_cudnn_sdp(False)  # it makes a plan for each new shape, and batches here have many
    dtype = resolve_dtype(settings.dtype, device)
    sizes = HeadSizes.beside(shape, min(settings.draft_vocab, shape.vocab_size))
    fit.check_memory(settings, shape, sizes, dtype, device)
    prompts, skipped = read_prompts(Path(settings.data), load_tokenizer(path), settings.max_length // 2)
    if skipped.lines:
        print(skipped, flush=True)
    apart, others = set_apart(prompts, settings.held_out, settings.seed)
    if not others:
        raise UsageError(
            f"--held-out is {settings.held_out}, and --data {settings.data} has {len(prompts)} usable lines; "
            "fewer held out, or more lines, would work"
        )
    folder = RunFolder(Path(settings.out))
    folder.claim(_identity(settings, path))
    answers = AnswerFile(folder.answers)
    target = _answered(settings, answers, apart, others, dtype, device)
    material = _material(settings, answers, apart, others, sum(map(len, skipped.lines.values())))
    vocabulary = _vocabulary(material, sizes)
    teacher = Teacher(target, aux_layers, vocabulary.token_ids.to(device))
    head = TrainedHead(replace(sizes, draft_vocab_size=len(vocabulary.token_ids)))
    _, features = teacher.read(collate(material.held_out[:1]).tokens.to(device))
    initialise(head, target, vocabulary.token_ids, features.flatten(0, 1), settings.seed)
    head.to(device)
    lesson = Lesson(head, teacher, target.embed.weight, settings.draft_steps)
    progress = _Course(settings, lesson, material, folder, vocabulary, device).run()
    _finish(settings, folder, head, material, vocabulary, progress, device)
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


def _answered(
    settings: TrainSettings,
    answers: AnswerFile,
    apart: Sequence[Prompt],
    others: Sequence[Prompt],
    dtype: torch.dtype,
    device: torch.device,
) -> Decoder:
    """The target, which has answered what has no answer yet. Held-out prompts are always answered by the target."""
    if answers.done:
        return load(resolve(settings.target), dtype, device)
    asked = [(prompt, 0.0) for prompt in apart]
    unanswered = [prompt for prompt in others if prompt.answer is None]
    asked += [(prompt, TEMPERATURES[n % len(TEMPERATURES)]) for n, prompt in enumerate(unanswered)]
    asked = [(prompt, temperature) for prompt, temperature in asked if prompt.line not in answers.answers]
    capacity = CapacityConfig(
        max_running_requests=settings.max_running_requests,
        kv_tokens=settings.max_running_requests * settings.max_length,
        chunk_size=CHUNK,
    )
    config = EngineConfig(
        model=ModelConfig(settings.target, settings.dtype, settings.max_length),
        speculation=SpeculationConfig(method="None"),
        capacity=capacity,
    )
    parts = assemble(config, CostProfile(verify_ms=((1, 1.0),)))
    core = schedule(config, parts, parts.worker)
    answers.write(generate(core, asked, settings.answer_tokens, settings.seed, settings.generate_seconds))
    return parts.step.target


def _material(
    settings: TrainSettings, answers: AnswerFile, apart: Sequence[Prompt], others: Sequence[Prompt], skipped: int
) -> Material:
    def own(prompts: Sequence[Prompt]) -> list[Answered]:
        return [answers.answers[one.line].behind(one) for one in prompts if one.line in answers.answers]

    given = [Answered([*p.token_ids, *p.answer], len(p.token_ids)) for p in others if p.answer is not None]
    taught, tried = cut_to(own(others), settings.max_length), cut_to(own(apart), settings.max_length)
    both = taught + cut_to(given, settings.max_length)
    if not both or not tried:
        raise UsageError(
            f"--data {settings.data} led to {len(both)} answers to train on and {len(tried)} held out that have two "
            "tokens or more; more prompts, or more --generate-seconds, would work"
        )
    return Material(both, tried, len(taught), skipped)


def _vocabulary(material: Material, sizes: HeadSizes) -> DraftVocabulary:
    """By the target's own words where it wrote any."""
    counted = material.taught[: material.own] or material.taught
    vocabulary = choose(counted, sizes.draft_vocab_size, sizes.vocab_size)
    print(f"draft vocabulary: {len(vocabulary.token_ids)} tokens, {vocabulary.coverage:.2%} of the answers", flush=True)
    return vocabulary


class _Course:
    """The optimizer's steps from wherever the run was to its end."""

    def __init__(
        self,
        settings: TrainSettings,
        lesson: Lesson,
        material: Material,
        folder: RunFolder,
        vocabulary: DraftVocabulary,
        device: torch.device,
    ) -> None:
        self._settings = settings
        self._lesson = lesson
        self._material = material
        self._folder = folder
        self._vocabulary = vocabulary
        self._device = device
        self._lengths = [len(one.token_ids) for one in material.taught]
        self._epoch = (-1, list[list[int]]())
        self._optimizer = torch.optim.AdamW(lesson.head.parameters(), betas=(0.9, 0.95), weight_decay=0.01)
        self._progress = folder.load(lesson.head, self._optimizer)
        self._batches = len(self._batches_of(0))
        self._losses: list[torch.Tensor] = []

    def run(self) -> Progress:
        progress, settings = self._progress, self._settings
        total = settings.epochs * self._batches
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
        share = self._progress.step / (self._settings.epochs * self._batches)
        if self._settings.train_seconds is None:
            return share
        return max(share, self._progress.seconds / max(1e-9, self._settings.train_seconds))

    def _batches_of(self, epoch: int) -> list[list[int]]:
        if self._epoch[0] != epoch:
            self._epoch = (epoch, plan(self._lengths, self._settings.batch_tokens, self._settings.seed, epoch))
        return self._epoch[1]

    def _step(self) -> None:
        progress = self._progress
        epoch, index = divmod(progress.step, self._batches)
        batches = self._batches_of(epoch)
        numbers = batches[index % len(batches)]  # epochs may differ by a batch
        share = self._share()
        warm = min(1.0, share / WARM_UP) if share < WARM_UP else 1.0
        rate = self._settings.learning_rate * max(0.02, warm) * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * share)))
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        batch = collate([self._material.taught[number] for number in numbers]).to(self._device)
        loss = self._lesson.loss(batch)
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self._lesson.head.parameters(), CLIP)
        self._optimizer.step()
        progress.step += 1
        self._losses.append(loss.detach())

    def _try_and_save(self) -> str:
        """Adds a point to the curve; returns it in words."""
        progress = self._progress
        found = held_out(self._lesson, self._material.held_out, self._settings.batch_tokens, self._device)
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
        self._folder.save(progress, self._lesson.head, self._optimizer)
        publish(self._folder.out, self._lesson.head, self._vocabulary, self._lesson.teacher.shape)
        agreed = " ".join(f"{share:.2f}" for share in found.agreed)
        return f"loss {loss:.3f}, acceptance {found.acceptance_length:.2f} (by depth {agreed})"


def _finish(
    settings: TrainSettings,
    folder: RunFolder,
    head: TrainedHead,
    material: Material,
    vocabulary: DraftVocabulary,
    progress: Progress,
    device: torch.device,
) -> None:
    places = sum(one.roots for one in material.taught)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"
    facts = {
        "answers": f"{len(material.taught)}, {material.own} of them the target's own; {places} places to draft from",
        "lines skipped": str(material.skipped),
        "coverage of the draft's vocabulary": f"{vocabulary.coverage:.2%} of the answers' tokens",
        "steps": f"{progress.step} of {settings.batch_tokens} tokens at most, {settings.epochs} epochs at most",
        "learning rate": f"{settings.learning_rate:g} at its highest, cosine",
        "training-time test": f"{settings.draft_steps} steps",
        "time": f"{progress.seconds:.0f} s of training on {where}",
        "seed": str(settings.seed),
    }
    write_card(folder.out, default_name(settings.target), head, facts, progress.curve, CHAIN)
    if not draw(folder.picture, progress.curve):
        print("no picture of the curve: matplotlib is not installed", flush=True)
    last = progress.curve[-1]
    print(
        f"{folder.out}: acceptance length {last['acceptance_length']:.2f} with chains of {CHAIN}, held out", flush=True
    )
