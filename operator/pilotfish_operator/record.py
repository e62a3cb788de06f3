"""Keeps every decision with its inputs in a bounded log, and decides anew from it.

An entry stands alone: the spec, what was observed, the memory of the decisions before, and what was decided. A log is
one folder; each model has one file that grows and older ones that are packed, SIZE bytes together (what a ConfigMap
holds), and MODELS models at most. Writing it never fails a turn: what cannot be written is told once.
"""

from __future__ import annotations

import gzip
import io
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pilotfish_engine.contract.speculation import EngineReport, Envelope
from pilotfish_operator import plan
from pilotfish_operator.api import Spec
from pilotfish_operator.observe import Observed, Pod
from pilotfish_operator.scrape.findings import Seen

VERSION = 1  # of an entry
SIZE = 1 << 20  # bytes of a model's log, packed files and all
OPEN = SIZE // 4  # of the file that grows
MODELS = 64
log = logging.getLogger(__name__)


class RecordError(ValueError):
    """A line that is no decision; the sentence has its number."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Inputs(_Part):
    """What `plan.decide` reads of what was observed. ready: replicas that serve."""

    replicas: Annotated[int, Field(ge=0)] | None
    ready: Annotated[int, Field(ge=0, le=10000)]
    reports: dict[str, EngineReport]
    starting: Annotated[int, Field(ge=0, le=10000)] = 0

    @classmethod
    def of(cls, observed: Observed) -> Inputs:
        starting = sum(not pod.ready and not pod.leaving for pod in observed.pods)
        return cls(
            replicas=observed.replicas, ready=observed.ready_any, reports=dict(observed.reports), starting=starting
        )

    def observed(self) -> Observed:
        """What `decide` takes; of the pods only that they serve or start."""
        names = [*self.reports, *(f"unread-{n}" for n in range(self.ready - len(self.reports)))]
        pods = [_pod(name, True) for name in names[: self.ready]]
        pods += [_pod(f"starting-{n}", False) for n in range(self.starting)]
        total = len(pods)
        return Observed(self.replicas, total, None, None, None, tuple(pods), True, None, Seen(self.reports))


class Decided(_Part):
    """What came of it."""

    replicas: int
    envelope: Envelope
    reasons: tuple[str, ...]

    @classmethod
    def of(cls, decision: plan.Decision) -> Decided:
        return cls(replicas=decision.replicas, envelope=decision.envelope, reasons=decision.reasons)


class Entry(_Part):
    """One decision. time: seconds since 1970; at: of the clock that the memory counts by."""

    version: Literal[1] = 1
    time: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    namespace: str
    name: str
    at: Annotated[float, Field(allow_inf_nan=False)]
    spec: Spec
    inputs: Inputs
    memory: plan.Memory
    former: int | None = None
    decided: Decided

    def line(self) -> str:
        return self.model_dump_json(by_alias=True) + "\n"

    def today(self) -> Decided:
        """What today's code decides from the same inputs."""
        decision, _ = plan.decide(self.spec, self.inputs.observed(), self.memory, self.at, self.former)
        return Decided.of(decision)

    @property
    def differs(self) -> bool:
        """Whether today's code would decide otherwise; words do not count."""
        now = self.today()
        return (now.replicas, now.envelope) != (self.decided.replicas, self.decided.envelope)


def _pod(name: str, ready: bool) -> Pod:
    return Pod(name, name, "recorded", 0, "", ready, False, None, 0, None)


@dataclass(frozen=True)
class Unread:
    """A line that another version wrote: not used, and said."""

    line: int
    version: str


def read(lines: Iterable[str]) -> Iterator[Entry | Unread]:
    """Yields the decisions of a log. Raises RecordError on what is none; one of another version is an Unread."""
    for number, line in enumerate(lines, 1):
        try:
            yield Entry.model_validate_json(line)
        except ValidationError as problem:
            first = problem.errors(include_url=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            if where == "version":
                yield Unread(number, str(first["input"])[:40])
                continue
            raise RecordError(
                f"line {number} is no recorded decision: {where or 'the line'}: {first['msg']}"
            ) from problem


def read_file(path: Path) -> Iterator[Entry | Unread]:
    """The decisions of one file, packed or not. Raises RecordError, OSError."""
    data = path.read_bytes()
    try:
        text = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
        yield from read(io.StringIO(text.decode()))
    except (EOFError, UnicodeDecodeError, gzip.BadGzipFile) as problem:
        raise RecordError(f"{path} is no log of decisions: {problem}") from problem


def files(path: Path) -> list[Path]:
    """The files of a log, oldest first; a file is a log of its own."""
    if not path.is_dir():
        return [path]
    return sorted(path.glob("*.jsonl.gz")) + sorted(path.glob("*.jsonl"))


class Log:
    """Writes to one folder. size: bytes of one model."""

    def __init__(self, folder: Path, size: int = SIZE) -> None:
        self._folder, self._size = folder, size
        self._trouble = ""

    def write(self, entry: Entry) -> None:
        """Adds a decision; what is too much goes, the oldest first."""
        name = f"{entry.namespace}.{entry.name}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            grows = self._folder / f"{name}.jsonl"
            new = not grows.exists()
            with grows.open("a", encoding="utf-8") as file:
                file.write(entry.line())
                full = file.tell() >= self._size // 4
            if full:
                self._pack(grows, name)
            if new:
                self._forget_models()
            self._trouble = ""
        except OSError as problem:
            if str(problem) != self._trouble:
                log.warning("decisions are not recorded: %s", problem)
            self._trouble = str(problem)

    def _pack(self, grows: Path, name: str) -> None:
        packed = self._packed(name)
        number = int(packed[-1].name.split(".")[-3]) + 1 if packed else 0
        whole = self._folder / f"{name}.{number:08d}.jsonl.gz"
        part = whole.with_suffix(".part")
        part.write_bytes(gzip.compress(grows.read_bytes(), 6))
        part.rename(whole)
        grows.unlink()
        room = self._size - self._size // 4
        for old in reversed([*packed, whole]):
            room -= old.stat().st_size
            if room < 0:
                old.unlink()

    def _packed(self, name: str) -> list[Path]:
        return sorted(p for p in self._folder.glob(f"{name}.*.jsonl.gz") if _model(p) == name)

    def _forget_models(self) -> None:
        """Of the models whose decisions are longest ago nothing is kept."""
        last: dict[str, float] = {}
        for path in self._folder.glob("*.jsonl*"):
            last[_model(path)] = max(last.get(_model(path), 0.0), path.stat().st_mtime)
        for name in sorted(last, key=lambda one: -last[one])[MODELS:]:
            for old in (*self._packed(name), self._folder / f"{name}.jsonl"):
                old.unlink(missing_ok=True)


def _model(path: Path) -> str:
    """The model of a file of a log, packed (NAME.NUMBER.jsonl.gz) or not (NAME.jsonl)."""
    name = path.name
    return name.rsplit(".", 3)[0] if name.endswith(".gz") else name.removesuffix(".jsonl")
