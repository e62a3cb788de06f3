"""The demo from beginning to end, each step a function; what it waits for, and for how long.

Reads the model's status as `kubectl get -o json` gives it.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import time
from collections.abc import Callable
from typing import Any

from examples.demo import chat, screen
from examples.demo.record import Record, course, part, short, words
from examples.demo.world import DemoError, World

CHART, EXAMPLE = "charts/pilotfish", "examples/smollm2.yaml"
MODEL = "smollm2"
RELEASE, NAMESPACE = "pilotfish", "pilotfish-system"
USERS = 24
PERIOD = 1.0
PATIENCE = 900.0  # seconds for each thing that is waited for: other work on the machine may slow all of it
# Most of the answer stands in the question, so it is easy to guess.
QUESTION = """Correct the spelling mistakes in this text and repeat it:

A pilot fish is a small striped fish that swims beside sharks. It eats the parasites on the skin of the shark, and the \
shark leaves it alone. Sailors once beleived that the pilot fish leads the shark to its food, and so it got its name."""


def install(world: World) -> None:
    screen.step("Install the operator")
    if _exists(world):
        raise DemoError(f"there is a SpeculativeModel {MODEL} already: kubectl delete speculativemodel {MODEL}")
    world.touched = True
    extra = shlex.split(os.environ.get("HELM_ARGS", ""))
    world.run("helm", "upgrade", "--install", RELEASE, CHART, "-n", NAMESPACE, "--create-namespace", *extra)
    rollout = ("rollout", "status", f"deployment/{RELEASE}", f"--timeout={PATIENCE:.0f}s")
    world.run("kubectl", "-n", NAMESPACE, *rollout, timeout=PATIENCE + 10)
    screen.note("the operator runs, itself as a pod")


def _exists(world: World) -> bool:
    try:
        return world.get("speculativemodel", MODEL) is not None
    except DemoError:  # the kind is not known here
        return False


def serve(world: World) -> None:
    screen.step("Serve a model")
    world.show("kubectl", "apply", "-f", EXAMPLE)
    seen: dict[str, str] = {}

    def ready(model: Any) -> bool:
        for condition in _conditions(model).values():
            text = f"{condition['type']}={condition['status']}: {condition['message']}"
            if seen.get(condition["type"]) != text:
                seen[condition["type"]] = text
                screen.note(text)
        return holds(model, "Ready")

    asyncio.run(wait(world, ready, PATIENCE, "READY"))


def question(world: World) -> None:
    screen.step("Ask it")
    [pod, *_] = world.pods(MODEL)
    screen.say(f"> {QUESTION}")
    if not chat.ask(world.url(pod), MODEL, QUESTION).strip():
        raise DemoError("the answer was empty")
    asyncio.run(wait(world, lambda model: "acceptLength" in _speculation(model), PATIENCE, "a measured acceptance"))
    world.show("kubectl", "get", "speculativemodels")


def load(world: World) -> None:
    screen.step(f"Load it: {USERS} users at once, until it has scaled and its settings have changed")
    asyncio.run(_load(world))


async def _load(world: World) -> None:
    told = frozenset(event["metadata"]["uid"] for event in _events(world))
    record = Record(_status(world.get("speculativemodel", MODEL)), told)
    urls: list[str] = []
    async with chat.Load(MODEL, USERS, lambda: urls, seconds=PATIENCE) as load:

        def shown(model: Any) -> bool:
            urls[:] = [world.url(pod) for pod in world.pods(MODEL)]
            status = _status(model)
            record.see(status)
            record.hear(_events(world))
            replicas = f"{status.get('readyReplicas', 0)} of {status.get('replicas', 0)} replicas serve"
            desired, runs = part(status, "desired"), part(status, "effective")
            settings = f"desired {words(desired)} · engines run {short(runs) if runs else 'nothing yet'}"
            concurrency = status.get("load", {}).get("concurrency", 0)
            screen.live(f"{replicas} · {settings}", f"concurrency {concurrency} · {load.done} answers")
            if load.failed > 3 * USERS:
                raise DemoError(f"{load.failed} requests failed; the last one: {load.last_error}")
            return not record.missing and load.done > 0

        try:
            await wait(world, shown, PATIENCE, "scaled and tuned")
        except DemoError as error:
            raise DemoError(f"{error}; the load has not shown {record.missing or 'an answer'}") from error
        screen.note(f"replicas that served at most: {record.most_replicas}")
        screen.note(f"bounds set, numSteps×topK→numDraftTokens: {course(record.desired)}")
        screen.note(f"what engines ran within them: {course(record.effective)}")
        world.show("kubectl", "get", "speculativemodels")


def explain(world: World) -> None:
    screen.step("Why these settings")
    text = world.run("kubectl", "describe", "speculativemodel", MODEL)
    lines = text.partition("\nStatus:")[2].splitlines()
    first = next((number for number, line in enumerate(lines) if line.startswith("  Speculation:")), 0)
    screen.say("  …\n" + "\n".join(lines[first:]))


def take_down(world: World) -> None:
    """Best effort: the model, then the operator."""
    if not world.touched:
        return
    screen.step("Take everything down")
    for argv in (
        ("kubectl", "delete", "--ignore-not-found", "--wait=false", "-f", EXAMPLE),
        ("helm", "uninstall", RELEASE, "-n", NAMESPACE, "--ignore-not-found", "--wait=false"),
    ):
        try:
            world.run(*argv)
        except DemoError as error:
            screen.note(str(error))


async def wait(world: World, done: Callable[[Any], bool], seconds: float, what: str) -> None:
    """Reads the model until `done` says so. Raises DemoError with its conditions after `seconds`.

    `done` runs in a thread, so that it may ask kubectl while a load goes on.
    """
    deadline = time.monotonic() + seconds
    while True:
        model = await asyncio.to_thread(world.get, "speculativemodel", MODEL)
        if model is not None and await asyncio.to_thread(done, model):
            return
        if time.monotonic() > deadline:
            seen = [f"{each['type']}={each['status']} {each['message']}" for each in _conditions(model or {}).values()]
            raise DemoError(f"not {what} after {seconds:.0f} s: {'; '.join(seen) or 'no status at all'}")
        await asyncio.sleep(PERIOD)


def _conditions(model: Any) -> dict[str, Any]:
    return {each["type"]: each for each in model.get("status", {}).get("conditions", [])}


def holds(model: Any, condition: str) -> bool:
    found = _conditions(model).get(condition, {})
    current = found.get("observedGeneration") == model["metadata"]["generation"]
    return bool(found.get("status") == "True" and current)


def _status(model: Any) -> dict[str, Any]:
    return dict((model or {}).get("status", {}))


def _events(world: World) -> list[Any]:
    about = f"involvedObject.kind=SpeculativeModel,involvedObject.name={MODEL}"
    listed = world.get("events", "--field-selector", about)
    return list((listed or {"items": []})["items"])


def _speculation(model: Any) -> dict[str, Any]:
    return dict(_status(model).get("speculation", {}))
