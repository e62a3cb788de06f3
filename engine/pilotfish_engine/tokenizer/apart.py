"""Runs a checkpoint's tokenizer and chat template apart, in processes that the kernel bounds.

Both are foreign code. Jinja's sandbox bounds neither time nor memory: three nested loops, `"x" * 10**12` or `10 **
(10**10)` would hold the server up for good. Nor does the tokenizer's library: an expression that backtracks, a
replacement of a megabyte for each space, a panic where none is expected. Texts are encoded here for another reason too:
the library holds Python's lock meanwhile, and nothing else would move.

`python -m pilotfish_engine.tokenizer.apart PATH` is such a process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pilotfish_engine.apart import Apart, limit, limit_memory, limit_time, serve, write
from pilotfish_engine.errors import CheckpointError, sentence
from pilotfish_engine.tokenizer import load
from pilotfish_engine.tokenizer.chat import Message, TemplateError, Tool
from pilotfish_engine.tokenizer.folder import READ
from pilotfish_engine.tokenizer.vocabulary import Tokenizer

CPU_SECONDS = 2  # a long chat takes some milliseconds
BYTES_A_SECOND = 200_000  # beside them: tokenizers reach some millions
LOAD_SECONDS, LOAD_BYTES, LOAD_GROWTH = 60, 512 << 20, 24  # the last: of memory, for each byte of the files
MEMORY_BYTES = 512 << 20  # of address space, beside what is there when the tokenizer is loaded
LONG_BYTES = 1 << 16  # what is longer does not stand before what is not
PROBES = ("a", " ", "\n", "1", "é", ".", "aA1 ", "<", "▁", "'s ")
PROBE_LENGTH = 2000
_TEMPLATE = "the chat template takes more time or memory than it may; another model, or other messages, would work"
_TOKENIZER = "the tokenizer takes more time or memory for this text than it may; another text, or model, would work"
_UNSAFE = "its tokenizer breaks its library, or takes more time or memory than it may; another one would work"


class UnsafeTokenizer(CheckpointError):
    """One that must not be loaded where anything else is."""


def check(path: Path) -> None:
    """Loads a resolved model's tokenizer apart. Has it encode texts on which expressions may explode. Raises
    UnsafeTokenizer; what has none, or one that is refused as it should be, passes."""
    if path.is_dir() and not any((path / name).exists() for name in READ):
        return
    with contextlib.closing(_process(path, "trial")) as lane, contextlib.suppress(_Refused):
        lane.start()


class _Refused(CheckpointError):
    """As loading it here would refuse it."""


def _process(path: Path, name: str) -> Apart:
    def begun(word: Any) -> None:
        safe, error = word or (False, f"{path}: {_UNSAFE}")
        if error is not None:
            raise _Refused(error) if safe else UnsafeTokenizer(error)

    return Apart("pilotfish_engine.tokenizer.apart", [str(path)], name, begun)


class TextError(Exception):
    """A text that the tokenizer does not encode; the text says why."""


class TextProcesses:
    """Those of one model, each working off one piece of work after the other: one for short ones, and from the first
    long one on another for those. `close` ends them."""

    def __init__(self, path: Path) -> None:
        self._short, self._long = _process(path, "short texts"), _process(path, "long texts")

    async def start(self) -> None:
        """As `check`."""
        await asyncio.get_running_loop().run_in_executor(self._short.thread, self._short.start)

    async def render(self, messages: Sequence[Message], tools: Sequence[Tool], variables: Mapping[str, Any]) -> str:
        """As ChatTemplate.render. Raises TemplateError also where the template takes too long or too much memory."""
        done, error = await self._do("render", [messages, tools, variables], _TEMPLATE)
        if error is not None:
            raise TemplateError(error)
        assert isinstance(done, str)
        return done

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """As Tokenizer.encode. Raises TextError."""
        done, error = await self._do("encode", [text, add_special_tokens], _TOKENIZER)
        if error is not None:
            raise TextError(error)
        assert isinstance(done, list)
        return done

    def close(self) -> None:
        self._short.close()
        self._long.close()

    async def _do(self, what: str, arguments: Any, too_much: str) -> tuple[Any, str | None]:
        work = json.dumps([what, arguments, too_much]).encode()
        lane = self._short if len(work) <= LONG_BYTES else self._long
        return await asyncio.get_running_loop().run_in_executor(lane.thread, lane.do, work, too_much)


# ---- in the process ------------------------------------------------------------------------------------------------


def _loaded(path: Path) -> tuple[Tokenizer | None, tuple[bool, str | None]]:
    try:
        tokenizer = load(path)
        for probe in PROBES:
            tokenizer.encode(probe * PROBE_LENGTH)
    except CheckpointError as error:
        return None, (True, str(error))
    except BaseException:  # a panic of the library is no Exception
        return None, (False, f"{path}: {_UNSAFE}")
    return tokenizer, (True, None)


def _done(tokenizer: Tokenizer, what: str, arguments: Any, too_much: str) -> tuple[Any, str | None]:
    try:
        if what == "encode":
            text, add_special_tokens = arguments
            return tokenizer.encode(text, add_special_tokens=add_special_tokens), None
        assert tokenizer.chat_template is not None, "asked for before"
        return tokenizer.chat_template.render(*arguments), None
    except TemplateError as error:
        return None, str(error)
    except MemoryError:
        return None, too_much
    except BaseException as error:
        return None, sentence(f"{too_much} ({error})")


def _size(path: Path) -> int:
    """Of what the tokenizer is read from, at most."""
    return path.stat().st_size if path.is_file() else sum(f.stat().st_size for f in path.iterdir() if _is_text(f))


def _is_text(file: Path) -> bool:
    return file.is_file() and file.suffix != ".safetensors"


def main(path: Path) -> int:
    limit(resource.RLIMIT_CORE, 0)
    limit_memory(LOAD_BYTES + LOAD_GROWTH * min(_size(path), 64 << 20))
    limit_time(LOAD_SECONDS)
    tokenizer, verdict = _loaded(path)
    with contextlib.suppress(BrokenPipeError):
        write(sys.stdout.buffer, json.dumps(verdict).encode())
        if tokenizer is not None:
            limit_memory(MEMORY_BYTES)
            serve(lambda work: _done(tokenizer, *work), lambda size: CPU_SECONDS + size / BYTES_A_SECOND)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
