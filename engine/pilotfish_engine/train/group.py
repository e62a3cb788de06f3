"""Several ranks train one head: rank 0 is the process that a person started, and the only one that writes to the run's
folder or prints. The others (`follower`) read that folder, and do what rank 0 says, in its order.

Prompts are shared out by line, and so is every batch (`steps`). When a step is taken, at what rate and whether there is
another, is rank 0's choice. The others end with rank 0; one that ends before it ends the run.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, repeat
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import BinaryIO

import msgspec

from pilotfish_engine.distributed.children import received
from pilotfish_engine.distributed.collectives import Ranks
from pilotfish_engine.distributed.followers import Followers
from pilotfish_engine.errors import UsageError
from pilotfish_engine.model.decoder import Decoder
from pilotfish_engine.train.answers import Answer, AnswerFile
from pilotfish_engine.train.preparing import answering, begin, gather, survey
from pilotfish_engine.train.progress import RunFolder
from pilotfish_engine.train.prompts import Prompt
from pilotfish_engine.train.settings import TrainSettings
from pilotfish_engine.train.steps import Steps

COMMAND = (sys.executable, "-m", "pilotfish_engine.train.follower")


class Begin(msgspec.Struct, frozen=True, tag=True):
    settings: TrainSettings


class Write(msgspec.Struct, frozen=True, tag=True):
    """Numbers of the lines whose answers the follower writes; it replies with each, and that these were all."""

    lines: list[int]


class Learn(msgspec.Struct, frozen=True, tag=True):
    """The folder holds all answers, and what is kept of the steps so far. Steps follow."""


class Take(msgspec.Struct, frozen=True, tag=True):
    step: int
    rate: float


class Wrote(msgspec.Struct, frozen=True, tag=True):
    line: int
    temperature: float
    tokens: list[int]


class WroteAll(msgspec.Struct, frozen=True, tag=True):
    pass


Message = Begin | Write | Learn | Take
Reply = Wrote | WroteAll
Asked = Sequence[tuple[Prompt, float]]
Answers = Iterator[tuple[Prompt, Answer]]


class Group:
    """The other ranks as rank 0 sees them, while the context lasts; with settings of one rank there are none."""

    def __init__(self, settings: TrainSettings) -> None:
        self.ranks: Ranks | None = None
        self._settings = settings
        self._followers = Followers(settings.ranks, COMMAND, _end, work="training", replies=True)

    def __enter__(self) -> Group:
        if self._settings.ranks > 1:
            try:
                self.ranks = self._followers.start()
                self._followers.send(Begin(self._settings))
            except BaseException:
                self._followers.close()
                raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        failed = kind is not None and issubclass(kind, Exception) and not issubclass(kind, UsageError)
        if failed and self._settings.ranks > 1:
            self._followers.await_cause()
        self._followers.close()

    def share_out(self, asked: Asked) -> Asked:
        """Rank 0's part of what the target is asked; the others begin theirs."""
        size = self._settings.ranks
        for rank in range(1, size):
            self._followers.send_to(rank, Write([prompt.line for prompt, _ in asked[rank::size]]))
        return asked[::size]

    def together(self, own: Answers, asked: Asked) -> Answers:
        """Rank 0's own answers, and those of the others as they come."""
        come = SimpleQueue[Reply]()
        for pipe in self._followers.replies:
            threading.Thread(target=_put, args=(pipe, come), daemon=True).start()
        return _merged(own, come, self._settings.ranks - 1, {prompt.line: prompt for prompt, _ in asked})

    def learn(self) -> None:
        self._followers.send(Learn())

    def take(self, step: int, rate: float) -> None:
        self._followers.send(Take(step, rate))


def _end(sentence: str) -> None:
    print(f"\n{sentence}", file=sys.stderr, flush=True)  # behind the bar
    os._exit(1)  # the main thread may be inside a collective that nothing ends


def _put(pipe: BinaryIO, come: SimpleQueue[Reply]) -> None:
    for reply in received(pipe, msgspec.msgpack.Decoder(Reply)):
        come.put(reply)


def _merged(own: Answers, come: SimpleQueue[Reply], writing: int, prompts: Mapping[int, Prompt]) -> Answers:
    """writing: how many others have not replied that they wrote all."""
    for one in chain(own, repeat(None)):
        if one is not None:
            yield one
        elif not writing:
            return
        while writing and (one is None or not come.empty()):
            reply = come.get()
            if isinstance(reply, Wrote):
                yield prompts[reply.line], Answer(reply.temperature, reply.tokens)
            else:
                writing -= 1


def follow(ranks: Ranks, told: Iterator[Message], reply: Callable[[Reply], None]) -> None:
    """Does its part of what rank 0 says, until there is no more. Raises UsageError."""
    first = next(told)
    assert isinstance(first, Begin), "rank 0 says first what to train"
    settings = first.settings
    subject = survey(settings, ranks.rank)
    folder = RunFolder(Path(settings.out))
    target: Decoder | None = None
    steps: Steps | None = None
    for message in told:
        match message:
            case Write(lines):
                mine = set(lines)
                target, answers = answering(settings, [one for one in subject.asked() if one[0].line in mine])
                for prompt, answer in answers:
                    reply(Wrote(prompt.line, answer.temperature, answer.tokens))
                reply(WroteAll())
            case Learn():
                material = gather(settings, subject, AnswerFile(folder.answers))
                lesson = begin(settings, subject, material, target or subject.load())
                steps = Steps(settings, lesson, material.taught, ranks, subject.device)
                folder.load(steps.head, steps.optimizer)
                steps.agree()
            case Take(step, rate):
                assert steps is not None, "steps come after Learn"
                steps.take(step, rate)
