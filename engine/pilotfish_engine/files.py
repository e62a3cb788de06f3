"""Opens the files of a checkpoint's folder as what they are: input from strangers.

A file is regular, lies in its folder and is no larger than its kind ever is; JSON in it nests no deeper than a parser
goes. So reading one costs no more than its own size, and ends.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pilotfish_engine.errors import CheckpointError

SMALL, LARGE = 16 << 20, 128 << 20  # settings and templates; vocabularies and indexes. Published ones reach a third
_CACHE = "snapshots"  # of a hub: models--OWNER--REPO/snapshots/REVISION links to models--OWNER--REPO/blobs


def find(folder: Path, name: str) -> Path | None:
    """The file of this name in the folder, None where there is none. Raises CheckpointError on what is no regular
    file, or leads out of the folder."""
    file = folder / name
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise CheckpointError(f"{file}: leads out of {folder}; a file inside of it would work")
    try:
        found = file.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:  # a name longer than any
        raise CheckpointError(f"{file}: no name of a file ({error.strerror}); another one would work") from error
    except ValueError as error:  # with a zero byte
        raise CheckpointError(f"{file}: no name of a file ({error}); another one would work") from error
    if stat.S_ISLNK(found.st_mode) or os.sep in name:
        _check_inside(folder, file)
    check_regular(file)
    return file


def check_regular(file: Path) -> None:
    """Raises CheckpointError on a directory, a pipe, a socket or a device. None of these is opened."""
    try:
        mode = file.stat().st_mode
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: cannot be read ({error}); the model's own file would work") from error
    if not stat.S_ISREG(mode):
        kinds = {stat.S_IFDIR: "a directory", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
        kind = kinds.get(stat.S_IFMT(mode), "a device")
        raise CheckpointError(f"{file}: is {kind}; a regular file would work")


def read(file: Path, most: int) -> bytes:
    """A regular file's content. Raises CheckpointError, also where there is more than `most` bytes of it."""
    check_regular(file)
    try:
        with file.open("rb") as opened:
            data = opened.read(most + 1)
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error}); the model's own file would work") from error
    if len(data) > most:
        raise CheckpointError(f"{file}: has more than {most} bytes; the model's own file would work")
    return data


def read_text(file: Path, most: int = SMALL) -> str:
    try:
        return read(file, most).decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{file}: not UTF-8 ({error}); the model's own file would work") from error


def read_json(file: Path, most: int = SMALL) -> dict[str, Any]:
    """The object in it. Raises CheckpointError."""
    try:
        value = json.loads(read_text(file, most))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: not readable as JSON ({error}); the model's own file would work") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: holds {type(value).__name__}, not an object; the model's own file would work")
    return value


@contextmanager
def as_they_should_be(where: object) -> Iterator[None]:
    """Makes a CheckpointError of what Python raises on a value of an unexpected kind."""
    try:
        yield
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError, RecursionError) as error:
        raise CheckpointError(
            f"{where}: a value is not of the kind that is read there ({type(error).__name__}: {error}); "
            "the model's own files would work"
        ) from error


def _check_inside(folder: Path, file: Path) -> None:
    try:
        home, real = folder.resolve(), file.resolve()
    except (OSError, RuntimeError) as error:  # a link to itself
        raise CheckpointError(f"{file}: leads nowhere ({error}); a regular file would work") from error
    homes = [home, home.parent.parent] if home.parent.name == _CACHE else [home]
    if not any(real.is_relative_to(each) for each in homes):
        raise CheckpointError(f"{file}: leads out of {folder}; a file inside of it would work")
