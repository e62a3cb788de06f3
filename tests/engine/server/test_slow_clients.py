"""Clients that send or read slowly, or not at all: each is let go in the end, and none costs others anything."""

from __future__ import annotations

import json
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from pilotfish_engine.server.connection import Patience
from pilotfish_engine.server.incoming import MAX_BODY_BYTES
from tests.engine.server.serving import Engine, engine, wait_until
from tests.engine.server.small_core import Behaviour

IMPATIENT = Behaviour(patience=Patience(head_seconds=1, body_seconds=2, unread_seconds=1, idle_seconds=1))
WORDY = "w" * 2000  # a model's name, which is in every chunk: a stream that no socket's buffer holds
TOKENS = 15_000


def connect(started: Engine, receive_buffer: int | None = None) -> socket.socket:
    host, port = started.url.removeprefix("http://").split(":")
    connection = socket.socket()
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.settimeout(60)
    connection.connect((host, int(port)))
    return connection


def post(body: dict[str, Any], path: str = "/v1/completions") -> bytes:
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n"
    return head.encode() + b"Connection: close\r\n\r\n" + content


def rest(connection: socket.socket) -> bytes:
    """All that comes until the other side closes, however it does."""
    received = bytearray()
    while True:
        try:
            part = connection.recv(1 << 20)
        except ConnectionResetError:
            return bytes(received)
        if not part:
            return bytes(received)
        received += part


def trickles(connection: socket.socket, byte: bytes) -> float:
    """For how many seconds the other side takes a byte each tenth of a second."""
    began = time.monotonic()
    while time.monotonic() - began < 20:
        try:
            connection.sendall(byte)
        except OSError:
            break
        time.sleep(0.1)
    return time.monotonic() - began


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with engine(tmp_path_factory.mktemp("impatient"), behaviour=IMPATIENT) as started:
        yield started


@pytest.mark.parametrize("sent", [b"", b"GET /health HTT", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-A: b\r\n"])
def test_a_head_that_does_not_come_ends_the_connection(impatient: Engine, sent: bytes) -> None:
    with connect(impatient) as connection:
        connection.sendall(sent)
        assert rest(connection) == b""


def test_a_head_that_trickles_ends_the_connection(impatient: Engine) -> None:
    with connect(impatient) as connection:
        assert trickles(connection, b"G") < 20


def test_a_connection_without_a_next_request_is_closed(impatient: Engine) -> None:
    with connect(impatient) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = rest(connection)
        assert answer.startswith(b"HTTP/1.1 200")
        assert answer.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize("framing", ["Content-Length: 100", "Transfer-Encoding: chunked"])
def test_a_body_that_never_ends_gets_an_answer(impatient: Engine, framing: str) -> None:
    with connect(impatient) as connection:
        connection.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\n{framing}\r\n\r\n".encode())
        connection.sendall(b"1\r\n{\r\n" if "chunked" in framing else b"{")
        head, _, body = rest(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408")
    assert json.loads(body)["error"]["code"] == "body_too_slow"
    assert "within 2 s" in json.loads(body)["error"]["message"]


def test_what_follows_a_refused_body_is_thrown_away_and_the_connection_serves_on(impatient: Engine) -> None:
    with connect(impatient) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {MAX_BODY_BYTES + 1}\r\n\r\n"
        connection.sendall(head.encode())
        assert connection.recv(4096).startswith(b"HTTP/1.1 413"), "before any of it came"
        connection.sendall(b" " * (MAX_BODY_BYTES + 1))
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert b"HTTP/1.1 200" in rest(connection)


def test_the_rest_of_a_refused_body_has_its_time(impatient: Engine) -> None:
    with connect(impatient) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {MAX_BODY_BYTES + 1}\r\n\r\n"
        connection.sendall(head.encode())
        assert connection.recv(4096).startswith(b"HTTP/1.1 413")
        assert trickles(connection, b" ") < 20


@pytest.mark.parametrize("head", [b"X: " + b"a" * 1_000_000, b"".join(b"X%d: a\r\n" % i for i in range(100_000))])
def test_a_head_without_end_is_refused(impatient: Engine, head: bytes) -> None:
    with connect(impatient) as connection:
        try:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n" + head)
        except OSError:
            pass  # refused while this side still wrote
        else:
            assert rest(connection)[:12] in (b"HTTP/1.1 400", b"")


def ask_and_read_nothing(started: Engine) -> socket.socket:
    connection = connect(started, receive_buffer=4096)
    body = {"model": WORDY, "prompt": "x", "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
    connection.sendall(post(body))
    return connection


def unread_answer(started: Engine) -> socket.socket:
    """A stream of which nothing is read, when the model process has nothing more to do for it."""
    connection = ask_and_read_nothing(started)
    wait_until(lambda: started.get("/v1/speculation").json()["counters"]["emitted_tokens"] >= TOKENS, 60)
    assert started.get("/v1/speculation").json()["running"] == 0
    generated = started.metric("pilotfish_engine_generated_tokens_total")
    assert generated < TOKENS, "the answer is longer than what is under way between both sides"
    return connection


def text_of(stream: bytes) -> str:
    """The chunked framing taken off, then the events'."""
    body, text = stream.partition(b"\r\n\r\n")[2], ""
    for line in body.split(b"\r\n"):
        if line.startswith(b"data: {"):
            text += "".join(choice["text"] for choice in json.loads(line[6:])["choices"])
    return text


def test_an_unread_answer_delays_nobody_and_keeps_its_place_until_it_is_read(empty: Path) -> None:
    flags = ("--max-running-requests", "1", "--max-waiting-requests", "1", "--max-model-len", "16384")
    with engine(empty, *flags, "--served-name", WORDY, behaviour=Behaviour(step_seconds=0)) as started:
        slow, body = unread_answer(started), {"model": WORDY, "prompt": "ab"}
        with slow, started.http as client:
            assert client.post("/v1/completions", json=body).json()["choices"][0]["text"] == "ab"
            full = client.post("/v1/completions", json=body | {"n": 2})
            assert (full.status_code, full.json()["error"]["code"]) == (503, "queue_full")
            assert text_of(rest(slow)) == "x" * TOKENS, "and nothing of it is lost"
            assert client.post("/v1/completions", json=body | {"n": 2}).status_code == 200


def test_an_answer_of_which_nothing_is_taken_is_given_up(empty: Path) -> None:
    flags = ("--max-running-requests", "1", "--max-waiting-requests", "0", "--max-model-len", "16384")
    behaviour = Behaviour(step_seconds=0, patience=Patience(unread_seconds=0.5))
    with engine(empty, *flags, "--served-name", WORDY, behaviour=behaviour) as started:
        slow, body = ask_and_read_nothing(started), {"model": WORDY, "prompt": "ab"}
        with slow, started.http as client:
            wait_until(lambda: started.get("/v1/speculation").json()["counters"]["emitted_tokens"] > 0, 20)
            wait_until(lambda: client.post("/v1/completions", json=body).status_code == 200, 20)
            assert b"[DONE]" not in rest(slow), "the connection was closed on it"


def test_an_unread_answer_is_given_up_when_the_drain_ends(empty: Path) -> None:
    flags = ("--max-model-len", "16384", "--drain-seconds", "0.5")
    with engine(empty, *flags, "--served-name", WORDY, behaviour=Behaviour(step_seconds=0)) as started:
        slow = unread_answer(started)
        with slow:
            started.process.send_signal(signal.SIGTERM)
            exit_code, errors = started.wait()
            assert exit_code == 0
            assert "Traceback" not in errors
