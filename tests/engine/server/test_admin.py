"""Probes, metrics, the speculation report and envelope, over real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pilotfish_engine.contract.speculation import CostProfile, EngineReport
from tests.engine.server.conftest import ADMIN_TOKEN
from tests.engine.server.serving import Engine, engine, wait_until
from tests.engine.server.small_core import Behaviour

BEARER = {"authorization": f"Bearer {ADMIN_TOKEN}"}


def test_the_report_is_the_contracts(served: Engine) -> None:
    report = EngineReport.model_validate(served.get("/v1/speculation").json())
    assert (report.method, report.max_running_requests, report.reason) == ("ECHO", 4, "it echoes")
    assert CostProfile.model_validate(served.get("/v1/profile").json()) == report.profile


def test_an_update_changes_what_it_names(served: Engine) -> None:
    with served.http as client:
        before = client.get("/v1/speculation").json()["envelope"]
        body = {"num_steps": 3, "disable_threshold": 12, "tuning": "Fixed"}
        answer = client.put("/v1/speculation", json=body, headers=BEARER)
        assert answer.status_code == 200
        assert answer.json()["envelope"] == before | body
        assert client.get("/v1/speculation").json()["envelope"] == before | body
        assert client.put("/v1/speculation", json={"num_steps": 0}, headers=BEARER).status_code == 200
        restored = client.put("/v1/speculation", json=before, headers=BEARER)
        assert restored.json()["envelope"] == before


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"num_steps": 9}, "num_steps"),
        ({"num_steps": -1}, "num_steps"),
        ({"num_steps": "3"}, "num_steps"),
        ({"num_steps": 2, "topk": 0}, "topk"),
        ({"num_steps": 2, "topk": 5}, "topk"),  # within the contract, and more than this method can
        ({"num_draft_tokens": 65}, "num_draft_tokens"),
        ({"num_draft_tokens": 1}, "num_draft_tokens"),
        ({"disable_threshold": 0}, "disable_threshold"),
        ({"disable_threshold": True}, "disable_threshold"),
        ({"disable_threshold": "auto"}, "disable_threshold"),
        ({"num_steps": 2, "tuning": "Wild"}, "tuning"),
        ({"num_steps": 2, "numSteps": 2}, "numSteps"),
    ],
)
def test_a_bad_update_is_refused_and_changes_nothing(served: Engine, body: dict[str, Any], field: str) -> None:
    with served.http as client:
        before = client.get("/v1/speculation").json()["envelope"]
        answer = client.put("/v1/speculation", json=body, headers=BEARER)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
        assert client.get("/v1/speculation").json()["envelope"] == before


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"7"])
def test_an_update_that_is_no_object_is_refused(served: Engine, content: bytes) -> None:
    with served.http as client:
        assert client.put("/v1/speculation", content=content, headers=BEARER).status_code == 400


@pytest.mark.parametrize(("method", "path"), [("PUT", "/v1/speculation"), ("POST", "/flush_cache")])
def test_changes_want_the_admin_token(served: Engine, method: str, path: str) -> None:
    with served.http as client:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": f"Basic {ADMIN_TOKEN}"}):
            answer = client.request(method, path, json={}, headers=headers)
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"] == "Bearer"
        assert client.request(method, path, json={}, headers=BEARER).status_code == 200


def test_without_an_admin_token_nothing_can_be_changed_and_unready_is_not_routable(empty: Path) -> None:
    with engine(empty, behaviour=Behaviour(unready="3 steps failed"), wait=False) as started, started.http as client:
        started.wait_loaded()
        answer = client.put("/v1/speculation", json={}, headers=BEARER)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "admin_disabled")
        refusal = {"status": "unavailable", "reason": "3 steps failed"}
        wait_until(lambda: client.get("/ready").json() == refusal, 10)  # until then the tokenizer is loading
        assert client.get("/health").status_code == 200
        refused = client.post("/v1/completions", json={"model": "small", "prompt": "a"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_ready")


def test_metrics_name_everything_that_operators_read(served: Engine) -> None:
    text = served.get("/metrics").text
    counters = (
        "requests", "refused_requests", "prompt_tokens", "cached_tokens", "generated_tokens", "concurrency_seconds",
        "steps", "plain_steps", "drafted_tokens", "accepted_tokens", "emitted_tokens", "recorded_steps",
        "recording_seconds", "recording_failures", "ignored_fields",
    )  # fmt: skip
    histograms = ("time_to_first_token_seconds", "inter_token_seconds", "request_seconds", "accept_length")
    expected = {
        **{f"pilotfish_engine_{name}_total": "counter" for name in counters},
        **{f"pilotfish_engine_{name}": "histogram" for name in histograms},
        **{f"pilotfish_engine_{name}": "gauge" for name in ("running", "waiting", "context_tokens", "speculating")},
    }
    kinds = dict(line.split()[2:4] for line in text.splitlines() if line.startswith("# TYPE"))
    assert kinds == expected
    assert served.metric("pilotfish_engine_concurrency_seconds_total") == 1.5


def test_the_http_process_stays_light(served: Engine) -> None:
    mapped = Path(f"/proc/{served.process.pid}/maps").read_text()
    assert "torch" not in mapped
