"""Starts, tells and watches the processes of ranks 1 … size − 1; this one is rank 0.

A rank that dies or fails ends the whole group, as the others would wait for it for ever.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from io import BufferedReader, RawIOBase
from typing import BinaryIO, cast

import msgspec
import torch.distributed as dist

from pilotfish_engine.distributed.children import framed
from pilotfish_engine.distributed.collectives import Ranks, join

CAUSE_SECONDS = 5.0  # from a failure that a dead rank causes until its process is known to have ended, at most


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
        self._died, self._told = threading.Event(), threading.Event()
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

    def await_cause(self) -> None:
        """Waits after a failure here until a rank's death, its possible cause, is known; of that `end` tells first.

        Returns at once when one has been told of, and in CAUSE_SECONDS when none has died.
        """
        if self._died.wait(CAUSE_SECONDS):
            self._told.wait()

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
            self._died.set()
            how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            self.end(f"rank {rank} of {self._size} ended unexpectedly ({how}), and the {self._work} with it")
            self._told.set()


def _write(process: subprocess.Popen[bytes], frame: bytes) -> None:
    assert process.stdin is not None
    left = memoryview(frame)
    while left:
        left = left[process.stdin.write(left) :]
