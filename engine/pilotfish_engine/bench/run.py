"""A whole run: flags in, table out, 0 where every request succeeded.

Knows the order of things, and what to do when somebody does not want to wait for the end.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import resource
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import aiohttp
import uvloop
from tqdm import tqdm  # type: ignore[import-untyped]

from pilotfish_engine.bench import result as results
from pilotfish_engine.bench import table
from pilotfish_engine.bench.client import Client, Outcome
from pilotfish_engine.bench.load import Load, Run
from pilotfish_engine.bench.plan import Level, Plan, plan_from
from pilotfish_engine.bench.prompts import TEXT, Prompts, real, synthetic
from pilotfish_engine.bench.server import Server, between
from pilotfish_engine.errors import UsageError

READ_BUFFER = 4 << 20  # bytes; a smaller one makes long streams wait for this client
SPARE_DESCRIPTORS = 256


def bench(flags: Mapping[str, Any]) -> int:
    """The exit code: 0; 1 where a request failed or the run was cut short. Raises UsageError on what cannot work."""
    plan = plan_from(flags)
    baseline = None if plan.baseline is None else results.read(plan.baseline)
    prompts = None if plan.prompts is None else real(plan)
    _allow_connections(plan)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        result = runner.run(_Session(plan, prompts).measure())
    print(table.text_of(result, baseline), flush=True)
    if plan.json is not None:
        _write(plan, result)
    if plan.picture is not None:
        from pilotfish_engine.bench import picture  # matplotlib, of an extra

        picture.draw(result, baseline, plan.picture)
    return 0 if result.whole else 1


def _write(plan: Plan, result: results.Result) -> None:
    assert plan.json is not None
    try:
        plan.json.write_text(result.model_dump_json(indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--json {plan.json} cannot be written ({error.strerror}); another file would work") from error


def _allow_connections(plan: Plan) -> None:
    """As many descriptors as the largest level may need, as far as the system lets this process have them."""
    most = max(plan.requests_of(level) or 0 if level.kind == "rate" else int(level.value) for level in plan.levels)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = most + SPARE_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(most + SPARE_DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and wanted > soft:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class _Session:
    """One run against one server. Requests are numbered through it, so that none of a level asks what another did, as
    long as there are prompts."""

    def __init__(self, plan: Plan, prompts: Prompts | None) -> None:
        self._plan = plan
        self._prompts = prompts
        self._next = 0
        self._stopped = asyncio.Event()
        self._interrupted: str | None = None
        self._model = ""

    async def measure(self) -> results.Result:
        plan, began = self._plan, datetime.now(UTC).isoformat(timespec="seconds")
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._stop, number)
        headers = {} if plan.api_key is None else {"Authorization": f"Bearer {plan.api_key}"}
        async with aiohttp.ClientSession(
            headers=headers,
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
            read_bufsize=READ_BUFFER,
        ) as session:
            server = Server(session, plan.url)
            self._model = await server.model(plan.model)
            prompts = self._prompts or synthetic(plan, await server.token_ids(self._model, TEXT))
            levels = await self._levels(Client(session, plan.url, plan.api, plan.timeout), server, prompts)
        return results.Result(
            pilotfish_version=importlib.metadata.version("pilotfish"),
            began=began,
            url=plan.url,
            model=self._model,
            workload=_workload(plan),
            warm_up=plan.warm_up,
            timeout=plan.timeout,
            interrupted=self._interrupted,
            levels=tuple(levels),
        )

    async def _levels(self, client: Client, server: Server, prompts: Prompts) -> list[results.LevelResult]:
        deadline = time.monotonic() + self._plan.limit
        await self._warm_up(client, prompts, deadline)
        done: list[results.LevelResult] = []
        for level in self._plan.levels:
            if self._stopped.is_set():
                break
            first, before = self._next, await server.snapshot()
            load = await self._run(level, client, prompts, deadline)
            acceptance = between(before, await server.snapshot())
            self._next = first + load.started
            repeated = prompts.repeated(first, load.started)
            done.append(results.of_level(level, load, acceptance, repeated))
            if time.monotonic() >= deadline and self._interrupted is None:
                self._interrupted = f"--limit {self._plan.limit:g} s had passed"
                self._stopped.set()
        return done

    async def _run(self, level: Level, client: Client, prompts: Prompts, deadline: float) -> Load:
        plan, requests = self._plan, self._plan.requests_of(level)
        with tqdm(total=requests, desc=level.name, unit="req", file=sys.stderr, disable=None, leave=False) as bar:
            run = Run(level, self._next, requests, plan.seconds, plan.seed, self._send(client, prompts), bar.update)
            return await run.until(self._stopped, deadline - time.monotonic())

    async def _warm_up(self, client: Client, prompts: Prompts, deadline: float) -> None:
        """Raises UsageError where no answer comes at all: what follows would measure nothing."""
        count = self._plan.warm_up
        if count == 0:
            return
        level = Level("concurrency", count)
        run = Run(level, self._next, count, None, self._plan.seed, self._send(client, prompts), lambda: None)
        load = await run.until(self._stopped, deadline - time.monotonic())
        self._next += load.started
        failures = [outcome.failure for outcome in load.outcomes if outcome.failure is not None]
        if failures and len(failures) == len(load.outcomes):
            raise UsageError(
                f"none of the {len(failures)} warm-up requests succeeded ({failures[0].cause}: {failures[0].detail}); "
                "a server that answers them would work"
            )

    def _send(self, client: Client, prompts: Prompts) -> Any:
        plan = self._plan
        common: dict[str, Any] = {
            "model": self._model,
            "max_tokens": plan.output_len,
            "temperature": plan.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if plan.prompts is None:  # lengths are what was asked for, and random text has no natural end
            common["ignore_eos"] = True

        async def send(number: int, due: float | None) -> Outcome:
            return await client.send(number, common | prompts.body(number), due)

        return send

    def _stop(self, number: int) -> None:
        """The first signal ends the level under way, and its figures are shown; the second ends everything."""
        self._interrupted = f"{signal.Signals(number).name} came"
        self._stopped.set()
        asyncio.get_running_loop().remove_signal_handler(number)


def _workload(plan: Plan) -> results.Workload:
    return results.Workload(
        api=plan.api,
        prompts="random" if plan.prompts is None else plan.prompts,
        input_len=plan.input_len if plan.prompts is None else None,
        output_len=plan.output_len,
        temperature=plan.temperature,
        seed=plan.seed,
        requests=plan.requests,
        seconds=plan.seconds,
    )
