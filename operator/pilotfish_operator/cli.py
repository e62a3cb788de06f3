"""`pilotfish plan | explain | record | replay | top | simulate`: what the operator would do, by its own functions.

Knows nothing that the operator does not: only how to print it.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import yaml
from pydantic import ValidationError

from pilotfish_engine.contract.reason import bounds_text
from pilotfish_engine.contract.reason import count as count_of
from pilotfish_engine.contract.speculation import EngineReport
from pilotfish_operator import __version__, objects, plan
from pilotfish_operator.api import Spec
from pilotfish_operator.apply import projection
from pilotfish_operator.cache import Cache
from pilotfish_operator.config import Config, current_access
from pilotfish_operator.kinds import BY_NAME, CHILD_SELECTOR, CHILDREN, MODELS, SECRETS
from pilotfish_operator.kube import Kube, KubeError, NotFound
from pilotfish_operator.objects import Object, Owner
from pilotfish_operator.observe import Observed, Pod, observe, owner_of
from pilotfish_operator.record import VERSION, Decided, Entry, Inputs, RecordError, Unread, files, read_file
from pilotfish_operator.scrape.client import PATH, EngineError, Engines
from pilotfish_operator.scrape.findings import Seen
from pilotfish_operator.simulate import command as simulate
from pilotfish_operator.top import top

LOG = Path("/var/lib/pilotfish/decisions")  # in the operator's pod
LAST = 10  # changes that `explain` shows
HIDDEN_UID = "00000000-0000-0000-0000-000000000000"


class CliError(Exception):
    """One sentence for the person; exit code 2."""


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser("pilotfish", description=__doc__.partition("\n")[0])
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("plan", help="the objects that a manifest becomes, and what they cost")
    command.add_argument("-f", "--file", required=True, type=Path, help="manifest with SpeculativeModels")
    command.add_argument("--image", default=Config.engine_image, help="engine image")
    command.add_argument("--live", action="store_true", help="compare with the cluster: changes and restarts")
    command.set_defaults(run=_plan)
    for name, run, text in (
        ("explain", _explain, "inputs, decision and rejected options of a running model"),
        ("record", _record, "decisions on a running model with their inputs as JSON lines, for replay"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("name")
        command.add_argument("-n", "--namespace", default="default")
        command.add_argument("--seconds", type=float, default=6.0, help="how long to watch the load (default 6)")
        command.set_defaults(run=run)
    commands.choices["explain"].add_argument(
        "--log", type=Path, default=LOG, help=f"the operator's log of decisions, if it is here (default {LOG})"
    )
    command = commands.add_parser("replay", help="recorded decisions that today's code would not make")
    command.add_argument("file", type=Path, help="what `record` printed, or a file or the folder of the operator's log")
    command.add_argument("--all", action="store_true", help="print each change that was decided, too")
    command.set_defaults(run=_replay)
    command = commands.add_parser("top", help="all models live in the terminal")
    command.add_argument("-n", "--namespace", help="only this one (default: all)")
    command.set_defaults(run=_top)
    text = "loads over simulated engines, beside static settings and an oracle"
    simulate.add(commands.add_parser("simulate", help=text))
    flags = parser.parse_args(argv)
    try:
        flags.run(flags)
    except (CliError, simulate.SimulateError, KubeError, OSError) as problem:
        print(f"pilotfish: {problem}", file=sys.stderr)
        sys.exit(2)


def _spec(model: Object) -> Spec:
    try:
        return Spec.model_validate(model.get("spec"))
    except ValidationError as problem:
        first = problem.errors()[0]
        where = ".".join(["spec", *map(str, first["loc"])])
        raise CliError(f"{model['metadata'].get('name')}: {where}: {first['msg']}") from problem


def _models(path: Path) -> Iterator[Object]:
    try:
        documents = [doc for doc in yaml.safe_load_all(path.read_text(encoding="utf-8")) if isinstance(doc, dict)]
    except yaml.YAMLError as problem:
        raise CliError(f"{path} is not YAML: {problem}") from problem
    found = [doc for doc in documents if doc.get("kind") == MODELS.name]
    if not found:
        raise CliError(f"{path} holds no {MODELS.name}")
    for model in found:
        yield {**model, "metadata": {"namespace": "default", "uid": HIDDEN_UID, **model["metadata"]}}


def _plan(flags: argparse.Namespace) -> None:
    for model in _models(flags.file):
        spec, owner = _spec(model), owner_of(model)
        missing = objects.unsupported(spec)
        if missing:
            raise CliError("; ".join(missing))
        empty = Observed(None, 0, None, None, None, (), False, None)
        decision, _ = plan.decide(spec, empty, plan.Memory(), 0.0)
        made = plan.plan(owner, spec, empty, decision, flags.image)
        manifests = [*made.objects, objects.secret(owner, "(generated)")]
        if flags.live:
            asyncio.run(_compare(owner, made))
        else:
            print(yaml.safe_dump_all(manifests, sort_keys=False), end="")
        print(f"# {owner.name}: {_bill(spec)}")


def _bill(spec: Spec) -> str:
    low = spec.autoscaling.min_replicas if spec.autoscaling else 1 if spec.replicas is None else spec.replicas
    high = spec.autoscaling.max_replicas if spec.autoscaling else low
    replicas = f"{low}" if low == high else f"{low} to {high}"
    if spec.resources.accelerator == "None":
        return f"{replicas} replicas, no accelerators"
    each = spec.engine.tensor_parallel_size
    total = f"{low * each}" if low == high else f"{low * each} to {high * each}"
    return f"{replicas} replicas of {each} x {spec.resources.accelerator}: {total} in all"


async def _compare(owner: Owner, made: plan.Plan) -> None:
    api = await Kube.connect(current_access())
    try:
        running = None
        for manifest in made.objects:
            kind = BY_NAME[manifest["kind"]]
            manifest["metadata"].pop("ownerReferences")  # a manifest knows no uid
            try:
                live = await api.get(kind, owner.namespace, manifest["metadata"]["name"])
            except NotFound:
                print(f"create  {kind.name} {manifest['metadata']['name']}")
                continue
            if kind.name == "Deployment":
                running = observe(owner, {(kind, owner.name): live}).rendered
                same = running == made.wanted
            else:
                same = projection(live, manifest) == manifest
            print(f"{'keep  ' if same else 'change'}  {kind.name} {manifest['metadata']['name']}")
        if running:
            print("pods are not restarted" if running == made.wanted else "every pod is replaced")
    finally:
        await api.close()


async def _watch(flags: argparse.Namespace) -> tuple[Object, list[tuple[float, Observed]]]:
    """The model, and its children and reports every 2 seconds for so long as asked."""
    api = await Kube.connect(current_access())
    try:
        model = await api.get(MODELS, flags.namespace, flags.name)
        owner, seen = owner_of(model), []
        end = time.monotonic() + flags.seconds
        async with Engines() as engines:
            while True:
                cache = Cache()
                for kind in CHILDREN:
                    items, version = await api.list(kind, flags.namespace, CHILD_SELECTOR)
                    cache.listed(kind, flags.namespace, items, version, 0.0)
                family = cache.family((owner.namespace, owner.name))
                data = family.get((SECRETS, owner.secret), {}).get("data") or {}
                token = base64.b64decode(data.get(objects.TOKEN_KEY, "")).decode()
                state = observe(owner, family)
                serving = [pod for pod in state.pods if pod.serves]
                found = [(pod.uid, await _read(api, engines, owner, pod, token)) for pod in serving]
                reports = {uid: report for uid, report in found if isinstance(report, EngineReport)}
                unread = {uid: report for uid, report in found if isinstance(report, str)}
                seen.append((time.monotonic(), replace(state, seen=Seen(reports, unread))))
                if time.monotonic() >= end:
                    return model, seen
                await asyncio.sleep(2)
    finally:
        await api.close()


async def _read(api: Kube, engines: Engines, owner: Owner, pod: Pod, token: str) -> EngineReport | str:
    """Straight from the pod, or through the API server where its network is out of reach."""
    try:
        return await engines.report(pod.address or "", pod.port)
    except EngineError as problem:
        try:
            return EngineReport.model_validate(await api.proxy(owner.namespace, pod.name, str(pod.port), PATH))
        except (KubeError, ValidationError):
            return str(problem)


def _explain(flags: argparse.Namespace) -> None:
    model, seen = asyncio.run(_watch(flags))
    spec, memory = _spec(model), plan.Memory()
    for at, observed in seen:
        memory = plan.learn(memory, observed, at)
        decision, memory = plan.decide(spec, observed, memory, at)
    print(f"{flags.namespace}/{flags.name}, watched for {flags.seconds:.0f}s (the operator remembers longer windows)\n")
    print("inputs")
    for pod in observed.pods:
        report = observed.reports.get(pod.uid)
        text = observed.silent.get(pod.uid) or pod.trouble or "does not serve yet"
        if report:
            length = "unknown" if report.accept_length is None else f"{report.accept_length:.2f}"
            text = (
                f"{report.running} running, {report.waiting} waiting, {report.context_tokens} context tokens, "
                f"acceptance length {length}, {report.reason}"
            )
        print(f"  {pod.name}: {text}")
    if decision.target:
        print(f"  one replica should carry {decision.target:g}")
    if decision.tuning.crossover:
        print(f"  plain decoding is faster from {decision.tuning.crossover} running requests")
    print("decision")
    for reason in decision.reasons:
        print(f"  {reason}")
    print("status")
    for condition in (model.get("status") or {}).get("conditions", ()):
        print(f"  {condition['type']:<18} {condition['status']:<8} {condition['message']}")
    for line in last_changes(flags.log, flags.namespace, flags.name):
        print(line)


def last_changes(log: Path, namespace: str, name: str) -> list[str]:
    """The last decisions on a model that changed something, with their time; nothing where there is no log."""
    if not log.exists():
        return []
    found = list[str]()
    before: Decided | None = None
    try:
        for entry in (entry for path in files(log) for entry in read_file(path)):
            if isinstance(entry, Unread) or (entry.namespace, entry.name) != (namespace, name):
                continue
            was = entry.decided
            if before is None or (before.replicas, before.envelope) != (was.replicas, was.envelope):
                found.append(f"  {_when(entry)}  " + " ".join(was.reasons))
            before = was
    except RecordError as problem:
        found.append(f"  the log ends early: {problem}")
    return ["last changes", *found[-LAST:]]


def _when(entry: Entry) -> str:
    return datetime.fromtimestamp(entry.time, UTC).strftime("%Y-%m-%d %H:%M:%S")


def _record(flags: argparse.Namespace) -> None:
    model, seen = asyncio.run(_watch(flags))
    spec, memory, former = _spec(model), plan.Memory(), (model.get("status") or {}).get("replicas")
    for at, observed in seen:
        before = plan.learn(memory, observed, at)
        decision, memory = plan.decide(spec, observed, before, at, former)
        entry = Entry(
            time=time.time(),
            namespace=flags.namespace,
            name=flags.name,
            at=at,
            spec=spec,
            inputs=Inputs.of(observed),
            memory=before,
            former=former,
            decided=Decided.of(decision),
        )
        print(entry.line(), end="")


def _top(flags: argparse.Namespace) -> None:
    async def show() -> None:
        api = await Kube.connect(current_access())
        try:
            await top(api, flags.namespace)
        finally:
            await api.close()

    asyncio.run(show())


def _replay(flags: argparse.Namespace) -> None:
    try:
        entries = (entry for path in files(flags.file) for entry in read_file(path))
        for line in replay(entries, flags.all):
            print(line)
    except RecordError as problem:
        raise CliError(str(problem)) from problem


def replay(entries: Iterable[Entry | Unread], changes: bool = False) -> Iterator[str]:
    """Yields a line for each decision that today's code would not make.

    changes: also one for each decision that changed something. The last line counts them.
    """
    before, count, others, unread = dict[str, Decided](), 0, 0, list[str]()
    for entry in entries:
        if isinstance(entry, Unread):
            unread.append(entry.version)
            continue
        count, was, model = count + 1, entry.decided, f"{entry.namespace}/{entry.name}"
        when = _when(entry)
        last = before.get(model)
        if changes and (last is None or (last.replicas, last.envelope) != (was.replicas, was.envelope)):
            yield f"{when}  {model}  " + " ".join(was.reasons)
        before[model] = was
        if entry.differs:
            others, now = others + 1, entry.today()
            yield f"{when}  {model}  {_differs(was, now)}"
            yield "    today: " + " ".join(now.reasons)
    if unread:
        versions = ", ".join(sorted(set(unread)))
        yield f"{len(unread)} entries are of version {versions} and not used; {VERSION} is read here"
    yield f"{count} decisions, {others} of which would be others today"


def _differs(was: Decided, now: Decided) -> str:
    """What was decided, and what would be today."""
    parts = []
    if was.replicas != now.replicas:
        parts.append(f"{count_of(was.replicas)} then, {now.replicas} today")
    if was.envelope != now.envelope:
        parts.append(f"bounds {bounds_text(was.envelope)} then, {bounds_text(now.envelope)} today")
    return "; ".join(parts)


if __name__ == "__main__":
    main()
