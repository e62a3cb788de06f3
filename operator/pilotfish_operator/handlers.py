"""Events in, keys into the work queue; sole importer of kopf, which is the watcher and nothing more.

kopf stores nothing in objects and adds no finalizers: only `on.event` is used. It runs in a thread with a loop of its
own, since at its end it cancels every task of its loop. Without the CRD nothing is watched; lists look for it.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import kopf

from pilotfish_operator import config, kube
from pilotfish_operator.cache import Cache, Key
from pilotfish_operator.config import Config
from pilotfish_operator.engines import Engines
from pilotfish_operator.health import serve
from pilotfish_operator.kinds import CHILD_SELECTOR, CHILDREN, GROUP, MODELS, VERSION, WATCHED, Kind
from pilotfish_operator.kube import Kube, KubeError, NotFound
from pilotfish_operator.lease import Leadership
from pilotfish_operator.metrics import Metrics
from pilotfish_operator.reconcile import Reconciler
from pilotfish_operator.workqueue import WorkQueue

SYNC_SECONDS, CRD_SECONDS = 30.0, 3.0
STUCK_SECONDS = 120.0
RECONNECT = (0.5, 1.0, 2.0, *([3.0] * 100))
log = logging.getLogger(__name__)
OnEvent = Callable[[Kind, dict[str, Any], bool], None]


class Watcher:
    """kopf in its thread. It may end by itself, when the API server or a kind has gone: `running` tells."""

    def __init__(self, settings: Config, on_event: OnEvent) -> None:
        self._config, self._on_event = settings, on_event
        self._thread: threading.Thread | None = None
        self._inner: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None
        self._ending = threading.Event()

    @property
    def running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        self._ending.clear()
        self._thread = threading.Thread(target=self._run, name="watcher", daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        self._ending.set()
        if self._inner:
            loop, flag = self._inner
            if not loop.is_closed():
                loop.call_soon_threadsafe(flag.set)
        if self._thread:
            await asyncio.to_thread(self._thread.join, 15)

    def _run(self) -> None:
        try:
            asyncio.run(self._watch())
        except Exception as problem:
            log.warning("the watches ended: %s", problem)

    async def _watch(self) -> None:
        flag = asyncio.Event()
        self._inner = asyncio.get_running_loop(), flag
        if self._ending.is_set():
            return
        settings = kopf.OperatorSettings()
        settings.posting.enabled = False
        settings.scanning.disabled = True  # needs rights over all CRDs and namespaces; lists look for ours
        settings.networking.error_backoffs = RECONNECT
        settings.watching.connect_timeout = 10
        settings.watching.server_timeout = 300
        settings.watching.client_timeout = 330
        for kind in CHILDREN:
            settings.watching.label_selectors[kind.group, kind.version, kind.plural] = CHILD_SELECTOR
        spaces: dict[str, Any] = (
            {"namespaces": self._config.namespaces} if self._config.namespaces else {"clusterwide": True}
        )
        await kopf.operator(registry=self._registry(), settings=settings, standalone=True, stop_flag=flag, **spaces)

    def _registry(self) -> kopf.OperatorRegistry:
        registry = kopf.OperatorRegistry()

        @kopf.on.login(registry=registry, id="service-account-or-kubeconfig")
        async def login(**_: Any) -> kopf.ConnectionInfo:
            found = await kube.credentials(self._config.access)
            return kopf.ConnectionInfo(
                server=found.server,
                ca_path=found.ca_path,
                insecure=found.insecure,
                token=found.token,
                scheme="Bearer" if found.token else None,
                certificate_path=found.certificate_path,
                private_key_path=found.key_path,
            )

        def watch(kind: Kind) -> None:
            @kopf.on.event(kind.group, kind.version, kind.plural, registry=registry, id=f"see-{kind.plural}")
            def seen(event: Any, **_: Any) -> None:
                self._on_event(kind, event["object"], event["type"] == "DELETED")

        for kind in WATCHED:
            watch(kind)
        return registry


class Operator:
    """Everything that runs, wired."""

    def __init__(self, settings: Config, api: Kube, engines: Engines) -> None:
        self._config, self._kube = settings, api
        self._loop = asyncio.get_running_loop()
        self._cache, self.metrics = Cache(), Metrics()
        self._lease = Leadership(api, settings.own_namespace, settings.lease_name, settings.identity)
        self._reconciler = Reconciler(
            api, self._cache, engines, self._leads, settings.engine_image, settings.resync_seconds, self.metrics
        )
        self._queue: WorkQueue[Key] = WorkQueue(self._reconciler.turn, workers=settings.workers)
        self._watcher = Watcher(settings, self._seen_by_watch)
        self._stale, self._suspects = set[str](), set[str]()
        self._crd_missing_since: float | None = None

    def troubles(self) -> list[str]:
        """Parts that stand still."""
        found = [f"watch of {plural} is stale" for plural in sorted(self._stale)]
        if self._queue.stuck() > STUCK_SECONDS:
            found.append(f"queue: a model has been in or before its turn for {self._queue.stuck():.0f}s")
        if self._config.leader_elect and self._lease.stale():
            found.append("lease: no attempt to renew it for a minute")
        self.metrics.depth.set(self._queue.depth())
        return found

    async def run(self) -> None:
        """Until cancelled. The Lease is released last, when nothing acts any more."""
        election = asyncio.create_task(self._lease.run(self._led)) if self._config.leader_elect else None
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
        return not self._config.leader_elect or self._lease.leads()

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
        """Nothing is decided before everything was seen once: what is unknown is not absent."""
        while not await self._list():
            await asyncio.sleep(CRD_SECONDS)

    async def _keep_in_sync(self) -> None:
        """List every SYNC_SECONDS, and before the watches start anew whenever they ended."""
        while True:
            missing = self._crd_missing_since is not None
            end = self._loop.time() + (CRD_SECONDS if missing else SYNC_SECONDS)
            await asyncio.sleep(1)
            while self._loop.time() < end and (missing or self._watcher.running):
                await asyncio.sleep(0.5)
            await self._list()

    async def _list(self) -> bool:
        """List every kind into the cache and start or end the watches; whether all could be listed."""
        changed = set[Key]()
        for kind in WATCHED:
            selector = "" if kind is MODELS else CHILD_SELECTOR
            for namespace in self._config.namespaces or (None,):
                try:
                    objects, version = await self._kube.list(kind, namespace, selector)
                except NotFound:
                    await self._without_crd()
                    return False
                except KubeError as problem:
                    self.metrics.errors.labels(type(problem).__name__).inc()
                    log.warning("cannot list %s in %s: %s", kind.plural, namespace or "all namespaces", problem)
                    return False
                changed |= self._cache.listed(kind, namespace, objects, version, self._loop.time())
        if self._crd_missing_since is not None:
            log.info("the CRD %s.%s is there now", MODELS.plural, GROUP)
            self._crd_missing_since = None
        suspects = self._cache.stale_watches(self._loop.time())
        self._stale, self._suspects = suspects & self._suspects, suspects
        if suspects and self._watcher.running:
            log.warning("nothing comes from the watches of %s: all start anew", ", ".join(sorted(suspects)))
            await self._watcher.stop()
        if not self._watcher.running:
            self._watcher.start()
        self.metrics.models.set(len(self._cache.models()))
        for key in changed:
            self._queue.add(key)
        return True

    async def _without_crd(self) -> None:
        if self._crd_missing_since is None:
            self._crd_missing_since = self._loop.time()
            log.warning(
                "the CRD %s.%s (%s) is not installed: waiting for it, nothing else to do", MODELS.plural, GROUP, VERSION
            )
        for key in self._cache.models():
            self._cache.remove(MODELS, key)
            self._queue.add(key)
        if self._watcher.running:
            await self._watcher.stop()


async def run(settings: Config) -> None:
    """Serve until SIGTERM or SIGINT."""
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
        try:
            await asyncio.wait((work, stopped), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            for task in (work, stopped):
                task.cancel()
            await asyncio.gather(work, stopped, return_exceptions=True)
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
    except (KubeError, OSError) as problem:
        print(f"pilotfish-operator: {problem}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
