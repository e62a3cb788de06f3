"""Ends a child process with its parent, spares it pauses, and frames messages between them. Imports no torch."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
from collections.abc import Callable, Iterator
from typing import BinaryIO, TypeVar

import msgspec

Say = Callable[[str], None]  # why this process ends: one sentence, for the one who started it
_LENGTH_BYTES = 4  # in front of each message
_Told = TypeVar("_Told")


def die_with(parent: int) -> None:
    """Has the kernel kill this process when the thread that started it ends. That holds even in the middle of a
    kernel call."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call above
        os._exit(1)


def settle() -> None:
    """Takes what was made so far, and stays, from the garbage collector.

    While it looks at everything steps wait: 200 to 300 ms, measured beside a GPU's step of 10.
    """
    gc.collect()
    gc.freeze()


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
