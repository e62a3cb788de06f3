"""What a fuzzer sends, right and wrong, gets what the OpenAPI document says, and never a 5xx.

All 20,000 wrong requests: `python -m tests.engine.server.malformed 20000`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

from pilotfish_engine.server import openapi
from tests.engine.server import malformed
from tests.engine.server.conftest import ADMIN_TOKEN
from tests.engine.server.serving import NAME, Engine, engine, wait_until

WRONG_REQUESTS = 2000

OPERATIONS = {
    *[("get", path) for path in ("/v1/models", "/v1/models/{name}", "/health", "/ready", "/metrics", "/v1/profile")],
    *[("post", path) for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses")],
    *[("post", path) for path in ("/tokenize", "/detokenize", "/flush_cache")],
    ("get", "/v1/speculation"),
    ("put", "/v1/speculation"),
}


def test_no_wrong_request_gets_anything_but_a_refusal_and_the_next_is_served(served: Engine) -> None:
    before = served.get("/v1/speculation").json()["envelope"]
    found = malformed.send(served, WRONG_REQUESTS, seed=20)
    assert len(found) == WRONG_REQUESTS
    assert [(wrong.kind, status, wrong.sent[:1000]) for wrong, status, _ in found if not 400 <= status < 500] == []
    for wrong, _, body in found:
        if not wrong.alone:  # what is no HTTP gets no JSON
            openapi.Error.model_validate_json(body)
    kinds = Counter(wrong.kind for wrong, _, _ in found)
    assert len(kinds) == 15
    assert min(kinds.values()) >= 3, kinds
    assert served.openai().completions.create(model=NAME, prompt="a").choices[0].text == "a"
    assert served.get("/v1/speculation").json()["envelope"] == before
    wait_until(lambda: served.get("/v1/speculation").json()["running"] == 0, 20)


def test_schemathesis_finds_no_server_error_and_no_answer_beside_the_schema(empty: Path, tmp_path: Path) -> None:
    """Not whether all that fits the schema is accepted: what fields may not stand together, no schema can say."""
    (tmp_path / "admin").write_text(ADMIN_TOKEN)
    flags = ("--max-model-len", "256", "--admin-token-file", f"{tmp_path}/admin")
    with engine(empty, *flags) as started:
        command = [
            str(Path(sys.executable).with_name("schemathesis")), "run", started.url + "/openapi.json",
            "--phases", "coverage,fuzzing", "--max-examples", "10", "--seed", "20", "--continue-on-failure",
            "--exclude-checks", "positive_data_acceptance", "--warnings", "off",
            "--header", f"Authorization: Bearer {ADMIN_TOKEN}",
        ]  # fmt: skip
        ran = subprocess.run(command, capture_output=True, text=True, timeout=250, cwd=tmp_path)
        assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-2000:]
        assert f"Tested: {len(OPERATIONS)}" in ran.stdout
        assert started.get("/health").status_code == 200


def test_the_document_is_complete_and_refers_to_nothing_that_it_lacks(served: Engine) -> None:
    document = served.get("/openapi.json").json()
    operations = {(method, path) for path, known in document["paths"].items() for method in known}
    assert operations == OPERATIONS
    text = json.dumps(document)
    for reference in text.split('"#/components/schemas/')[1:]:
        assert reference.split('"')[0] in document["components"]["schemas"]
    assert "422" not in document["paths"]["/v1/completions"]["post"]["responses"]


def test_a_method_that_a_path_lacks_is_told_those_it_has(served: Engine) -> None:
    with served.http as client:
        assert client.delete("/v1/speculation").headers["allow"] == "GET, PUT"
        assert client.delete("/tokenize").headers["allow"] == "POST"
