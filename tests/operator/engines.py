"""Engines for tests: plain data that looks like a report, and real HTTP servers that speak /v1/speculation."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from pilotfish_engine.contract.speculation import CostProfile, EngineReport, Envelope, EnvelopeUpdate

PROFILE = CostProfile(
    verify_ms=((1, 4.0), (16, 4.2), (64, 5.0), (128, 9.0), (256, 17.0)),
    draft_ms=((1, 0.05), (64, 0.2)),
    overhead_ms=0.2,
)


def report(**changes: Any) -> EngineReport:
    """A report of an engine that speculates well at low load; `changes` replace its fields."""
    fields: dict[str, Any] = {
        "method": "NGRAM",
        "effective": {"num_steps": 3, "topk": 1, "num_draft_tokens": 4, "disable_threshold": None, "active": True},
        "envelope": Envelope().model_dump(),
        "running": 1,
        "waiting": 0,
        "context_tokens": 100,
        "max_running_requests": 64,
        "concurrency_seconds_total": 0.0,
        "accept_length": 2.0,
        "accept": (0.6, 0.3, 0.1),
        "counters": {
            "steps": 400,
            "plain_steps": 0,
            "drafted_tokens": 300,
            "accepted_tokens": 100,
            "emitted_tokens": 200,
        },
        "profile": PROFILE.model_dump(),
        "reason": "a test says so",
    }
    return EngineReport.model_validate(fields | changes)


class FakeEngine:
    """One engine at `address`:8000 with a load that the test sets; it counts as an engine does and keeps its puts."""

    def __init__(self, address: str, token: str) -> None:
        self.address, self.token = address, token
        self.puts: list[dict[str, Any]] = []
        self.reads = 0
        self.envelope = Envelope()
        self._load, self._total, self._since = 0, 0.0, time.monotonic()
        self._lock = threading.Lock()
        self.says: Callable[[str], tuple[int, str] | None] = lambda _method: None  # in place of what is right
        self.hangs = threading.Event()
        self._server: ThreadingHTTPServer | None = None
        self.connect()

    @property
    def load(self) -> int:
        return self._load

    @load.setter
    def load(self, running: int) -> None:
        with self._lock:
            self._count()
            self._load = running

    def _count(self) -> None:
        now = time.monotonic()
        self._total, self._since = self._total + self._load * (now - self._since), now

    def report(self) -> EngineReport:
        with self._lock:
            self._count()
            return report(
                running=self._load, concurrency_seconds_total=self._total, envelope=self.envelope.model_dump()
            )

    def put(self, body: dict[str, Any]) -> None:
        with self._lock:
            self.envelope = EnvelopeUpdate.model_validate(body).applied_to(self.envelope)
            self.puts.append(body)

    def connect(self) -> None:
        """Answer from now on."""
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                engine.reads += 1
                self._answer(*(self._other("GET") or (200, engine.report().model_dump_json())))

            def do_PUT(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if other := self._other("PUT"):
                    self._answer(*other)
                    return
                if self.headers["Authorization"] != f"Bearer {engine.token}":
                    self._answer(401, "{}")
                    return
                engine.put(body)
                self._answer(200, engine.report().model_dump_json())

            def _other(self, method: str) -> tuple[int, str] | None:
                while engine.hangs.is_set() and engine._server is not None:
                    time.sleep(0.05)
                return engine.says(method)

            def _answer(self, status: int, text: str) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(text.encode())))
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer((self.address, 8000), Handler)
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def cut(self) -> None:
        """Refuse connections from now on; what was counted goes on."""
        server, self._server = self._server, None
        if server:
            server.shutdown()
            server.server_close()
