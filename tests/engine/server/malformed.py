"""Requests that are wrong, made at random from the engine's own OpenAPI document: every one must end in a 4xx.

`python -m tests.engine.server.malformed COUNT [SEED]` sends so many to an engine without a model, and says what came.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pilotfish_engine.server.incoming import MAX_BODY_BYTES
from tests.engine.server.serving import Engine, engine
from tests.engine.server.small_core import Behaviour

CONNECTIONS = 8
ADMIN_TOKEN = "an-admin-token"
Json = dict[str, Any]
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
VALUES: tuple[tuple[str, Any], ...] = (
    ("null", None), ("boolean", True), ("integer", 7), ("number", 0.5), ("string", "x"), ("array", [1]),
    ("object", {"a": 1}), ("array", [[]]), ("object", {"type": "x", "": None}), ("string", "9" * 400),
)  # fmt: skip
HUGE = ("1e999", "-1e999", "1" + "0" * 400, "-1" + "0" * 30, "9" * 5000, "1e400000", "NaN", "Infinity", "-Infinity")
HEADS = (
    b"GET\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", b"GET /health\r\n\r\n",
    b"GET /health HTTP/x.y\r\n\r\n", b"GET /health HTTP/1.1\r\nHost\r\n\r\n", b"GET /health HTTP/1.1\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", b"GET /he\x00alth HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: x\r\nX\x00: y\r\n\r\n", b"GET /health HTTP/1.1\r\nHost: x\r\nX: a\x00b\r\n\r\n",
    b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
    b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 1e3\r\n\r\n",
    b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
    b"POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\n\r\n",
    b"POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\nabc",
    b"POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + b"f" * 40 + b"\r\n",
    b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 200_000, b"GET /" + b"a" * 200_000,
    b"GET /health HTTP/1.1\r\n" + b"A: b\r\n" * 20_000,
)  # fmt: skip


@dataclass(frozen=True)
class Wrong:
    kind: str
    sent: bytes
    alone: bool = False  # on a connection of its own: what follows could not be told apart


class Generator:
    """document: the engine's OpenAPI."""

    def __init__(self, document: Json, seed: int) -> None:
        self._random = random.Random(seed)
        self._schemas = document["components"]["schemas"]
        self._paths: list[str] = [path for path in document["paths"] if "{" not in path]
        self._known = {path: set(operations) for path, operations in document["paths"].items()}
        self._operations: list[tuple[str, str, Json]] = [
            (method.upper(), path, self._flat(operation["requestBody"]["content"]["application/json"]["schema"]))
            for path, operations in document["paths"].items()
            for method, operation in operations.items()
            if "requestBody" in operation
        ]
        self._kinds: list[Callable[[str, str, Json], Wrong | None]] = [
            self._truncated, self._of_another_type, self._of_another_type, self._of_another_type, self._huge,
            self._nested, self._half_a_character, self._twice, self._not_utf8, self._another_content_type,
            self._unknown_field, self._without_a_field, self._another_method, self._another_path, self._head,
            self._no_object, self._giant,
        ]  # fmt: skip

    def requests(self, count: int) -> Iterator[Wrong]:
        while count:
            made = self._random.choice(self._kinds)(*self._random.choice(self._operations))
            if made is not None:
                count -= 1
                yield made

    def _flat(self, schema: Json) -> Json:
        """References followed; what may be one of several, as a list of them under anyOf."""
        while True:
            if "$ref" in schema:
                schema = self._schemas[schema["$ref"].rpartition("/")[2]]
            elif len(schema.get("allOf", ())) == 1:
                schema = schema["allOf"][0]
            else:
                return schema

    def _branches(self, schema: Json) -> list[Json]:
        schema = self._flat(schema)
        if "anyOf" in schema:
            return [branch for part in schema["anyOf"] for branch in self._branches(part)]
        return [schema]

    def _types(self, schema: Json) -> set[str]:
        """JSON types that fit; all of them where the schema says nothing."""
        found: set[str] = set()
        for branch in self._branches(schema):
            if "enum" in branch or "const" in branch:
                found |= {"null"} if None in branch.get("enum", ()) else set()
                found |= {"string"} if branch.get("type", "string") == "string" else {branch["type"]}
            elif "type" in branch:
                found |= {branch["type"]} | ({"integer"} if branch["type"] == "number" else set())
            else:
                found |= {name for name, _ in VALUES}
        return found

    def _valid(self, schema: Json, depth: int = 0) -> Any:
        """Something that looks right; required fields, and some of the others."""
        branch = self._random.choice(self._branches(schema))
        if "enum" in branch or "const" in branch:
            return branch.get("const", branch.get("enum", [None])[0])
        match branch.get("type"):
            case "object":
                names = branch.get("properties", {})
                required = branch.get("required", ())
                chosen = [n for n in names if n in required or (depth < 3 and self._random.random() < 0.15)]
                return {name: self._valid(names[name], depth + 1) for name in chosen}
            case "array":
                return [self._valid(branch["items"], depth + 1)] if "items" in branch and depth < 6 else []
            case "integer" | "number":
                return max(1, int(branch.get("minimum", 1)))
            case "boolean":
                return False
            case "null":
                return None
        return "a"

    def _field(self, schema: Json) -> tuple[str, Json]:
        return self._random.choice(list(schema["properties"].items()))

    def _request(
        self, kind: str, method: str, path: str, body: bytes, content_type: str = "application/json"
    ) -> Wrong:
        head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {ADMIN_TOKEN}\r\n"
        head += f"Content-Type: {content_type}\r\nContent-Length: {len(body)}\r\n\r\n"
        return Wrong(kind, head.encode("latin-1") + body)

    def _with(self, kind: str, method: str, path: str, schema: Json, name: str, text: str) -> Wrong:
        """A body whose field has this JSON, be it any."""
        body = self._valid(schema) | {name: "@"}
        return self._request(kind, method, path, json.dumps(body).replace('"@"', text, 1).encode("utf-8", "replace"))

    def _truncated(self, method: str, path: str, schema: Json) -> Wrong | None:
        whole = json.dumps(self._valid(schema)).encode()
        return self._request("truncated", method, path, whole[: self._random.randrange(len(whole))])

    def _of_another_type(self, method: str, path: str, schema: Json) -> Wrong | None:
        """At any depth: down a random way through objects and lists."""
        body = self._valid(schema)
        inner: Any = body
        name, part = self._field(schema)
        while True:
            inner[name] = self._valid(part)
            branches = [b for b in self._branches(part) if b.get("properties") or b.get("items")]
            if len(branches) != 1 or self._random.random() < 0.4:  # what is wrong in one may be right in another
                break
            chosen = self._random.choice(branches)
            if "items" in chosen:
                inner[name], inner, name, part = [None], inner, name, chosen["items"]
                inner, name = inner[name], 0  # type: ignore[assignment]
            else:
                inner[name] = self._valid(chosen)
                inner = inner[name]
                name, part = self._field(chosen)
        fitting = self._types(part)
        others = [value for kind, value in VALUES if kind not in fitting]
        if not others:
            return None
        inner[name] = self._random.choice(others)
        return self._request("another type", method, path, json.dumps(body).encode())

    def _huge(self, method: str, path: str, schema: Json) -> Wrong | None:
        name, part = self._field(schema)
        if not self._types(part) <= {"integer", "number", "null", "boolean", "string"}:
            return None
        return self._with("huge number", method, path, schema, name, self._random.choice(HUGE))

    def _nested(self, method: str, path: str, schema: Json) -> Wrong | None:
        opening, closing = self._random.choice((("[", "]"), ('{"a":', "}")))
        levels = self._random.choice((200, 900, 5_000, 100_000))
        deep = opening * levels + "1" + closing * levels
        if self._random.random() < 0.3:
            return self._request("nested", method, path, deep.encode())
        return self._with("nested", method, path, schema, self._field(schema)[0], deep)

    def _half_a_character(self, method: str, path: str, schema: Json) -> Wrong | None:
        half = self._random.choice(("\\ud800", "a\\udfff", "\\ude00\\ud83d"))
        if method == "PUT" and self._random.random() < 0.3:  # elsewhere a name that is not known is ignored
            body = json.dumps(self._valid(schema) | {"@": 1}).replace("@", half)
            return self._request("half a character", method, path, body.encode())
        return self._with("half a character", method, path, schema, self._field(schema)[0], f'"{half}"')

    def _twice(self, method: str, path: str, schema: Json) -> Wrong | None:
        """The last one counts, and is wrong."""
        name, part = self._field(schema)
        others = [value for kind, value in VALUES if kind not in self._types(part)]
        if not others:
            return None
        again = f', "{name}": {json.dumps(self._random.choice(others))}}}'
        body = json.dumps(self._valid(schema) | {name: self._valid(part)})[:-1] + again
        return self._request("a field twice", method, path, body.encode())

    def _not_utf8(self, method: str, path: str, schema: Json) -> Wrong | None:
        text = self._with("not UTF-8", method, path, schema, self._field(schema)[0], '"%%"')
        bad = self._random.choice((b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xf5\x80\x80\x80", b"\x80"))
        body = text.sent.partition(b"\r\n\r\n")[2]
        body = body.replace(b"%%", bad, 1)
        return self._request("not UTF-8", method, path, body)

    def _another_content_type(self, method: str, path: str, schema: Json) -> Wrong | None:
        if method == "PUT":
            return None  # it is an admin's, and read as JSON whatever it is called
        body = json.dumps(self._valid(schema)).encode()
        kinds = ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "a", "/", "é")
        return self._request("another content type", method, path, body, self._random.choice(kinds))

    def _unknown_field(self, method: str, path: str, schema: Json) -> Wrong | None:
        """Where the command of an admin would not be what it says; elsewhere it is ignored."""
        if method != "PUT":
            return None
        name = self._random.choice(("x", "Model", "", "__proto__", "\0", "é" * 50, "m" * 10_000, "\u202e"))
        body = self._valid(schema) | {name: self._random.choice(VALUES)[1]}
        return self._request("unknown field", method, path, json.dumps(body).encode())

    def _without_a_field(self, method: str, path: str, schema: Json) -> Wrong | None:
        if not schema.get("required"):
            return None
        body = self._valid(schema)
        del body[self._random.choice(schema["required"])]
        return self._request("without a field", method, path, json.dumps(body).encode())

    def _another_method(self, method: str, path: str, schema: Json) -> Wrong | None:
        path = self._random.choice(self._paths)
        method = self._random.choice(("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "BREW", "get"))
        if method.lower() in self._known[path] and method != "get":
            return None
        return self._request("another method", method, path, json.dumps(self._valid(schema)).encode())

    def _another_path(self, method: str, path: str, schema: Json) -> Wrong | None:
        places = (path + "/", path + "x", path + "%00", "//" + path, "/../etc/passwd", "*", path.upper(), "/%ff%fe",
                  "/v1/models/nobody", "/v1/models/%F0%9F", "/v1/models/" + "a" * 5000, "http://x" + path)  # fmt: skip
        where = self._random.choice(places)
        return self._request("another path", "GET" if "models" in where else method, where, b"")

    def _head(self, method: str, path: str, schema: Json) -> Wrong | None:
        return Wrong("no HTTP", self._random.choice(HEADS), alone=True)

    def _no_object(self, method: str, path: str, schema: Json) -> Wrong | None:
        bodies = (b"", b" ", b"null", b"[]", b"7", b'"x"', b"{}{}", b"{'a': 1}", b"{", b"\xef\xbb\xbf{", b"\x00" * 99,
                  b"%PDF-1.4", b"a=b&c=d", b'{"a": 1,}', b"{,}", b"nul", b"\x1f\x8b\x08\x00", b"// x\n{}")  # fmt: skip
        return self._request("no object", method, path, self._random.choice(bodies))

    def _giant(self, method: str, path: str, schema: Json) -> Wrong | None:
        if self._random.random() > 0.05:
            return None
        size = MAX_BODY_BYTES - 2000 if self._random.random() < 0.8 else MAX_BODY_BYTES + 1
        text = json.dumps(self._random.choice(("x", "é", "\\", "☃")) * (size // 8))
        name, _ = self._field(schema)
        body = json.dumps(self._valid(schema) | {name: "@"})[:-1].replace('"@"', text, 1)
        return self._request("giant", method, path, (body + ', "model": 1}').encode())


async def statuses(url: str, wrong: Iterator[Wrong]) -> list[tuple[Wrong, int, bytes]]:
    """What each got; 0 where the connection was closed without an answer, or nothing came for long."""
    found: list[tuple[Wrong, int, bytes]] = []
    host, port = url.removeprefix("http://").split(":")

    async def client() -> None:
        connection: Connection | None = None
        for request in wrong:
            if request.alone or connection is None:
                await _close(connection)
                connection = await asyncio.open_connection(host, int(port), limit=1 << 20)
            status, body, goes_on = await _answer(*connection, request.sent)
            found.append((request, status, body))
            if request.alone or not goes_on:
                await _close(connection)
                connection = None
        await _close(connection)

    async with asyncio.timeout(3600), asyncio.TaskGroup() as group:
        for _ in range(CONNECTIONS):
            group.create_task(client())
    return found


async def _close(connection: Connection | None) -> None:
    if connection is not None:
        connection[1].transport.abort()
        with contextlib.suppress(ConnectionError):
            await connection[1].wait_closed()


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, sent: bytes) -> tuple[int, bytes, bool]:
    writer.write(sent)
    try:
        async with asyncio.timeout(30):
            head = await reader.readuntil(b"\r\n\r\n")
            lines = head.decode("latin-1").lower().split("\r\n")
            headers = dict(line.split(": ", 1) for line in lines[1:] if ": " in line)
            body = await reader.readexactly(int(headers["content-length"])) if "content-length" in headers else b""
    except (asyncio.IncompleteReadError, ConnectionError, TimeoutError):
        return 0, b"", False
    return int(lines[0].split()[1]), body, headers.get("connection") != "close" and "content-length" in headers


def send(started: Engine, count: int, seed: int) -> list[tuple[Wrong, int, bytes]]:
    generator = Generator(started.get("/openapi.json").json(), seed)
    return asyncio.run(statuses(started.url, generator.requests(count)))


def main() -> int:
    count, seed = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "admin").write_text(ADMIN_TOKEN)
        flags = ("--max-model-len", "512", "--admin-token-file", f"{folder}/admin")
        with engine(Path(folder), *flags, behaviour=Behaviour(step_seconds=0)) as started:
            found = send(started, count, seed)
            print("health:", started.get("/health").status_code)
    for (kind, status), number in sorted(Counter((wrong.kind, status) for wrong, status, _ in found).items()):
        print(f"{kind:22} {status} {number:6}")
    bad = [(wrong, status, body) for wrong, status, body in found if not 400 <= status < 500]
    for wrong, status, body in bad[:10]:
        print(wrong.kind, status, wrong.sent[:600], body[:200])
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
