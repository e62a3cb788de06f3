"""The life of the two processes: bind, start the model process, serve, drain, end both; and the exit code of it all.

0: told to end, and what ran had its time. 2: something the caller must change, 75: something that is not there yet,
each in one sentence. 1: a process died.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Generator, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import uvicorn
import uvloop

from pilotfish_engine.config import CONFIG, EngineConfig, ServerConfig
from pilotfish_engine.core import LAST_WORDS_BYTES
from pilotfish_engine.errors import NotYetError, UsageError
from pilotfish_engine.server import app
from pilotfish_engine.server.connection import Patience, patient
from pilotfish_engine.server.link import Link
from pilotfish_engine.server.reading import check_names
from pilotfish_engine.server.secret import SecretFile
from pilotfish_engine.server.service import Service
from pilotfish_engine.source import resolve
from pilotfish_engine.tokenizer import load
from pilotfish_engine.tokenizer.apart import TextProcesses

T = TypeVar("T")
log = logging.getLogger(__name__)

CORE = (sys.executable, "-m", "pilotfish_engine.core")
TERMINATION_LOG = Path("/dev/termination-log")  # Kubernetes shows what is in it
REFUSALS = (UsageError.exit_code, NotYetError.exit_code)
_LAST_WORDS_SECONDS = 0.5  # for what a dead model process had said, and for the errors on their way to clients


def serve(config: EngineConfig, core_command: Sequence[str] = CORE, patience: Patience | None = None) -> int:
    """Serves until told to end; returns the exit code. core_command: how the model process is started, to which the
    arguments of `core.main` are added."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    logging.getLogger("uvicorn").setLevel(logging.ERROR)  # it warns of all that is no HTTP: anybody could fill the log
    try:
        check_names(config.server)
        api_key = _secret("--api-key-file", config.server.api_key_file)
        admin_token = _secret("--admin-token-file", config.server.admin_token_file)
        listener = _bind(config.server)
    except UsageError as error:
        return refuse(str(error), error.exit_code)
    _allow_many_connections()
    folder = Path(tempfile.mkdtemp(prefix="pilotfish-"))  # mode 0700: nobody else may speak to the model process
    try:
        with listener, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            life = _serve(config, listener, folder, core_command, patience or Patience(), api_key, admin_token)
            return runner.run(life)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def refuse(sentence: str, exit_code: int = 2) -> int:
    """Says why, once, where a person looks: standard error, and the pod's status."""
    print(sentence, file=sys.stderr, flush=True)
    if os.access(TERMINATION_LOG, os.W_OK):
        with contextlib.suppress(OSError):
            TERMINATION_LOG.write_text(sentence)
    return exit_code


class _Http(uvicorn.Server):
    """uvicorn without its signal handlers: a signal means draining here."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


async def _serve(
    config: EngineConfig,
    listener: socket.socket,
    folder: Path,
    core_command: Sequence[str],
    patience: Patience,
    api_key: str | None,
    admin_token: str | None,
) -> int:
    # By descriptor, which the model process inherits: a socket's path has 107 characters at most.
    door = os.open(folder, os.O_PATH)
    endpoint = f"ipc:///proc/self/fd/{door}/core"
    service = Service(config, Link(endpoint), admin_token)
    last_words = os.memfd_create("last words")
    core = _start_core(config, [*core_command, endpoint, str(os.getpid()), str(last_words)], [door, last_words])
    http = _Http(
        uvicorn.Config(
            app.create(service, api_key, patience.body_seconds, config.server.allowed_origins),
            http=patient(patience),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_keep_alive=patience.idle_seconds,
            timeout_graceful_shutdown=patience.last_seconds + 1,
            proxy_headers=False,
        )
    )
    life = _Life(config, service)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, life.told_to_end)
    serving = life.watch(http.serve([listener]))
    life.watch(service.link.receive_forever())
    life.watch(life.load(listener, folder))
    life.watch(life.outlive(core, last_words))
    try:
        exit_code, sentence = await life.ending
        service.link.end((sentence or "the engine is shutting down").partition("\n")[0])
        http.should_exit = True
        await asyncio.wait([serving])
    finally:
        core.kill()
        await life.cancel()
        service.close()
        core.wait()
    return exit_code if sentence is None else refuse(sentence, exit_code)


class _Life:
    """What can end the engine: a signal, the model process, a file that cannot be read, a bug. The first one counts.

    ending: the exit code, and the sentence that goes with it. Clients are told its first line.
    """

    def __init__(self, config: EngineConfig, service: Service) -> None:
        self.ending: asyncio.Future[tuple[int, str | None]] = asyncio.get_running_loop().create_future()
        self._config = config
        self._service = service
        self._tasks: set[asyncio.Task[None]] = set()

    def watch(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs it; an exception in it ends the engine."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    async def cancel(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def told_to_end(self) -> None:
        """The first signal drains, the second does not wait for it."""
        if self._service.draining:
            self._end(0)
        else:
            self._service.draining = True
            self.watch(self._drain())

    async def load(self, listener: socket.socket, folder: Path) -> None:
        """The tokenizer, while the model process loads the model."""
        source = self._config.model.source
        path = await _on_thread(lambda: resolve(source))
        texts = TextProcesses(path)
        try:
            await texts.start()
            self._service.use(await _on_thread(lambda: load(path)), texts)
        except BaseException:
            texts.close()
            raise
        await self._service.link.connected.wait()
        shutil.rmtree(folder, ignore_errors=True)  # a connected pair needs no file, and none is left whatever is killed
        await self._service.link.loaded.wait()
        host, port = listener.getsockname()[:2]
        if self._service.link.ready is not None and self._service.link.ready.memory_sum:
            log.info("%s", self._service.link.ready.memory_sum)
        log.info("serving %s on http://%s:%d", self._service.name, f"[{host}]" if ":" in host else host, port)

    async def outlive(self, core: subprocess.Popen[bytes], last_words: int) -> None:
        """Waits for the model process to end, which it never does by itself. last_words: a file, of `core.main`."""
        code = await _on_thread(core.wait)
        deadline = time.monotonic() + _LAST_WORDS_SECONDS
        while code in REFUSALS and self._service.link.failed is None and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        if self._service.link.failed is not None:
            self._end(code if code in REFUSALS else 2, self._service.link.failed)
            return
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        why = os.pread(last_words, LAST_WORDS_BYTES, 0).decode(errors="replace").strip()
        self._end(1, f"the model process ended unexpectedly ({how})\n{why}".strip())

    async def _drain(self) -> None:
        deadline = time.monotonic() + self._config.server.drain_seconds
        while self._service.link.in_flight and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        self._end(0)

    def _finished(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if isinstance(error, UsageError):
            self._end(error.exit_code, str(error))
        elif error is not None:
            log.error("the HTTP process failed", exc_info=error)
            self._end(1, f"the HTTP process failed ({type(error).__name__}: {error}); its log says where")

    def _end(self, exit_code: int, sentence: str | None = None) -> None:
        if not self.ending.done():
            self.ending.set_result((exit_code, sentence))


def _on_thread(work: Callable[[], T]) -> asyncio.Future[T]:
    """On a daemon thread: unlike an executor's, it does not keep a process alive that was told to end."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def finish(result: T | None, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(cast(T, result))

    def run() -> None:
        result, caught = None, None
        try:
            result = work()
        except BaseException as error:
            caught = error
        with contextlib.suppress(RuntimeError):  # the loop has closed: nobody waits
            loop.call_soon_threadsafe(finish, result, caught)

    threading.Thread(target=run, daemon=True).start()
    return future


def _start_core(config: EngineConfig, command: Sequence[str], files: Sequence[int]) -> subprocess.Popen[bytes]:
    """In a session of its own: a terminal's Ctrl-C, or a signal to the whole group, must not cut the draining short.

    files: the descriptors that the command names."""
    core = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, pass_fds=files)
    assert core.stdin is not None
    with contextlib.suppress(BrokenPipeError), core.stdin:  # when it has died already, `outlive` says so
        core.stdin.write(CONFIG.dump_json(config))
    return core


def _allow_many_connections() -> None:
    """Each request in the queue has one; 1024 descriptors, a common limit, would be the narrower queue."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _bind(config: ServerConfig) -> socket.socket:
    """Before anything is loaded, so that a busy port is known at once. Raises UsageError."""
    try:
        family = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((config.host, config.port), family=family, backlog=2048)
    except OSError as error:
        where = f"--host {config.host} --port {config.port}"
        advice = (
            "a free port, or 0 for any, would work"
            if error.errno == errno.EADDRINUSE
            else "an address of this machine, such as 127.0.0.1 or 0.0.0.0, and a port from 1024 would work"
        )
        raise UsageError(f"{where} cannot be listened on ({error.strerror}); {advice}") from error


def _secret(flag: str, file: str | None) -> str | None:
    return None if file is None else SecretFile.read(flag, file)
