"""Watches the API server and hands events on; sole importer of kopf, which is the watcher and nothing more.

kopf stores nothing in objects and adds no finalizers: only `on.event` is used. It runs in a thread with a loop of its
own, since at its end it cancels every task of its loop. Knows nothing about what events mean.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any

import kopf

from pilotfish_operator import kube
from pilotfish_operator.config import Config
from pilotfish_operator.kinds import CHILD_SELECTOR, CHILDREN, Kind

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
        self.kinds: tuple[Kind, ...] = ()

    @property
    def running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self, kinds: tuple[Kind, ...]) -> None:
        """Watch these kinds: one that may not be read would end the watches of all."""
        self._ending.clear()
        self.kinds = kinds
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
        for kind in set(CHILDREN) & set(self.kinds):
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

        for kind in self.kinds:
            watch(kind)
        return registry
