"""Pure: a report beside what is known of its pod → why it is not believed, or nothing.

What breaks a field's range is no report (the contract says so). Here is what only a reader over time can see: another
pod's answer, an old answer, counters that run backwards or further than any engine could count. A pod that was doubted
is believed again after AGREEING answers in a row that agree with each other. Holds no clock: time is passed in.
"""

from __future__ import annotations

from dataclasses import dataclass

from pilotfish_engine.contract.speculation import Counters, EngineReport

AGREEING = 3
MAX_TOKENS_PER_SECOND = 1e6  # of one engine; the fastest known gives a fiftieth
SLACK = 5.0  # seconds by which the times of two reads may differ from those of two answers


@dataclass(frozen=True)
class History:
    """The last answer of a pod, when it came, and how many more must agree before the pod is believed."""

    report: EngineReport
    at: float
    doubtful: int = 0


def judge(uid: str, report: EngineReport, last: History | None, now: float) -> tuple[str | None, History]:
    """Why this answer of the pod `uid` is not used, None when it is; and what to remember of it."""
    if report.pod and report.pod != uid:
        return f"it is the report of another pod ({report.pod})", last or History(report, now, AGREEING)
    why = None if last is None or _restarted(report, last, now) else _contradiction(report, last, now)
    if why:
        return why, History(report, now, AGREEING)
    doubtful = max(0, last.doubtful - 1) if last else 0
    if doubtful:
        return f"it contradicted itself before; {doubtful} more answers must agree", History(report, now, doubtful)
    return None, History(report, now)


def _restarted(report: EngineReport, last: History, now: float) -> bool:
    """The engine is younger than the last answer is old; without an age, counters that start anew say so."""
    if report.uptime_seconds is None:
        return report.concurrency_seconds_total < last.report.concurrency_seconds_total
    return report.uptime_seconds <= now - last.at + SLACK and report.uptime_seconds < (last.report.uptime_seconds or 0)


def _contradiction(report: EngineReport, last: History, now: float) -> str | None:
    before, passed = last.report, now - last.at
    if report.uptime_seconds is not None and before.uptime_seconds is not None:
        aged = report.uptime_seconds - before.uptime_seconds
        if aged < passed / 2 - SLACK or (passed > 0.5 and aged <= 0):
            return f"it is stale: the engine aged {aged:.1f}s while {passed:.1f}s passed"
        if aged > 2 * passed + SLACK:
            return f"its clock jumped: the engine aged {aged:.1f}s while {passed:.1f}s passed"
    for name in ("concurrency_seconds_total", *(f"counters.{field}" for field in Counters.model_fields)):
        old, new = _field(before, name), _field(report, name)
        if new < old:
            return f"{name} ran backwards, from {old:.15g} to {new:.15g}"
    gained = report.concurrency_seconds_total - before.concurrency_seconds_total
    most = _most_requests(before, report)
    if gained > most * (passed + SLACK):
        return f"concurrency_seconds_total jumped by {gained:.6g} in {passed:.1f}s, more than {most} requests could add"
    tokens = report.counters.emitted_tokens - before.counters.emitted_tokens
    if tokens > MAX_TOKENS_PER_SECOND * (passed + SLACK):
        return f"counters.emitted_tokens jumped by {tokens} in {passed:.1f}s"
    return None


def _most_requests(before: EngineReport, report: EngineReport) -> int:
    """No engine had more at once between the two answers: generous, since bursts come and go."""
    seen = max(one.running + one.waiting for one in (before, report))
    return 4 * (seen + max(before.max_running_requests, report.max_running_requests)) + 4096


def _field(report: EngineReport, name: str) -> float:
    head, _, tail = name.partition(".")
    value = getattr(report, head)
    return float(getattr(value, tail) if tail else value)
