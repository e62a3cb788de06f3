"""The two messages of `/v1/speculation`: the envelope that the operator sets and the report that an engine gives.

Both are JSON objects. Unknown fields of a report are ignored (a newer engine may say more); unknown fields of an update
are an error (a caller who misspells a setting must hear of it). Every field of a report has its range here, next to its
type: what breaks it is no report.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

MAX_NUM_STEPS = 8
MAX_TOPK = 8
MIN_NUM_DRAFT_TOKENS = 2  # the root and one draft
MAX_NUM_DRAFT_TOKENS = 64  # a node's ancestors are one 64-bit mask
MAX_THRESHOLD = 1 << 20
MAX_REQUESTS = 1 << 21  # of one engine, running and waiting

Tuning = Literal["Adaptive", "Fixed"]


def _as_threshold(value: Any) -> Any:
    if value not in ("Auto", None) and (type(value) is not int or not 1 <= value <= MAX_THRESHOLD):
        raise PydanticCustomError(
            "threshold",
            "'Auto' or a number of running requests from 1 to {most} would work",
            {"most": MAX_THRESHOLD},
        )
    return value


NumSteps = Annotated[int, Field(ge=0, le=MAX_NUM_STEPS)]
TopK = Annotated[int, Field(ge=1, le=MAX_TOPK)]
NumDraftTokens = Annotated[int, Field(ge=MIN_NUM_DRAFT_TOKENS, le=MAX_NUM_DRAFT_TOKENS)]
Threshold = Annotated[Literal["Auto"] | Annotated[int, Field(ge=1, le=MAX_THRESHOLD)], BeforeValidator(_as_threshold)]
Count = Annotated[int, Field(ge=0, le=1 << 53)]  # past it JSON's numbers are no longer exact
Requests = Annotated[int, Field(ge=0, le=MAX_REQUESTS)]
Milliseconds = Annotated[float, Field(ge=0, le=3.6e6, allow_inf_nan=False)]
Seconds = Annotated[float, Field(ge=0, le=1e13, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Table = Annotated[tuple[tuple[Annotated[int, Field(ge=1, le=1 << 31)], Milliseconds], ...], Field(max_length=256)]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Settings(_Frozen):
    """What one step runs with. `num_steps` 0 is plain decoding; `num_draft_tokens` counts the root and is then 1."""

    num_steps: NumSteps
    topk: TopK
    num_draft_tokens: int = Field(ge=1, le=MAX_NUM_DRAFT_TOKENS)


PLAIN = Settings(num_steps=0, topk=1, num_draft_tokens=1)


class Envelope(_Frozen):
    """Bounds that the engine's controller stays within (tuning Adaptive) or the very values (tuning Fixed).

    disable_threshold: smallest number of running requests at which the engine decodes plainly; Auto: where its own
    profile says that speculation stops paying.
    """

    num_steps: NumSteps = 5
    topk: TopK = 1
    num_draft_tokens: NumDraftTokens = 6
    disable_threshold: Threshold = "Auto"
    tuning: Tuning = "Adaptive"


class CostProfile(_Frozen):
    """Milliseconds of each part of a step, measured at engine start; tables are (size, ms), sizes ascending.

    verify_ms: target pass over n tokens in total. kv_ms_per_token: slope of a target pass with each context token read.
    draft_ms: one draft step at n frontier tokens in total. extend_ms: draft-extend over n tokens in total.
    overhead_ms: what a speculative step costs beside these; plain_overhead_ms: the same for a plain step.
    """

    verify_ms: Table
    kv_ms_per_token: Milliseconds = 0.0
    draft_ms: Table = ()
    extend_ms: Table = ()
    overhead_ms: Milliseconds = 0.0
    plain_overhead_ms: Milliseconds = 0.0

    @field_validator("verify_ms", "draft_ms", "extend_ms")
    @classmethod
    def _ascending(cls, table: Table) -> Table:
        sizes = [size for size, _ in table]
        if any(one >= other for one, other in pairwise(sizes)):
            raise ValueError(f"sizes must ascend, not {sizes[:20]}")
        return table

    @field_validator("verify_ms")
    @classmethod
    def _takes_time(cls, table: Table) -> Table:
        for size, ms in table:
            if not ms > 0:
                raise ValueError(f"verify_ms has ({size}, {ms:g}); a time above 0 would work")
        return table


class Correction(_Frozen):
    """How far one setting's steps differ from the profile beside what all differ by. count: of steps, fading."""

    settings: Settings
    expected_ms: float = Field(gt=0, allow_inf_nan=False)
    difference: float = Field(ge=-1, le=10, allow_inf_nan=False)
    count: float = Field(ge=0, allow_inf_nan=False)


class Place(_Frozen):
    """Corrections at batches of one bit length. common: of all settings; host_ms: between two steps."""

    bits: int = Field(ge=1, le=16)
    common: float = Field(ge=-1, le=10, allow_inf_nan=False)
    host_ms: float = Field(ge=0, le=1e6, allow_inf_nan=False)
    steps: int = Field(ge=0)
    settings: tuple[Correction, ...] = Field(default=(), max_length=256)


LEARNED_VERSION = 1


class Learned(_Frozen):
    """What an engine knows of its times: the start-up profile as real steps corrected it. An engine of the same `key`
    (model, draft, device, ranks) starts with it instead of its own. One of another `version` is not used."""

    version: int = LEARNED_VERSION
    key: str = Field(max_length=1024)
    profile: CostProfile
    places: tuple[Place, ...] = Field(default=(), max_length=16)

    @property
    def steps(self) -> int:
        return sum(place.steps for place in self.places)


class Finding(_Frozen):
    """What steps of one setting gave lately at about so many running requests, and what was promised of them."""

    settings: Settings
    running: float = Field(gt=0, allow_inf_nan=False)
    steps: float = Field(gt=0, allow_inf_nan=False)
    tokens_per_second: float = Field(ge=0, allow_inf_nan=False)
    promised_tokens_per_second: float = Field(ge=0, allow_inf_nan=False)


class EnvelopeUpdate(BaseModel):
    """Body of PUT /v1/speculation: any of the envelope's fields; those left out keep their value."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_steps: NumSteps | None = None
    topk: TopK | None = None
    num_draft_tokens: NumDraftTokens | None = None
    disable_threshold: Threshold | None = None
    tuning: Tuning | None = None
    learned: Learned | None = Field(default=None, description="what another engine of the same kind knows")

    def applied_to(self, envelope: Envelope) -> Envelope:
        """The envelope with this update's fields in place."""
        return Envelope.model_validate(envelope.model_dump() | self.model_dump(exclude_none=True, exclude={"learned"}))


class Effective(_Frozen):
    """What the engine really runs now, probes left out. `active`: it speculates, and has done so at least once."""

    num_steps: int = Field(ge=0, le=MAX_NUM_STEPS)
    topk: int = Field(ge=1, le=MAX_TOPK)
    num_draft_tokens: int = Field(ge=1, le=MAX_NUM_DRAFT_TOKENS)
    disable_threshold: Requests | None = Field(description="None: never disabled by load")
    active: bool


class Counters(_Frozen):
    """Since engine start, monotone. One step of one request counts 1 in `steps` (speculative) or `plain_steps`."""

    steps: Count = 0
    plain_steps: Count = 0
    drafted_tokens: Count = 0
    accepted_tokens: Count = 0
    emitted_tokens: Count = 0


class DeviceReport(_Frozen):
    """What an engine has of its device. memory_bytes: reserved, by what for. recorded: steps made into graphs, in
    recording_seconds; recording_failures: those that could not be."""

    memory_bytes: dict[Annotated[str, Field(max_length=64)], Count] = Field(default={}, max_length=64)
    recorded: Count = 0
    recording_seconds: Seconds = 0.0
    recording_failures: Count = 0


class Load(_Frozen):
    """What an engine has to do. concurrency_seconds_total: integral of running + waiting over time; a window's mean is
    the difference over the time."""

    running: Requests
    waiting: Requests
    context_tokens: Count = Field(description="KV rows of the running requests together")
    max_running_requests: int = Field(ge=1, le=MAX_REQUESTS)
    concurrency_seconds_total: Seconds

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.running > self.max_running_requests:
            raise ValueError(f"running {self.running} exceeds max_running_requests {self.max_running_requests}")
        return self


class EngineReport(Load):
    """Body of GET /v1/speculation.

    accept_length: mean tokens a speculative step commits, bonus included; None before the first one.
    accept[d-1]: probability that at least d draft tokens of a step are accepted.
    pod: uid of the pod that the engine runs in, empty outside of one. uptime_seconds: since the server's start, by
    which a reader tells a restart, and an old answer, from counters that run backwards.
    """

    method: str = Field(min_length=1, max_length=64)
    effective: Effective
    envelope: Envelope
    accept_length: float | None = Field(ge=0, le=MAX_NUM_DRAFT_TOKENS + 1, allow_inf_nan=False)
    accept: tuple[Share, ...] = Field(max_length=MAX_NUM_DRAFT_TOKENS)
    counters: Counters
    profile: CostProfile | None
    reason: str = Field(max_length=4000)
    device: DeviceReport = DeviceReport()
    findings: tuple[Finding, ...] = Field(default=(), max_length=64, description="the last to run first")
    learned: Learned | None = None
    pod: str = Field(default="", max_length=253)
    uptime_seconds: Seconds | None = None

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        if self.counters.accepted_tokens > self.counters.drafted_tokens:
            raise ValueError(
                f"accepted_tokens {self.counters.accepted_tokens} exceeds drafted_tokens {self.counters.drafted_tokens}"
            )
        return self
