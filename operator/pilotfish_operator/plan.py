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
from pilotfish_operator.observe import Observed, Pod, Verdict
from pilotfish_operator.schema import seconds

GIVEN_UP = 2  # restarts of a new template's pod after which the former one is taken back
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
    """What to make so. `blocked`: why the spec's own template does not run, as one word and as a sentence; `verdict`:
    what is held against it, also while it is tried again. `prune`: ConfigMaps of templates that nothing has."""

    decision: Decision
    wanted: str
    replicas: int
    blocked: tuple[str, str] | None
    draft_misfits: bool
    objects: tuple[Object, ...]
    needs_token: bool
    push: tuple[Pod, ...]
    verdict: Verdict | None = None
    prune: tuple[str, ...] = ()


@dataclass(frozen=True)
class Patience:
    """Seconds: before what was refused is tried again (doubling, to 64 times as many), and before a rollout that does
    not become ready for a reason that is no exit goes back."""

    again: float = 300.0
    rollout: float = 300.0


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
    if spec.paused:
        kept = current if auto is None else observed.replicas or former or current
        scale = replace(scale, replicas=kept, limited=None, reason=reason.replicas_kept(kept, "spec.paused says so"))
    tuning, tune_state = tune.tune(limits, None if spec.paused else seen, held, memory.tune, now)
    speed = scale_state.readings[-1].tokens_per_second if scale_state.readings else 0.0
    return Decision(scale.replicas, tuning.envelope, scale, tuning, seen, target, speed), Memory(
        scale_state, tune_state
    )


def plan(
    owner: Owner,
    spec: Spec,
    observed: Observed,
    decision: Decision,
    image: str,
    now: float = 0.0,
    patience: Patience | None = None,
) -> Plan:
    """`image`: the engine image of new templates; running ones keep theirs until the spec's start-up part changes.
    `now`: seconds since 1970."""
    wanted = objects.template_hash(owner, spec)
    missing = objects.unsupported(spec)
    serving = observed.rendered if observed.rendered and observed.ready(observed.rendered) else observed.serving
    former = serving if serving != wanted and serving in observed.templates else None
    verdict, held = _judge(spec, observed, wanted, serving, former, now, patience or Patience())
    blocked = (
        ("Unsupported", "; ".join(missing))
        if missing
        else (verdict.reason, verdict.message)
        if verdict and held
        else None
    )
    running, replicas = wanted, decision.replicas
    if blocked and former:
        running = former
    elif blocked:
        replicas = 0
    made: list[Object] = []
    if running == former or not missing:
        body = observed.templates.get(running) or objects.template(owner, spec, image)
        notes = {observe.SERVING: serving} if serving else {}
        notes |= {observe.VERDICT: verdict.text()} if verdict else {}
        kept = [
            objects.kept_template(owner, digest, observed.templates.get(digest) or body)
            for digest in dict.fromkeys((running, former))
            if digest
        ]
        made = [*objects.children(owner, spec, observed.claim), *kept]
        made.append(objects.deployment(owner, spec, body, replicas, notes))
    done = tune.in_step(observed.reports, decision.envelope)
    needed = {wanted, running, serving, observed.rendered, *(pod.hash for pod in observed.pods)}
    return Plan(
        decision=decision,
        wanted=wanted,
        replicas=replicas,
        blocked=blocked,
        draft_misfits=bool(blocked and spec.speculation.draft and "draft" in blocked[1].lower()),
        objects=tuple(made),
        needs_token=bool(made) and not observed.has_token,
        push=tuple(pod for pod in observed.pods if pod.uid in observed.reports and pod.uid not in done),
        verdict=verdict,
        prune=tuple(objects.template_name(owner, digest) for digest in sorted(observed.templates.keys() - needed)),
    )


def _judge(
    spec: Spec,
    observed: Observed,
    wanted: str,
    serving: str | None,
    former: str | None,
    now: float,
    patience: Patience,
) -> tuple[Verdict | None, bool]:
    """What is held against the wanted template, and whether it is not to run now. One that serves, or has served
    last, is not judged: what fails in it may come back."""
    if observed.ready(wanted) or serving == wanted:
        return None, False
    old = observed.verdict if observed.verdict and observed.verdict.hash == wanted else None
    if spec.paused:
        return old, old is not None
    if old and (old.until is None or now < old.until):
        return old, True
    failure = _failure(observed, wanted, former, now, patience)
    if failure is None:
        return old, False
    tries = old.tries + 1 if old else 1
    until = None if former and not objects.surge(spec) else now + patience.again * 2.0 ** min(tries - 1, 6)
    return Verdict(wanted, failure[0], failure[1][:2000], tries, until), True


def _failure(
    observed: Observed, wanted: str, former: str | None, now: float, patience: Patience
) -> tuple[str, str] | None:
    """Why the wanted template does not run, when that is sure enough to give it up; `former`: what can run instead."""
    pods = [pod for pod in observed.pods if pod.hash == wanted and not pod.ready and not pod.leaving]
    for pod in pods:
        if pod.exit and pod.exit.code == observe.USAGE_ERROR:
            return "EngineRefused", pod.exit.message or "the engine ended with exit code 2 and no last words"
    if former is None:
        return None
    leaving = any(pod.leaving for pod in observed.pods)  # what they hold is not free yet
    for pod in pods:
        crashes = pod.exit is not None and pod.exit.code != 0 and pod.restarts >= GIVEN_UP
        if pod.trouble and (crashes or (now - pod.created > patience.rollout and not leaving)):
            return "RolloutFailed", f"pod {pod.name} {pod.trouble}"
    if observed.rollout_trouble and observed.rendered == wanted:
        return "RolloutFailed", observed.rollout_trouble
    return None
