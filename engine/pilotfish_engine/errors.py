"""The engine's errors, raised where the bad value enters.

    PilotfishError
    ├── UsageError             the command line or a file it names cannot work: one sentence, exit code 2
    │   ├── NotYetError        what it names is not there now and may come (a download, a claim, a Secret): 75
    │   ├── CheckpointError    a model file is missing, truncated, foreign or misfits its config
    │   └── MethodError        an unknown method, or one that the checkpoint does not fit
    ├── HandoverError          what another engine wrote of a request does not fit this one
    ├── NumbersError           what the model computed for a request is NaN or infinite: the request ends
    └── RequestError           what a client sent cannot be served: a 4xx with the field's name
        └── EnvelopeError      a speculation setting out of the method's range

Each message names the thing, the value and what would work. Values come from strangers: `sentence` keeps them from
being more than a part of one.
"""

from __future__ import annotations

LONGEST = 1500  # characters of a message: a value or a name in it can be as long as the file that it stood in


def sentence(text: str) -> str:
    """Makes one line of printable text: line ends and controls are escaped, what is too long loses its middle."""
    if len(text) > LONGEST:
        text = f"{text[: LONGEST * 2 // 3]} … {text[-LONGEST // 3 :]}"
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class PilotfishError(Exception):
    def __init__(self, message: str) -> None:
        super().__init__(sentence(message))


class UsageError(PilotfishError):
    """exit_code: 2 where the same command can never work, 75 (EX_TEMPFAIL of sysexits.h) where it may."""

    exit_code = 2


class NotYetError(UsageError):
    exit_code = 75


class CheckpointError(UsageError):
    pass


class MethodError(UsageError):
    pass


class HandoverError(PilotfishError):
    pass


class NumbersError(PilotfishError):
    pass


class RequestError(PilotfishError):
    """`field`: the name of the request's field at fault, as the client wrote it; None when it is the whole body."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class EnvelopeError(RequestError):
    pass
