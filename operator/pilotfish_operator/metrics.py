"""The operator's own Prometheus metrics, in a registry of their own.

Knows nothing about where they are served.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from pilotfish_operator.cache import Key
from pilotfish_operator.observe import Observed
from pilotfish_operator.plan import Plan

_MODEL = ("namespace", "name")


class Metrics:
    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        name = "pilotfish_operator_"
        self.turns = Histogram(name + "turn_seconds", "Duration of one model's turn.", registry=registry)
        self.errors = Counter(
            name + "api_errors", "Requests that the API server refused.", ["error"], registry=registry
        )
        self.taken = Counter(name + "envelopes_put", "Envelopes that engines took.", registry=registry)
        self.depth = Gauge(name + "queue_depth", "Models that wait for their turn or have it.", registry=registry)
        self.leading = Gauge(name + "leading", "1 while this operator acts.", registry=registry)
        self.models = Gauge(name + "models", "SpeculativeModels seen.", registry=registry)
        self.desired = Gauge("pilotfish_model_desired_replicas", "Replicas decided.", _MODEL, registry=registry)
        self.ready = Gauge("pilotfish_model_ready_replicas", "Replicas that serve.", _MODEL, registry=registry)
        self.unread = Gauge("pilotfish_model_unread_pods", "Pods that cannot be read.", _MODEL, registry=registry)
        self.load = Gauge("pilotfish_model_concurrency", "Running plus waiting requests.", _MODEL, registry=registry)
        self.speedup = Gauge("pilotfish_model_speedup", "Expected tokens/s over plain.", _MODEL, registry=registry)

    def show(self, key: Key, observed: Observed, made: Plan) -> None:
        self.desired.labels(*key).set(made.replicas)
        self.ready.labels(*key).set(observed.ready_any)
        self.unread.labels(*key).set(len(observed.seen.unread))
        if observed.reports:
            self.load.labels(*key).set(made.decision.scale.stable.value)
        if made.decision.tuning.choice:
            self.speedup.labels(*key).set(made.decision.tuning.choice.speedup)

    def forget(self, key: Key) -> None:
        for gauge in (self.desired, self.ready, self.unread, self.load, self.speedup):
            gauge.remove_by_labels(dict(zip(_MODEL, key, strict=True)))
