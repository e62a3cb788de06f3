"""HTTP as clients speak it: halves of connections, heads, slashes, kinds of bodies, and browsers."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import httpx
import pytest

from tests.engine.server.serving import NAME, Engine, engine, wait_until
from tests.engine.server.small_core import Behaviour

PLAIN = {"model": NAME, "prompt": "a b c"}


def connected(served: Engine) -> socket.socket:
    host, port = served.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=20)


def request(body: object, version: str = "1.1", *headers: str) -> bytes:
    content = json.dumps(body).encode()
    lines = [f"POST /v1/completions HTTP/{version}", "Host: x", f"Content-Length: {len(content)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + content


def read(connection: socket.socket) -> bytes:
    """Until the engine closes."""
    return b"".join(iter(lambda: connection.recv(1 << 16), b""))


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_has_said_all_it_will_gets_its_answer(served: Engine, version: str, stream: bool) -> None:
    with connected(served) as connection:
        connection.sendall(request(PLAIN | {"stream": stream}, version))
        connection.shutdown(socket.SHUT_WR)
        told = read(connection)
    assert b"200 OK" in told
    assert (b"[DONE]" if stream else b'"text":"a b c"') in told


def test_requests_in_a_row_are_all_answered_to_a_client_that_says_no_more(served: Engine) -> None:
    with connected(served) as connection:
        connection.sendall(request(PLAIN) * 3)
        connection.shutdown(socket.SHUT_WR)
        assert read(connection).count(b"200 OK") == 3


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_is_not_answered_to_the_end(empty: Path, stream: bool) -> None:
    flags = ("--max-model-len", "16384")
    with engine(empty, *flags, behaviour=Behaviour(step_seconds=0.01)) as started:
        body = PLAIN | {"max_tokens": 16000, "ignore_eos": True, "stream": stream}
        with connected(started) as connection:
            connection.sendall(request(body))
            wait_until(lambda: started.get("/v1/speculation").json()["running"] == 1, 20)
        wait_until(lambda: started.get("/v1/speculation").json()["running"] == 0, 10)
        assert started.metric("pilotfish_engine_requests_total") == 1


def test_half_a_request_is_none(served: Engine) -> None:
    with connected(served) as connection:
        connection.sendall(request(PLAIN)[:-3])
        connection.shutdown(socket.SHUT_WR)
        assert b"200" not in read(connection)


def test_a_body_is_asked_for_where_a_client_waits_for_that(served: Engine) -> None:
    whole = request(PLAIN, "1.1", "Expect: 100-continue")
    head, _, body = whole.partition(b"\r\n\r\n")
    with connected(served) as connection:
        connection.sendall(head + b"\r\n\r\n")
        assert connection.recv(1000).startswith(b"HTTP/1.1 100")
        connection.sendall(body)
        assert b"200 OK" in connection.recv(1000)


def test_the_head_of_an_answer_can_be_asked_for(served: Engine) -> None:
    with served.http as client:
        for path in ("/health", "/ready", "/v1/models", f"/v1/models/{NAME}", "/metrics", "/openapi.json"):
            head = client.head(path)
            assert (head.status_code, head.content) == (200, b"")
            assert head.headers["content-type"] == client.get(path).headers["content-type"]
        assert client.head("/v1/nothing").status_code == 404
        assert client.head("/v1/completions").headers["allow"] == "POST"


def test_slashes_too_many_are_no_other_path(served: Engine) -> None:
    with served.http as client:
        assert client.get("/v1/models/").json()["data"][0]["id"] == NAME
        assert client.get("/").status_code == 404
    for path in ("//v1/completions", "/v1//completions", "/v1/completions/", "//v1/completions//"):
        answer = httpx.post(served.url + path, json=PLAIN, verify=False)
        assert answer.json()["choices"][0]["text"] == "a b c", path


def test_bodies_are_json_by_whatever_name_a_client_gives(served: Engine) -> None:
    content = json.dumps(PLAIN).encode()
    with served.http as client:
        for kind in ("application/json; charset=utf-8", "application/vnd.api+json", "APPLICATION/JSON", None):
            headers = {} if kind is None else {"content-type": kind}
            assert client.post("/v1/completions", content=content, headers=headers).status_code == 200, kind
        packed = client.post("/v1/completions", content=b"\x1f\x8b", headers={"content-encoding": "gzip"})
        assert (packed.status_code, packed.json()["error"]["code"]) == (400, "unsupported_encoding")
        assert "gzip" in packed.json()["error"]["message"]


def test_pages_of_named_origins_may_call_and_others_may_not(empty: Path, tmp_path: Path, served: Engine) -> None:
    asks = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    (tmp_path / "key").write_text("sesame")
    flags = ("--allowed-origins", "https://a.example, http://localhost:3000", "--api-key-file", f"{tmp_path}/key")
    with engine(empty, *flags) as started, started.http as client:
        for origin, allowed in (("https://a.example", True), ("https://b.example", False)):
            before = client.options("/v1/chat/completions", headers={"origin": origin} | asks)
            assert (before.status_code == 200) == allowed
            for key, status in (("sesame", 200), ("wrong", 401)):
                headers = {"origin": origin, "authorization": f"Bearer {key}"}
                answer = client.post("/v1/completions", json=PLAIN | {"x": 1}, headers=headers)
                assert answer.status_code == status
                assert answer.headers.get("access-control-allow-origin") == (origin if allowed else None)
                if allowed:
                    assert "X-Ignored-Fields" in answer.headers["access-control-expose-headers"]
    with served.http as client:
        answer = client.post("/v1/completions", json=PLAIN, headers={"origin": "https://a.example"})
        assert not [name for name in answer.headers if name.startswith("access-control")]
