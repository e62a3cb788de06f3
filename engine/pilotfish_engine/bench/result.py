"""The figures of a run: what they are, how they come out of the outcomes, and the file that keeps them.

Figures are of the requests that succeeded. A level in which any failed is not `whole`: nothing is compared with it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from pilotfish_engine.bench.client import Outcome
from pilotfish_engine.bench.load import Load
from pilotfish_engine.bench.plan import Level
from pilotfish_engine.errors import UsageError

SCHEMA_VERSION: Final = 1
PERCENTS = (50, 90, 95, 99)


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Percentiles(_Frozen):
    """Milliseconds, interpolated linearly between the nearest of `count` values."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float


class FailureCount(_Frozen):
    cause: str
    count: int
    example: str


class Acceptance(_Frozen):
    """source: the kind of server that told. accept_length: tokens of a speculative step, bonus included.
    accepted_share: of the drafted tokens. speculative_share: of the steps, each request of a batch counted. settings:
    in force at the end."""

    source: str
    accept_length: float | None
    accepted_share: float | None = None
    speculative_share: float | None = None
    drafted_tokens: int | None = None
    accepted_tokens: int | None = None
    emitted_tokens: int | None = None
    settings: dict[str, Any] | None = None


class Request(_Frozen):
    """Seconds from the level's start. None: did not come, or the server did not tell."""

    number: int
    began: float
    first_token: float | None
    ended: float | None
    prompt_tokens: int | None
    cached_tokens: int | None
    completion_tokens: int | None
    pieces: int
    finish_reason: str | None
    failure: str | None


class Counts(_Frozen):
    """Of the requests of a level. Token counts are the server's `usage`, None as soon as one answer came without."""

    succeeded: int
    failed: int
    unfinished: int
    failures: tuple[FailureCount, ...]
    prompt_tokens: int | None
    cached_tokens: int | None
    completion_tokens: int | None
    repeated_prompts: int


class Speeds(_Frozen):
    """per_token_ms: from the first text to the end, over the tokens after the first. chunk_gap_ms: between pieces of
    text, each of which may hold several tokens."""

    requests_per_second: float
    tokens_per_second: float | None
    first_token_ms: Percentiles | None
    per_token_ms: Percentiles | None
    chunk_gap_ms: Percentiles | None
    end_to_end_ms: Percentiles | None


class LevelResult(Counts, Speeds):
    """seconds: to the last answer; what is by the second is over these. client_cpu: share of a core."""

    kind: Literal["concurrency", "rate"]
    value: float
    seconds: float
    client_cpu: float
    acceptance: Acceptance | None
    requests: tuple[Request, ...]

    @property
    def name(self) -> str:
        return Level(self.kind, self.value).name

    @property
    def whole(self) -> bool:
        return self.succeeded > 0 and self.failed == self.unfinished == 0


class Workload(_Frozen):
    """What must be the same in two runs that are compared. input_len: of random prompts, None: real ones."""

    api: str
    prompts: str
    input_len: int | None
    output_len: int
    temperature: float
    seed: int
    requests: int | None
    seconds: float | None


class Result(_Frozen):
    """Schema of the --json file; what changes its meaning changes SCHEMA_VERSION. interrupted: why the run ended before
    its plan did."""

    schema_version: Literal[1] = SCHEMA_VERSION
    pilotfish_version: str
    began: str
    url: str
    model: str
    workload: Workload
    warm_up: int
    timeout: float
    interrupted: str | None
    levels: tuple[LevelResult, ...]

    @property
    def whole(self) -> bool:
        return self.interrupted is None and all(level.whole for level in self.levels)


def read(file: Path) -> Result:
    """A --json file. Raises UsageError on what is none, or of another version."""
    try:
        return Result.model_validate_json(file.read_bytes())
    except OSError as error:
        raise UsageError(f"--baseline {file} cannot be read ({error.strerror}); a --json file would work") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise UsageError(
            f"--baseline {file} is not a result of version {SCHEMA_VERSION} ({where}: {first['msg'].lower()}); "
            "a --json file of this version would work"
        ) from error


def percentiles(seconds: Iterable[float]) -> Percentiles | None:
    """None of nothing."""
    values = np.fromiter(seconds, dtype=np.float64) * 1000
    if values.size == 0:
        return None
    p50, p90, p95, p99 = (float(value) for value in np.percentile(values, PERCENTS))
    return Percentiles(count=values.size, mean=float(values.mean()), p50=p50, p90=p90, p95=p95, p99=p99)


def of_level(level: Level, load: Load, acceptance: Acceptance | None, repeated_prompts: int) -> LevelResult:
    good = [outcome for outcome in load.outcomes if outcome.failure is None]
    completion_tokens = _total([_tokens(outcome) for outcome in good])
    return LevelResult(
        kind=level.kind,
        value=level.value,
        seconds=load.seconds,
        succeeded=len(good),
        failed=len(load.outcomes) - len(good),
        unfinished=load.unfinished,
        failures=_failures(load.outcomes),
        prompt_tokens=_total([None if outcome.usage is None else outcome.usage.prompt_tokens for outcome in good]),
        cached_tokens=_total([_cached(outcome) for outcome in good]),
        completion_tokens=completion_tokens,
        requests_per_second=len(good) / load.seconds,
        tokens_per_second=None if completion_tokens is None else completion_tokens / load.seconds,
        first_token_ms=percentiles(one.first - one.began for one in good if one.first is not None),
        per_token_ms=percentiles(seconds for one in good if (seconds := per_token(one)) is not None),
        chunk_gap_ms=percentiles(chain.from_iterable(one.gaps for one in good)),
        end_to_end_ms=percentiles(one.ended - one.began for one in good if one.ended is not None),
        client_cpu=load.cpu,
        repeated_prompts=repeated_prompts,
        acceptance=acceptance,
        requests=tuple(_request(outcome, load.began) for outcome in load.outcomes),
    )


def per_token(outcome: Outcome) -> float | None:
    """Seconds a token after the first; None where the answer has no such token, came in one piece, or uncounted."""
    tokens = _tokens(outcome)
    if tokens is None or tokens < 2 or outcome.pieces < 2 or outcome.first is None or outcome.ended is None:
        return None
    return (outcome.ended - outcome.first) / (tokens - 1)


def _tokens(outcome: Outcome) -> int | None:
    return None if outcome.usage is None else outcome.usage.completion_tokens


def _cached(outcome: Outcome) -> int | None:
    details = None if outcome.usage is None else outcome.usage.prompt_tokens_details
    return None if details is None else details.cached_tokens


def _total(counts: Sequence[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known and len(known) == len(counts) else None


def _failures(outcomes: Sequence[Outcome]) -> tuple[FailureCount, ...]:
    """By cause, the most frequent first."""
    details: dict[str, list[str]] = defaultdict(list)
    for outcome in outcomes:
        if outcome.failure is not None:
            details[outcome.failure.cause].append(outcome.failure.detail)
    ordered = sorted(details.items(), key=lambda item: (-len(item[1]), item[0]))
    return tuple(FailureCount(cause=cause, count=len(said), example=said[0]) for cause, said in ordered)


def _request(outcome: Outcome, level_began: float) -> Request:
    def since(moment: float | None) -> float | None:
        return None if moment is None else moment - level_began

    return Request(
        number=outcome.number,
        began=outcome.began - level_began,
        first_token=since(outcome.first),
        ended=since(outcome.ended),
        prompt_tokens=None if outcome.usage is None else outcome.usage.prompt_tokens,
        cached_tokens=_cached(outcome),
        completion_tokens=_tokens(outcome),
        pieces=outcome.pieces,
        finish_reason=outcome.finish_reason,
        failure=None if outcome.failure is None else outcome.failure.cause,
    )
