"""What /metrics says: this process's own counts, and the model process's report read at the time of the scrape.

Token counts are those of the `usage` that clients are given. Knows nothing about how they come about.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from pilotfish_engine.contract.speculation import EngineReport

disable_created_metrics()  # type: ignore[no-untyped-call]  # a series beside each counter that nothing reads

_PREFIX = "pilotfish_engine"
_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120)
_TOKEN_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)


class Metrics:
    def __init__(self) -> None:
        self.report: EngineReport | None = None
        self.registry = CollectorRegistry()
        self.requests = self._counter("requests", "Answers ended (choices), by how", "finish_reason")
        self.refusals = self._counter("refused_requests", "HTTP requests that got an error, by status", "status")
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests served")
        self.cached_tokens = self._counter("cached_tokens", "Of these, tokens found in the prefix cache")
        self.generated_tokens = self._counter("generated_tokens", "Tokens of answers")
        self.ignored_fields = self._counter("ignored_fields", "Fields of requests that changed nothing", "field")
        self.first_token = self._histogram("time_to_first_token_seconds", "From request to first token", _SECONDS)
        self.inter_token = self._histogram("inter_token_seconds", "Between tokens of one answer", _TOKEN_SECONDS)
        self.end_to_end = self._histogram("request_seconds", "From request to last token", _SECONDS)
        self.accept_length = self._histogram(
            "accept_length", "Tokens that a speculative step committed to a request, bonus included", range(1, 10)
        )
        self.registry.register(_ReportCollector(self))

    def exposition(self) -> bytes:
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"{_PREFIX}_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...] | range) -> Histogram:
        return Histogram(f"{_PREFIX}_{name}", text, registry=self.registry, buckets=tuple(buckets))


class _ReportCollector:
    """The model process's numbers, as its last report gave them; nothing before the first."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        report = self._metrics.report
        if report is None:
            return
        gauges: dict[str, tuple[float, str]] = {
            "running": (report.running, "Requests in the batch"),
            "waiting": (report.waiting, "Requests in the queue"),
            "context_tokens": (report.context_tokens, "KV rows of the running requests together"),
            "speculating": (int(report.effective.active), "1 when the last step speculated"),
        }
        counters: dict[str, tuple[float, str]] = {
            "concurrency_seconds": (report.concurrency_seconds_total, "Integral of running + waiting over time"),
            "steps": (report.counters.steps, "Speculative steps, each request of a batch counted"),
            "plain_steps": (report.counters.plain_steps, "Plain steps, each request of a batch counted"),
            "drafted_tokens": (report.counters.drafted_tokens, "Draft tokens verified"),
            "accepted_tokens": (report.counters.accepted_tokens, "Draft tokens accepted"),
            "emitted_tokens": (report.counters.emitted_tokens, "Tokens committed"),
        }
        device = report.device
        if device.memory_bytes:
            memory = GaugeMetricFamily(f"{_PREFIX}_memory_bytes", "Reserved, by what for", labels=["part"])
            for part, count in device.memory_bytes.items():
                memory.add_metric([part], count)
            yield memory
        counters["recorded_steps"] = (device.recorded, "Steps made into graphs")
        counters["recording_seconds"] = (device.recording_seconds, "Spent making them, since the start")
        counters["recording_failures"] = (device.recording_failures, "Steps that could not be recorded, and ran as is")
        for name, (value, text) in gauges.items():
            yield GaugeMetricFamily(f"{_PREFIX}_{name}", text, value=value)
        for name, (value, text) in counters.items():
            yield CounterMetricFamily(f"{_PREFIX}_{name}", text, value=value)
