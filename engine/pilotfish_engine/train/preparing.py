"""Makes what every rank needs for itself, the same on each. It comes from the settings and from files that do not
change meanwhile: what the target is asked, what there is to learn from, and the head at its beginning.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from pilotfish_engine.config import CapacityConfig, EngineConfig, ModelConfig, SpeculationConfig
from pilotfish_engine.contract.speculation import CostProfile
from pilotfish_engine.core import Core
from pilotfish_engine.engine import assemble, resolve_dtype, schedule
from pilotfish_engine.errors import UsageError
from pilotfish_engine.model.decoder import Decoder
from pilotfish_engine.model.loading import load, read_shape
from pilotfish_engine.reservation import SLACK
from pilotfish_engine.source import resolve
from pilotfish_engine.tokenizer import load as load_tokenizer
from pilotfish_engine.train import fit
from pilotfish_engine.train.answers import TEMPERATURES, Answer, AnswerFile, generate
from pilotfish_engine.train.head import HeadSizes, TrainedHead, initialise
from pilotfish_engine.train.learning import Lesson
from pilotfish_engine.train.prompts import Prompt, Skipped, read_prompts, set_apart
from pilotfish_engine.train.sequences import Answered, collate, cut_to
from pilotfish_engine.train.settings import TrainSettings
from pilotfish_engine.train.teacher import Teacher
from pilotfish_engine.train.vocabulary import DraftVocabulary, choose

CHUNK = 4096  # prompt tokens that go through the target at once


@dataclass(frozen=True)
class Subject:
    """The target and what it is asked. usable: lines of the data. apart: of these held out; others: trained on."""

    path: Path
    device: torch.device
    dtype: torch.dtype
    aux_layers: tuple[int, int, int]
    sizes: HeadSizes
    usable: int
    apart: Sequence[Prompt]
    others: Sequence[Prompt]
    skipped: Skipped

    def asked(self) -> list[tuple[Prompt, float]]:
        """Prompts of which the target writes the answer, at a temperature each. Held-out ones are always among them."""
        unanswered = [prompt for prompt in self.others if prompt.answer is None]
        return [(prompt, 0.0) for prompt in self.apart] + [
            (prompt, TEMPERATURES[number % len(TEMPERATURES)]) for number, prompt in enumerate(unanswered)
        ]

    def load(self) -> Decoder:
        return load(self.path, self.dtype, self.device)


def survey(settings: TrainSettings, rank: int = 0) -> Subject:
    """On this process's device. Raises UsageError for what cannot work."""
    path = resolve(settings.target)
    shape = read_shape(path)
    aux_layers = fit.aux_layers(shape)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.enable_cudnn_sdp(False)  # it makes a plan for each new shape, and batches here have many
    dtype = resolve_dtype(settings.dtype, device)
    sizes = HeadSizes.beside(shape, min(settings.draft_vocab, shape.vocab_size))
    if rank == 0 or device.type == "cuda":  # the memory of a CPU holds all ranks, and rank 0 has begun to fill it
        fit.check_memory(settings, shape, sizes, dtype, device)
    prompts, skipped = read_prompts(Path(settings.data), load_tokenizer(path), settings.max_length // 2)
    apart, others = set_apart(prompts, settings.held_out, settings.seed)
    return Subject(path, device, dtype, aux_layers, sizes, len(prompts), apart, others, skipped)


def engine(settings: TrainSettings) -> tuple[Decoder, Core]:
    """The target as it answers, without a draft, and its loop."""
    capacity = CapacityConfig(
        max_running_requests=settings.max_running_requests,
        kv_tokens=settings.max_running_requests * (settings.max_length + SLACK),  # all have room as the longest
        chunk_size=CHUNK,
    )
    config = EngineConfig(
        model=ModelConfig(settings.target, settings.dtype, settings.max_length),
        speculation=SpeculationConfig(method="None"),
        capacity=capacity,
    )
    parts = assemble(config, CostProfile(verify_ms=((1, 1.0),)))
    return parts.step.target, schedule(config, parts, parts.worker)


def answering(
    settings: TrainSettings, asked: Sequence[tuple[Prompt, float]]
) -> tuple[Decoder, Iterator[tuple[Prompt, Answer]]]:
    """The target, and its answers, which it writes as they are taken."""
    target, core = engine(settings)
    return target, generate(core, asked, settings.answer_tokens, settings.seed, settings.generate_seconds)


@dataclass(frozen=True)
class Material:
    """What there is to learn from. own: how many of `taught`, from the first, are the target's words. vocabulary: by
    these where there are any."""

    taught: Sequence[Answered]
    held_out: Sequence[Answered]
    own: int
    vocabulary: DraftVocabulary


def gather(settings: TrainSettings, subject: Subject, answers: AnswerFile) -> Material:
    """Raises UsageError where there is nothing to learn from, or to measure on."""

    def own(prompts: Sequence[Prompt]) -> list[Answered]:
        return [answers.answers[one.line].behind(one) for one in prompts if one.line in answers.answers]

    longest = settings.max_length
    given = [Answered([*p.token_ids, *p.answer], len(p.token_ids)) for p in subject.others if p.answer is not None]
    taught, tried = cut_to(own(subject.others), longest), cut_to(own(subject.apart), longest)
    both = taught + cut_to(given, longest)
    if not both or not tried:
        raise UsageError(
            f"--data {settings.data} led to {len(both)} answers to train on and {len(tried)} held out that have two "
            "tokens or more; more prompts, or more --generate-seconds, would work"
        )
    vocabulary = choose(taught or both, subject.sizes.draft_vocab_size, subject.sizes.vocab_size)
    return Material(both, tried, len(taught), vocabulary)


def begin(settings: TrainSettings, subject: Subject, material: Material, target: Decoder) -> Lesson:
    """With a head that has learnt nothing yet."""
    token_ids = material.vocabulary.token_ids
    teacher = Teacher(target, subject.aux_layers, token_ids.to(subject.device))
    head = TrainedHead(replace(subject.sizes, draft_vocab_size=len(token_ids)))
    _, features = teacher.read(collate(material.held_out[:1]).tokens.to(subject.device))
    initialise(head, target, token_ids, features.flatten(0, 1), settings.seed)
    head.to(subject.device)
    return Lesson(head, teacher, target.embed.weight, settings.draft_steps)
