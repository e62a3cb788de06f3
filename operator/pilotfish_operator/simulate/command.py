"""`pilotfish simulate`: reads machines and loads, runs a study, prints and draws it."""

from __future__ import annotations

import argparse
import json
import time
from importlib import resources
from pathlib import Path

from pilotfish_operator import objects
from pilotfish_operator.api import Spec
from pilotfish_operator.simulate import machine as machines
from pilotfish_operator.simulate.figures import Figures, Promise, plain_data, table
from pilotfish_operator.simulate.load import CHAT, LOADS, Arrival, arrivals, recorded
from pilotfish_operator.simulate.picture import PictureError, curve, trajectory
from pilotfish_operator.simulate.study import Point, Study, Traffic, points, steady

USERS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
ACCEPTED = (0.2, 0.4, 0.6, 0.8)


class SimulateError(Exception):
    """One sentence for the person."""


def add(command: argparse.ArgumentParser) -> None:
    """The flags."""
    known = ", ".join(sorted(_known()))
    command.add_argument("--machine", default="h200-8b", help=f"a JSON file, or one of {known} (default h200-8b)")
    what = command.add_mutually_exclusive_group()
    what.add_argument("--steady", action="store_true", help="a curve over users at once instead of a load")
    what.add_argument("--load", default="steps", help=f"one of {', '.join(LOADS)}, or a JSON-lines file of requests")
    command.add_argument("--peak", type=float, default=20.0, help="requests a second at the load's highest")
    command.add_argument("--slo", type=float, help="tokens/s that each user must get")
    command.add_argument("--ttft", type=float, help="seconds to the first token that each user must get")
    command.add_argument("--max-replicas", type=int, default=8)
    command.add_argument("--steps", type=int, default=5, help="most draft steps, 1 to 8")
    command.add_argument("--topk", type=int, default=1)
    command.add_argument("--accepted", type=float, nargs="+", default=ACCEPTED, help="shares of drafts that are right")
    command.add_argument("--users", type=int, nargs="+", default=USERS)
    command.add_argument("--prompt", type=int, default=128, help="tokens, at steady points")
    command.add_argument("--seconds", type=float, default=10.0, help="measured at each steady point")
    command.add_argument("--coarse", type=int, default=64, help="steps that one may stand for; 1 is exact")
    command.add_argument("--only-plain", action="store_true", help="leave static settings but plain out")
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--json", type=Path, help="write the figures to this file")
    command.add_argument("--picture", type=Path, help="draw to this file")
    command.add_argument("--title", help="of the picture (default: the machine's name)")
    command.set_defaults(run=simulate)


def simulate(flags: argparse.Namespace) -> None:
    """Runs the study that the flags describe. Raises SimulateError."""
    try:
        machine = find(flags.machine)
        spec = _spec(flags)
        if flags.steady:
            _steady(flags, machine, spec)
        else:
            _load(flags, machine, spec)
    except (machines.MachineError, PictureError, ValueError) as problem:
        raise SimulateError(str(problem)) from problem


def _known() -> dict[str, str]:
    folder = resources.files("pilotfish_operator.simulate").joinpath("machines")
    return {
        item.name.removesuffix(".json"): item.read_text(encoding="utf-8")
        for item in folder.iterdir()
        if item.name.endswith(".json")
    }


def find(name: str) -> machines.Machine:
    """Returns a machine by its name or its file. Raises MachineError."""
    known = _known()
    if name in known:
        return machines.read(known[name], name)
    if not Path(name).is_file():
        raise machines.MachineError(f"{name} is no file and no machine; {', '.join(sorted(known))} would work")
    return machines.read(Path(name).read_text(encoding="utf-8"), name)


def _spec(flags: argparse.Namespace) -> Spec:
    return Spec.model_validate(
        {
            "model": {"source": "file:///simulated"},
            "speculation": {"numSteps": flags.steps, "topK": flags.topk},
            "autoscaling": {"minReplicas": 1, "maxReplicas": flags.max_replicas},
            **({"slo": {"tokensPerSecondPerUser": flags.slo}} if flags.slo else {}),
        }
    )


def _steady(flags: argparse.Namespace, machine: machines.Machine, spec: Spec) -> None:
    users = [number for number in flags.users if number <= machine.max_running_requests]
    bounds = objects.bounds(spec)
    rows = [
        steady(
            machine, bounds, number, Traffic(accepted, flags.prompt), flags.seconds, flags.seed, not flags.only_plain
        )
        for accepted in flags.accepted
        for number in users
    ]
    print(f"{machine.name}: tokens/s ({machine.measured})\n{points(rows)}")
    worst = min(rows, key=lambda row: row.of_best_static)
    print(f"the least of the best static: {worst.of_best_static:.3f}, {worst.users} users at {worst.accepted:g}")
    if flags.json:
        flags.json.write_text(json.dumps([_point(row) for row in rows], indent=1), encoding="utf-8")
    if flags.picture:
        curve([row for row in rows if row.accepted == flags.accepted[-1]], flags.title or machine.name, flags.picture)


def _point(row: Point) -> dict[str, object]:
    return {"users": row.users, "accepted": row.accepted, "promised": row.promised, **row.rates}


def _load(flags: argparse.Namespace, machine: machines.Machine, spec: Spec) -> None:
    requests, seconds = _requests(flags)
    promise = Promise(flags.slo, flags.ttft)
    study = Study(machine, spec, requests, seconds, promise, flags.seed, flags.coarse)
    began = time.monotonic()
    rows, own = study.rows(not flags.only_plain)
    took = time.monotonic() - began
    print(f"{machine.name}, {flags.load} of {seconds / 3600:.2f} h, {len(requests)} requests, seed {flags.seed}")
    print(table(rows))
    oracle = rows[1].seen_tokens_per_second
    print(f"of the oracle: {rows[0].seen_tokens_per_second / oracle if oracle else 1:.3f} of what a user sees")
    hours = sum(row.gpu_hours for row in rows) / max(1, machine.gpus)
    print(f"{hours:.0f} engine-hours simulated in {took:.0f} s")
    _write(flags, rows)
    if flags.picture:
        trajectory(own, flags.title or f"{machine.name}, {flags.load}", flags.picture)


def _requests(flags: argparse.Namespace) -> tuple[list[Arrival], float]:
    if flags.load in LOADS:
        load = LOADS[flags.load](flags.peak)
        return list(arrivals(load, flags.seed)), load.seconds
    path = Path(flags.load)
    if not path.is_file():
        raise SimulateError(f"{flags.load} is no file and no load; {', '.join(LOADS)} would work")
    with path.open(encoding="utf-8") as file:
        found = recorded(file, CHAT)
    if not found:
        raise SimulateError(f"{flags.load} holds no request")
    return found, found[-1].at


def _write(flags: argparse.Namespace, rows: list[Figures]) -> None:
    if flags.json:
        flags.json.write_text(json.dumps(plain_data(rows), indent=1), encoding="utf-8")
