"""Pure: (spec, Observed, memory of earlier decisions) → Plan with reasons in words and numbers.

`decide` is the one function by which the operator, `explain`, `replay` and simulations choose replicas and envelope.
Does no I/O and holds no clock: time is passed in.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from pilotfish_engine.contract import reason
from pilotfish_engine.contract.speculation import Envelope
from pilotfish_operator import autoscale, objects, observe, tune
from pilotfish_operator.api import Spec
from pilotfish_operator.objects import Object, Owner
from pilotfish_operator.observe import Observed, Pod, Refusal, Template
from pilotfish_operator.schema import seconds

LOAD_WINDOW = 60.0  # seconds, for the load of a model that is not autoscaled


@dataclass(frozen=True)
class Memory:
    """What the next decision needs of the ones before it. A new one is safe: nothing scales in until windows filled."""

    scale: autoscale.State = field(default_factory=autoscale.State)
    tune: tune.State = field(default_factory=tune.State)


@dataclass(frozen=True)
class Decision:
    replicas: int
    envelope: Envelope
    scale: autoscale.Scale
    tuning: tune.Tuning
    traffic: tune.Traffic | None
    target: float | None
    tokens_per_second: float

    @property
    def reasons(self) -> tuple[str, ...]:
        """The chosen, the two best rejected options and what limits them; whole sentences."""
        limits = [self.scale.limited] if self.scale.limited else []
        return (self.scale.reason, self.tuning.reason, *limits)


@dataclass(frozen=True)
class Plan:
    """What to make so. `blocked`: why the spec's own template does not run, as one word and as a sentence."""

    decision: Decision
    wanted: str
    replicas: int
    blocked: tuple[str, str] | None
    draft_misfits: bool
    objects: tuple[Object, ...]
    needs_token: bool
    push: tuple[Pod, ...]


def learn(memory: Memory, observed: Observed, now: float) -> Memory:
    """Take in reports that were just read."""
    serving = [pod.uid for pod in observed.pods if pod.serves]
    return replace(memory, scale=autoscale.measure(memory.scale, serving, observed.reports, now))


def decide(
    spec: Spec, observed: Observed, memory: Memory, now: float, former: int | None = None
) -> tuple[Decision, Memory]:
    """Replicas and envelope. `former`: replicas that status remembers, for when the Deployment is gone."""
    limits = objects.bounds(spec)
    auto = spec.autoscaling
    stable = seconds(auto.stable_window) if auto else LOAD_WINDOW
    recent = autoscale.mean(memory.scale.readings, min(6.0, stable), now)
    reports = list(observed.reports.values())
    known = recent.complete and recent.covered > 0.3
    seen = tune.traffic(reports, recent.value if known else None)
    if auto:
        slo = spec.slo.tokens_per_second_per_user if spec.slo else None
        target = tune.target_concurrency(auto.target_concurrency, slo, limits, seen)
        bounds = autoscale.Bounds(auto.min_replicas, auto.max_replicas, target, stable, seconds(auto.scale_down_delay))
        current = observed.replicas if observed.replicas is not None else former or auto.min_replicas
        current = max(1, current)  # a refused model had none
    else:
        target, current = None, 1 if spec.replicas is None else spec.replicas
        bounds = autoscale.Bounds(current, current, None, stable)
    scale, scale_state = autoscale.decide(bounds, memory.scale, current, observed.ready_any, now)
    if not auto:
        scale = replace(scale, limited=None, reason=reason.replicas_kept(current, "spec.replicas says so"))
    held = [report.envelope for report in reports]
    tuning, tune_state = tune.tune(limits, seen, held, memory.tune, now)
    speed = scale_state.readings[-1].tokens_per_second if scale_state.readings else 0.0
    return Decision(scale.replicas, tuning.envelope, scale, tuning, seen, target, speed), Memory(
        scale_state, tune_state
    )


def plan(owner: Owner, spec: Spec, observed: Observed, decision: Decision, image: str) -> Plan:
    """`image`: the engine image of new templates; running ones keep theirs until the spec's start-up part changes."""
    wanted = objects.template_hash(owner, spec)
    missing = objects.unsupported(spec)
    refused = _refusal(observed, wanted)
    serving = observed.serving
    if observed.rendered and observed.ready(observed.rendered.hash):
        serving = observed.rendered
    blocked = (
        ("Unsupported", "; ".join(missing)) if missing else ("EngineRefused", refused.message) if refused else None
    )
    template: Template | None = observed.rendered if observed.rendered and observed.rendered.hash == wanted else None
    replicas = decision.replicas
    if blocked and serving and serving.hash != wanted:
        template = serving
    elif blocked:
        replicas = 0
    if template is None and not missing:
        template = Template(wanted, objects.template(owner, spec, image))
    made: list[Object] = []
    if template is not None:
        notes = {observe.TEMPLATE: template.text()}
        notes |= {observe.SERVING: serving.text()} if serving else {}
        notes |= {observe.REFUSED: refused.text()} if refused else {}
        made = [*objects.children(owner, spec), objects.deployment(owner, spec, template.body, replicas, notes)]
    done = tune.in_step(observed.reports, decision.envelope)
    return Plan(
        decision=decision,
        wanted=wanted,
        replicas=replicas,
        blocked=blocked,
        draft_misfits=bool(refused and spec.speculation.draft and "draft" in refused.message.lower()),
        objects=tuple(made),
        needs_token=bool(made) and not observed.has_token,
        push=tuple(pod for pod in observed.pods if pod.uid in observed.reports and pod.uid not in done),
    )


def _refusal(observed: Observed, wanted: str) -> Refusal | None:
    """The engine's sentence about the wanted template. One that serves anywhere is not refused."""
    if observed.ready(wanted):
        return None
    if observed.refused and observed.refused.hash == wanted:
        return observed.refused
    for pod in observed.pods:
        if pod.hash == wanted and pod.exit and pod.exit.code == observe.USAGE_ERROR and not pod.ready:
            return Refusal(wanted, pod.exit.message or "the engine ended with exit code 2 and no last words")
    return None
