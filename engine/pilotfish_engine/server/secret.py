"""Reads secrets from files, again whenever they change: a rotated key counts in running engines.

Knows nothing about what a secret opens.
"""

from __future__ import annotations

import os

from pilotfish_engine.errors import NotYetError

MOST_BYTES = 4096


class SecretFile(str):
    """What a file held when it was opened first; `now()` is what it holds by now.

    Kubernetes changes the files of a Secret under running pods, within a minute or two.
    """

    _flag: str
    _file: str
    _seen: tuple[int, int]
    _value: str

    @classmethod
    def read(cls, flag: str, file: str) -> SecretFile:
        """Raises NotYetError naming the flag, since a Secret may get its key later."""
        value = _content(flag, file)
        secret = cls(value)
        secret._flag, secret._file, secret._seen, secret._value = flag, file, _version(file), value
        return secret

    def now(self) -> str:
        """The last that could be read."""
        try:
            version = _version(self._file)
            if version != self._seen:
                self._value, self._seen = _content(self._flag, self._file), version
        except (OSError, NotYetError):
            return self._value
        return self._value


def _version(file: str) -> tuple[int, int]:
    found = os.stat(file)
    return found.st_mtime_ns, found.st_ino


def _content(flag: str, file: str) -> str:
    try:
        with open(file, "rb") as opened:
            secret = opened.read(MOST_BYTES).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise NotYetError(
            f"{flag} {file!r} cannot be read ({error}); a file with one line of text would work"
        ) from error
    if not secret:
        raise NotYetError(f"{flag} {file!r} is empty; a file with one line of text would work")
    return secret
