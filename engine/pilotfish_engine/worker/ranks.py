"""The ranks of a tensor-parallel group: rank 0 is the process with the scheduler, the others follow it.

What rank 0's worker is told, the followers are told in the same order, through a pipe each; the settings of a step are
rank 0's choice and travel with the call. What is decided from logits is broadcast in the step itself. Ranks meet
through a file in memory and on the loopback interface only. A rank that dies or fails ends the engine, as the others
would wait for it for ever. `Followers`, `join` and `received` serve ranks of other kinds too.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from io import BufferedReader, RawIOBase
from typing import BinaryIO, TypeVar, cast

import msgspec
import torch
import torch.distributed as dist

from pilotfish_engine.config import stay_on_this_machine
from pilotfish_engine.contract.speculation import Envelope, Settings
from pilotfish_engine.errors import UsageError
from pilotfish_engine.model.parallel import Ranks
from pilotfish_engine.types import Admission, Batch, GenerationBatchResult, Read, SpeculationReport, WorkerLimits
from pilotfish_engine.worker.target import TargetWorker

CAUSE_SECONDS = 0.2
_LENGTH_BYTES = 4  # in front of each message

_Told = TypeVar("_Told")


class Load(msgspec.Struct, frozen=True, tag=True):
    """The engine to be from now on: the JSON of an EngineConfig, and of a CostProfile where none is to be measured."""

    config: bytes
    profile: bytes | None = None


class Admit(msgspec.Struct, frozen=True, tag=True):
    admission: Admission


class Run(msgspec.Struct, frozen=True, tag=True):
    batch: Batch
    num_steps: int
    topk: int
    num_draft_tokens: int


class Release(msgspec.Struct, frozen=True, tag=True):
    row: int


Message = Load | Admit | Run | Release


def check_devices(size: int, flag: str = "--tensor-parallel-size") -> None:
    """flag: the one that says the size. Raises UsageError where the ranks are more than the GPUs; on a machine without
    any they share its CPU."""
    found = torch.cuda.device_count() if torch.cuda.is_available() else size
    if size > found:
        raise UsageError(
            f"{flag} is {size}, and this machine has {found} GPU{'s' if found > 1 else ''}; at most {found} would work"
        )


def join(rank: int, size: int, store: int) -> Ranks:
    """This process becomes a rank; returns when all have. store: a descriptor of the file through which they meet."""
    stay_on_this_machine()
    if torch.cuda.is_available():
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(max(1, torch.get_num_threads() // size))
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=dist.FileStore(f"/proc/self/fd/{store}", size),  # type: ignore[attr-defined]
        rank=rank,
        world_size=size,
        device_id=device if device.type == "cuda" else None,
    )
    ranks = Ranks(rank, size, device)
    ranks.agree(torch.zeros(1, device=device))
    return ranks


class Followers:
    """The processes of ranks 1 … size − 1. command: what starts one, to which its rank, the size, the descriptor of
    `join` and this process's id are added. end: called, on any thread, with why the group cannot go on. work: what ends
    with a rank. replies: whether what a follower writes to its standard output is read here."""

    def __init__(
        self,
        size: int,
        command: Sequence[str],
        end: Callable[[str], None],
        work: str = "engine",
        replies: bool = False,
    ) -> None:
        self.end = end
        self.replies: list[BinaryIO] = []
        self._size = size
        self._command = command
        self._work = work
        self._output = subprocess.PIPE if replies else None
        self._store = os.memfd_create("ranks")
        self._processes: list[subprocess.Popen[bytes]] = []
        self._closing = False
        self._turn = threading.Lock()  # with overlap a row is released while a step is under way

    def start(self) -> Ranks:
        """Rank 0's place, when all are there."""
        for rank in range(1, self._size):
            numbers = (rank, self._size, self._store, os.getpid())
            command = [*self._command, *(str(number) for number in numbers)]
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=self._output, pass_fds=[self._store], bufsize=0
            )
            self._processes.append(process)
            if process.stdout is not None:
                self.replies.append(BufferedReader(cast(RawIOBase, process.stdout)))
            threading.Thread(target=self._watch, args=(rank, process), daemon=True).start()
        return join(0, self._size, self._store)

    def send(self, message: msgspec.Struct) -> None:
        """To all."""
        frame = framed(message)
        with self._turn:
            for process in self._processes:
                _write(process, frame)

    def send_to(self, rank: int, message: msgspec.Struct) -> None:
        with self._turn:
            _write(self._processes[rank - 1], framed(message))

    def close(self) -> None:
        """Ends the followers and this process's part in the group."""
        self._closing = True
        for process in self._processes:
            process.kill()
            process.wait()
            assert process.stdin is not None
            process.stdin.close()
        for reply in self.replies:
            reply.close()
        if dist.is_initialized():
            dist.destroy_process_group()
        os.close(self._store)

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        if not self._closing:
            how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            self.end(f"rank {rank} of {self._size} ended unexpectedly ({how}), and the {self._work} with it")


def _write(process: subprocess.Popen[bytes], frame: bytes) -> None:
    assert process.stdin is not None
    left = memoryview(frame)
    while left:
        left = left[process.stdin.write(left) :]


class Leader:
    """Rank 0's types.Worker."""

    def __init__(self, worker: TargetWorker, followers: Followers) -> None:
        self._worker = worker
        self._followers = followers

    @property
    def limits(self) -> WorkerLimits:
        return self._worker.limits

    @property
    def reserve_tokens(self) -> int:
        return self._worker.reserve_tokens

    def admit(self, admission: Admission) -> None:
        self._worker.admit(admission)
        # grammars and logprobs concern the one who decides
        params = msgspec.structs.replace(admission.params, grammar=None, logprobs=None)
        self._followers.send(Admit(replace(admission, params=params, grammar=None)))

    def launch(self, batch: Batch) -> Read:
        settings = self._worker.settings_for(batch)
        self._followers.send(Run(batch, settings.num_steps, settings.topk, settings.num_draft_tokens))
        with self._ending_together():
            read = self._worker.start(batch, settings)

        def result() -> GenerationBatchResult:
            with self._ending_together():
                return read()

        return result

    @contextmanager
    def _ending_together(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            time.sleep(CAUSE_SECONDS)  # when a rank has died, that is the cause, and its watcher says so
            self._followers.end(f"rank 0 failed in a step ({type(error).__name__}: {error}), and the engine with it")
            raise

    def reusable_len(self, row: int, seq_len: int) -> int:
        return self._worker.reusable_len(row, seq_len)

    def release(self, row: int) -> None:
        self._worker.release(row)
        self._followers.send(Release(row))

    def set_envelope(self, envelope: Envelope) -> None:
        self._worker.set_envelope(envelope)

    def speculation_report(self) -> SpeculationReport:
        return self._worker.speculation_report()


def follow(pipe: BinaryIO, load: Callable[[Load], TargetWorker]) -> None:
    """Does what rank 0 does, until its pipe ends."""
    worker: TargetWorker | None = None
    for message in received(pipe, msgspec.msgpack.Decoder(Message)):
        if isinstance(message, Load):
            worker = load(message)
            continue
        assert worker is not None, "rank 0 says first what to load"
        match message:
            case Admit(admission):
                worker.admit(admission)
            case Run(batch, num_steps, topk, num_draft_tokens):
                settings = Settings(num_steps=num_steps, topk=topk, num_draft_tokens=num_draft_tokens)
                worker.start(batch, settings)()
            case Release(row):
                worker.release(row)


def framed(message: msgspec.Struct) -> bytes:
    """As `received` reads it."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(_LENGTH_BYTES) + body


def received(pipe: BinaryIO, decoder: msgspec.msgpack.Decoder[_Told]) -> Iterator[_Told]:
    """pipe: buffered. What comes through it, until it ends; a message that is cut there is none."""
    while head := pipe.read(_LENGTH_BYTES):
        length = int.from_bytes(head)
        body = pipe.read(length)
        if len(body) < length:
            return
        yield decoder.decode(body)
