"""Events in, keys into the work queue: everything that runs, wired.

Each kind is listed by itself: one that cannot be read is named in the models' conditions and stops no other. Without
the CRD nothing is watched; lists look for it. Health means progress: an operator to which nothing succeeds says so, and
then ends.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from pilotfish_operator import config
from pilotfish_operator.cache import Cache, Key
from pilotfish_operator.config import Config
from pilotfish_operator.health import serve
from pilotfish_operator.kinds import CHILD_SELECTOR, GROUP, MODELS, VERSION, WATCHED, Kind
from pilotfish_operator.kube import Kube, KubeError, NotFound
from pilotfish_operator.lease import Leadership
from pilotfish_operator.metrics import Metrics
from pilotfish_operator.reconcile import Reconciler
from pilotfish_operator.scrape.client import Engines
from pilotfish_operator.scrape.rounds import Rounds
from pilotfish_operator.watcher import Watcher
from pilotfish_operator.workqueue import WorkQueue

SYNC_SECONDS, CRD_SECONDS = 30.0, 3.0
STUCK_SECONDS = 120.0
SURELY = 3  # failed lists in a row after which a kind that was seen before is taken for one that cannot be read
log = logging.getLogger(__name__)


@dataclass
class _Unlisted:
    """What cannot be listed. crd_since: since when there is no CRD. failures: in a row, of a kind in a namespace (None:
    in all). models: since when, and why."""

    crd_since: float | None = None
    failures: dict[tuple[Kind, str | None], int] = field(default_factory=dict)
    models: tuple[float, str] | None = None


class Operator:
    """Everything that runs, wired."""

    def __init__(self, settings: Config, api: Kube, engines: Engines) -> None:
        self._config, self._kube = settings, api
        self._loop = asyncio.get_running_loop()
        self._cache, self.metrics = Cache(), Metrics()
        election = settings.election
        self._lease = Leadership(api, election.namespace, election.lease_name, election.identity)
        self._rounds: Rounds[Key] = Rounds(
            engines, settings.resync_seconds, self._read, self._leads, self.metrics.taken.inc
        )
        self._reconciler = Reconciler(api, self._cache, self._rounds, self._leads, settings, self.metrics)
        self._queue: WorkQueue[Key] = WorkQueue(self._reconciler.turn, workers=settings.workers)
        self._watcher = Watcher(settings, self._seen_by_watch)
        self._stale, self._suspects = set[str](), set[str]()
        self._unlisted = _Unlisted()
        self._well_at = self._loop.time()

    def troubles(self) -> list[str]:
        """Parts that stand still: everything here has had `patience_seconds` to go on."""
        patience = self._config.patience_seconds
        found = [f"watch of {plural} is stale" for plural in sorted(self._stale)]
        if (silence := self._kube.silence()) > patience:
            found.append(f"API server: no request succeeded for {silence:.0f}s: {self._kube.last_failure}")
        if self._unlisted.models and self._loop.time() - self._unlisted.models[0] > patience:
            found.append(f"{MODELS.plural} cannot be listed: {self._unlisted.models[1]}")
        if self._queue.stuck() > STUCK_SECONDS:
            found.append(f"queue: a model has been in or before its turn for {self._queue.stuck():.0f}s")
        if self._config.election.needed and self._lease.stale(patience):
            found.append(f"lease: neither renewed nor read for {patience:.0f}s: {self._lease.last_failure}")
        self.metrics.depth.set(self._queue.depth())
        return found

    async def until_hopeless(self) -> str:
        """Returns what stands still, when something has for `patience_seconds` after it was said."""
        while True:
            found = self.troubles()
            if not found:
                self._well_at = self._loop.time()
            elif self._loop.time() - self._well_at > self._config.patience_seconds:
                return "; ".join(found)
            await asyncio.sleep(1)

    def _read(self, key: Key) -> None:
        """Engines of this model were read."""
        self._queue.add(key)

    async def run(self) -> None:
        """Until cancelled. The Lease is released last, when nothing acts any more."""
        election = asyncio.create_task(self._lease.run(self._led)) if self._config.election.needed else None
        try:
            await self._list_until_complete()
            async with asyncio.TaskGroup() as group:
                group.create_task(self._queue.run())
                group.create_task(self._keep_in_sync())
        finally:
            await self._watcher.stop()
            if election:
                election.cancel()
                await asyncio.gather(election, return_exceptions=True)

    def _leads(self) -> bool:
        return not self._config.election.needed or self._lease.leads()

    def _led(self, leads: bool) -> None:
        self.metrics.leading.set(leads)
        if leads:
            self._add_all()
        else:
            self._reconciler.forget_all()

    def _add_all(self) -> None:
        for key in self._cache.models():
            self._queue.add(key)

    def _seen_by_watch(self, kind: Kind, obj: dict[str, Any], deleted: bool) -> None:
        self._loop.call_soon_threadsafe(self._take_in, kind, obj, deleted)

    def _take_in(self, kind: Kind, obj: dict[str, Any], deleted: bool) -> None:
        key = self._cache.watched(kind, obj, deleted)
        if key:
            self._queue.add(key)

    async def _list_until_complete(self) -> None:
        """Nothing is decided before models were seen, and everything that can be read was: unknown is not absent."""
        while not await self._list(WATCHED):
            await asyncio.sleep(CRD_SECONDS)

    async def _keep_in_sync(self) -> None:
        """List every SYNC_SECONDS, what failed every CRD_SECONDS, and all before watches that ended start anew."""
        while True:
            end = self._loop.time() + SYNC_SECONDS
            await asyncio.sleep(1)
            while self._loop.time() < end and (self._unlisted.failures or self._watcher.running):
                await asyncio.sleep(CRD_SECONDS if self._unlisted.failures else 0.5)
                if self._unlisted.failures:
                    await self._list([kind for kind in WATCHED if any(kind == k for k, _ in self._unlisted.failures)])
            await self._list(WATCHED)

    async def _list(self, kinds: Collection[Kind]) -> bool:
        """List these kinds into the cache and start or end the watches; whether there are models to speak of."""
        changed = set[Key]()
        for kind in kinds:
            for namespace in self._config.namespaces or (None,):
                try:
                    changed |= await self._list_one(kind, namespace)
                except NotFound as problem:
                    if kind is MODELS:
                        await self._without_crd()
                        return False
                    self._cannot_list(kind, namespace, problem)
                except KubeError as problem:
                    self._cannot_list(kind, namespace, problem)
        suspects = self._cache.stale_watches(self._loop.time())
        self._stale, self._suspects = suspects & self._suspects, suspects
        readable = tuple(kind for kind in WATCHED if not any(kind == failed for failed, _ in self._unlisted.failures))
        if self._watcher.running and (suspects or set(self._watcher.kinds) != set(readable)):
            why = (
                f"nothing comes from {', '.join(sorted(suspects))}"
                if suspects
                else "the kinds that can be read changed"
            )
            log.warning("all watches start anew: %s", why)
            await self._watcher.stop()
        if not self._watcher.running and readable:
            self._watcher.start(readable)
        self.metrics.models.set(len(self._cache.models()))
        for key in changed:
            self._queue.add(key)
        return self._unlisted.models is None

    async def _list_one(self, kind: Kind, namespace: str | None) -> set[Key]:
        objects, version = await self._kube.list(kind, namespace, "" if kind is MODELS else CHILD_SELECTOR)
        changed = self._cache.listed(kind, namespace, objects, version, self._loop.time())
        if self._unlisted.failures.pop((kind, namespace), None):
            log.info("%s in %s can be listed again", kind.plural, namespace or "all namespaces")
            changed |= {key for key in self._cache.models() if namespace in (None, key[0])}
        if kind is MODELS:
            self._unlisted.models = None
            if self._unlisted.crd_since is not None:
                log.info("the CRD %s.%s is there now", MODELS.plural, GROUP)
                self._unlisted.crd_since = None
        return changed

    def _cannot_list(self, kind: Kind, namespace: str | None, problem: KubeError) -> None:
        failures = self._unlisted.failures[kind, namespace] = self._unlisted.failures.get((kind, namespace), 0) + 1
        self.metrics.errors.labels(type(problem).__name__).inc()
        if failures == 1:
            log.warning("cannot list %s in %s: %s", kind.plural, namespace or "all namespaces", problem)
        if kind is MODELS:
            self._unlisted.models = (self._unlisted.models or (self._loop.time(), ""))[0], str(problem)
        if failures >= SURELY or not self._cache.was_listed(kind, namespace):
            self._cache.lose(kind, namespace, f"{kind.plural} cannot be listed: {problem}")
            for key in self._cache.models():
                if failures in (1, SURELY) and namespace in (None, key[0]):
                    self._queue.add(key)

    async def _without_crd(self) -> None:
        if self._unlisted.crd_since is None:
            self._unlisted.crd_since = self._loop.time()
            log.warning(
                "the CRD %s.%s (%s) is not installed: waiting for it, nothing else to do", MODELS.plural, GROUP, VERSION
            )
        for key in self._cache.models():
            self._cache.remove(MODELS, key)
            self._queue.add(key)
        if self._watcher.running:
            await self._watcher.stop()


class StandsStill(Exception):
    """Nothing got better for long: a fresh start may help, and a crash loop is seen."""


async def run(settings: Config) -> None:
    """Serve until SIGTERM or SIGINT. Raises StandsStill."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    api = await Kube.connect(settings.access)
    async with Engines() as engines:
        operator = Operator(settings, api, engines)
        site = await serve(settings.host, settings.port, operator.troubles, operator.metrics.registry)
        log.info(
            "serving %s; /healthz and /metrics on %s:%d",
            ", ".join(settings.namespaces) or "all namespaces",
            settings.host,
            settings.port,
        )
        work, stopped = asyncio.create_task(operator.run()), asyncio.create_task(stop.wait())
        hopeless = asyncio.create_task(operator.until_hopeless())
        try:
            await asyncio.wait((work, stopped, hopeless), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
            if hopeless.done():
                raise StandsStill(hopeless.result())
        finally:
            for task in (work, stopped, hopeless):
                task.cancel()
            await asyncio.gather(work, stopped, hopeless, return_exceptions=True)
            await site.cleanup()
            await api.close()


def _set_up_logs(level: str) -> None:
    """kopf tells of each lost watch, each time and with its stack; lists, queue and lease say it once."""
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("kopf").setLevel(logging.DEBUG if level == "DEBUG" else logging.CRITICAL)


def main() -> None:
    settings = config.resolve()
    _set_up_logs(settings.log_level)
    try:
        asyncio.run(run(settings))
    except StandsStill as problem:
        print(f"pilotfish-operator: ends, for it stands still: {problem}", file=sys.stderr)
        sys.exit(1)
    except (KubeError, OSError) as problem:
        print(f"pilotfish-operator: {problem}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
