"""What came of a simulated load: speed, waiting, attainment, GPU-hours and changes, as numbers and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pilotfish_operator.simulate.cluster import Outcome
from pilotfish_operator.simulate.engine import Answer


@dataclass(frozen=True)
class Promise:
    """What each answer should get, None where nothing is asked: tokens/s while it is written, seconds to its first."""

    tokens_per_second: float | None = None
    first_token_seconds: float | None = None

    def kept(self, answer: Answer) -> bool:
        if self.first_token_seconds is not None and first_token(answer) > self.first_token_seconds:
            return False
        return self.tokens_per_second is None or speed(answer) >= self.tokens_per_second


def first_token(answer: Answer) -> float:
    return answer.first_at - answer.arrival.at


def speed(answer: Answer) -> float:
    """Tokens/s after the first; of a single token as fast as can be."""
    seconds = answer.ended_at - answer.first_at
    return (answer.arrival.output - 1) / seconds if seconds > 0 else float("inf")


@dataclass(frozen=True)
class Figures:
    """Of one policy. seen_tokens_per_second: what a user sees on average, waiting included. Seconds and shares."""

    policy: str
    answers: int
    failed: int
    seen_tokens_per_second: float
    wait_mean: float
    first_token_p50: float
    first_token_p95: float
    token_ms_p95: float
    attained: float
    gpu_hours: float
    replicas_mean: float
    replicas_most: int
    changes: int


def percentile(values: Sequence[float], share: float) -> float:
    """Returns the value that so many are at most; 0 of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def figures(policy: str, outcome: Outcome, promise: Promise, gpus: int) -> Figures:
    """gpus: of a replica; one without counts as one."""
    answers = outcome.answers
    tokens = sum(answer.arrival.output for answer in answers)
    spent = sum(answer.ended_at - answer.arrival.at for answer in answers)
    total = len(answers) + len(outcome.failed)
    ready = [moment.ready for moment in outcome.moments]
    return Figures(
        policy=policy,
        answers=len(answers),
        failed=len(outcome.failed),
        seen_tokens_per_second=tokens / spent if spent else 0.0,
        wait_mean=sum(a.admitted_at - a.arrival.at for a in answers) / max(1, len(answers)),
        first_token_p50=percentile([first_token(a) for a in answers], 0.5),
        first_token_p95=percentile([first_token(a) for a in answers], 0.95),
        token_ms_p95=percentile([1000 / speed(a) for a in answers if speed(a) > 0], 0.95),
        attained=sum(promise.kept(a) for a in answers) / total if total else 1.0,
        gpu_hours=outcome.pod_seconds / 3600 * max(1, gpus),
        replicas_mean=sum(ready) / max(1, len(ready)),
        replicas_most=max(ready, default=0),
        changes=outcome.changes,
    )


_COLUMNS = (
    ("policy", "policy", "{}"), ("answers", "answers", "{}"), ("failed", "failed", "{}"),
    ("tok/s a user", "seen_tokens_per_second", "{:.1f}"), ("wait s", "wait_mean", "{:.2f}"),
    ("TTFT p50", "first_token_p50", "{:.2f}"), ("p95", "first_token_p95", "{:.2f}"),
    ("ms/token p95", "token_ms_p95", "{:.1f}"), ("SLO kept", "attained", "{:.2%}"),
    ("GPU-hours", "gpu_hours", "{:.2f}"), ("replicas", "replicas_mean", "{:.2f}"), ("changes", "changes", "{}"),
)  # fmt: skip


def table(rows: Sequence[Figures]) -> str:
    """Returns them one a line, under their names."""
    cells = [[title for title, _, _ in _COLUMNS]]
    cells += [[form.format(getattr(row, name)) for _, name, form in _COLUMNS] for row in rows]
    return aligned(cells)


def aligned(cells: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    lines = []
    for first, *others in cells:
        numbers = (text.rjust(width) for text, width in zip(others, widths[1:], strict=True))
        lines.append("  ".join((first.ljust(widths[0]), *numbers)))
    return "\n".join(lines)


def plain_data(rows: Sequence[Figures]) -> list[dict[str, Any]]:
    return [asdict(row) for row in rows]
