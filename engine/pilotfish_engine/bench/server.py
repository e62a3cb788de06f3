"""What a server tells of itself beside its answers: its models, how its tokens are numbered, how its drafts fared.

Three kinds of server tell the latter: this engine (GET /v1/speculation), vLLM (counters in /metrics) and SGLang (there
a gauge, of its last moments alone). Of others nothing is known.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec
from prometheus_client.parser import text_string_to_metric_families
from pydantic import ValidationError

from pilotfish_engine.bench.result import Acceptance
from pilotfish_engine.contract.speculation import EngineReport
from pilotfish_engine.errors import UsageError

SECONDS = 30  # for any of these answers
VLLM = "vllm:spec_decode_num_"
SGLANG = "sglang:spec_accept_length"


@dataclass(frozen=True)
class Snapshot:
    """Of one moment. report: this engine's own. metrics: /metrics, each name summed over its labels, without _total.
    rows: over how many label sets."""

    report: EngineReport | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)


class Server:
    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url

    async def model(self, wanted: str | None) -> str:
        """The name to ask for. Raises UsageError where the server cannot be reached or serves no such model."""
        try:
            status, text = await self._get("/v1/models")
            names = [str(model["id"]) for model in msgspec.json.decode(text)["data"]] if status == 200 else []
        except (aiohttp.ClientError, OSError) as error:
            raise UsageError(f"--url {self._url} cannot be reached ({error}); a server that runs would work") from error
        except (msgspec.DecodeError, KeyError, TypeError) as error:
            raise UsageError(f"{self._url}/v1/models is no list of models; a server that has one would work") from error
        if status in (401, 403):
            raise UsageError(f"{self._url} answers {status}: its key is missing or wrong; --api-key-file would work")
        if wanted is not None:  # one without such a list may serve it all the same
            if names and wanted not in names:
                raise UsageError(f"{self._url} does not serve {wanted!r}; {', '.join(names)} would work")
            return wanted
        if not names:
            raise UsageError(f"{self._url}/v1/models answers {status} and lists no model; --model NAME would work")
        return names[0]

    async def token_ids(self, model: str, text: str) -> list[int]:
        """The tokens of a text by the server's numbers, in ascending order; none where it does not tell."""
        body = {"model": model, "prompt": text, "add_special_tokens": False}
        try:
            async with self._session.post(self._url + "/tokenize", json=body, timeout=_TIMEOUT) as response:
                value = msgspec.json.decode(await response.read()) if response.status == 200 else None
        except (aiohttp.ClientError, OSError, msgspec.DecodeError):
            return []
        tokens = value.get("tokens") if isinstance(value, dict) else None
        usable = isinstance(tokens, list) and all(type(token) is int for token in tokens)
        return sorted(set(tokens)) if usable and tokens is not None else []

    async def snapshot(self) -> Snapshot:
        """Empty where the server tells nothing, or does not answer in time."""
        try:
            status, text = await self._get("/v1/speculation")
            if status == 200:
                return Snapshot(report=EngineReport.model_validate_json(text))
        except (aiohttp.ClientError, OSError, ValidationError):
            pass
        try:
            status, text = await self._get("/metrics")
            return _metrics(text) if status == 200 else Snapshot()
        except (aiohttp.ClientError, OSError, ValueError):
            return Snapshot()

    async def _get(self, path: str) -> tuple[int, str]:
        async with self._session.get(self._url + path, timeout=_TIMEOUT) as response:
            return response.status, await response.text()


_TIMEOUT = aiohttp.ClientTimeout(total=SECONDS)


def between(before: Snapshot, after: Snapshot) -> Acceptance | None:
    """What the server says of its drafts from one moment to the other; everybody's requests count. None: nothing."""
    if before.report is not None and after.report is not None:
        return _of_reports(before.report, after.report)
    drafts = f"{VLLM}drafts"
    if drafts in after.metrics:
        return _of_counters(before.metrics, after.metrics)
    if SGLANG in after.metrics:
        length = after.metrics[SGLANG] / after.rows[SGLANG]
        return Acceptance(source="sglang, its last moments", accept_length=length or None)
    return None


def _of_reports(before: EngineReport, after: EngineReport) -> Acceptance:
    old, new = before.counters, after.counters
    steps, plain = new.steps - old.steps, new.plain_steps - old.plain_steps
    drafted, accepted = new.drafted_tokens - old.drafted_tokens, new.accepted_tokens - old.accepted_tokens
    settings: dict[str, Any] = {"method": after.method, **after.effective.model_dump(), "tuning": after.envelope.tuning}
    return Acceptance(
        source="pilotfish",
        accept_length=1 + accepted / steps if steps > 0 else None,
        accepted_share=accepted / drafted if drafted > 0 else None,
        speculative_share=steps / (steps + plain) if steps + plain > 0 else None,
        drafted_tokens=drafted,
        accepted_tokens=accepted,
        emitted_tokens=new.emitted_tokens - old.emitted_tokens,
        settings=settings,
    )


def _of_counters(before: dict[str, float], after: dict[str, float]) -> Acceptance:
    drafts, drafted, accepted = (
        after.get(VLLM + name, 0.0) - before.get(VLLM + name, 0.0)
        for name in ("drafts", "draft_tokens", "accepted_tokens")
    )
    return Acceptance(
        source="vllm",
        accept_length=1 + accepted / drafts if drafts > 0 else None,
        accepted_share=accepted / drafted if drafted > 0 else None,
        drafted_tokens=round(drafted),
        accepted_tokens=round(accepted),
    )


def _metrics(text: str) -> Snapshot:
    values: dict[str, float] = defaultdict(float)
    rows: dict[str, int] = defaultdict(int)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name.removesuffix("_total")
            values[name] += sample.value
            rows[name] += 1
    return Snapshot(metrics=dict(values), rows=dict(rows))
