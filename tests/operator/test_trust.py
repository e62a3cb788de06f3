"""A report that breaks its ranges, contradicts an earlier one or comes from elsewhere is not believed."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pilotfish_operator.scrape.client import BadReport, parse_report
from pilotfish_operator.scrape.trust import AGREEING, History, judge
from tests.operator.engines import report

GOOD = json.loads(report().model_dump_json())


def changed(path: str, value: Any) -> bytes:
    """A good report with one field replaced; Python's JSON writes NaN and Infinity as engines' libraries do."""
    found = json.loads(json.dumps(GOOD))
    *parents, last = path.split(".")
    place = found
    for part in parents:
        place = place[part]
    place[last] = value
    return json.dumps(found).encode()


NAN, ENDLESS = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("running", -1), ("running", 10**30), ("running", NAN), ("running", "many"), ("running", 65),
        ("waiting", -5), ("waiting", 2**22), ("context_tokens", -1), ("context_tokens", 2**60),
        ("max_running_requests", 0), ("max_running_requests", 10**12),
        ("concurrency_seconds_total", -0.5), ("concurrency_seconds_total", NAN), ("concurrency_seconds_total", 1e300),
        ("accept_length", -2.0), ("accept_length", ENDLESS), ("accept_length", 1e9),
        ("accept", [1.5]), ("accept", [0.5, NAN]), ("accept", [0.1] * 65), ("accept", [-0.1]),
        ("counters.steps", -1), ("counters.emitted_tokens", 2**60), ("counters.accepted_tokens", 301),
        ("effective.num_steps", 9), ("effective.topk", 0), ("effective.num_draft_tokens", 10**6),
        ("effective.disable_threshold", -1), ("effective.disable_threshold", 10**30),
        ("envelope.num_steps", -1), ("envelope.disable_threshold", 10**30), ("envelope.tuning", "Wild"),
        ("profile.overhead_ms", -1.0), ("profile.kv_ms_per_token", -1e-9), ("profile.plain_overhead_ms", NAN),
        ("profile.verify_ms", [[1, -4.0]]), ("profile.verify_ms", [[0, 1.0]]),
        ("profile.verify_ms", [[8, 1.0], [4, 2.0]]),
        ("profile.verify_ms", [[4, 1.0], [4, 2.0]]), ("profile.draft_ms", [[1, ENDLESS]]),
        ("profile.extend_ms", [[i, 1.0] for i in range(1, 300)]), ("profile.verify_ms", "fast"),
        ("device.memory_bytes", {"kv": -1}), ("device.recording_seconds", -1), ("uptime_seconds", -1),
        ("uptime_seconds", NAN),
        ("method", ""), ("method", "N" * 65), ("reason", "x" * 5000), ("pod", "p" * 300),
    ],
)  # fmt: skip
def test_every_field_has_its_range_and_is_named(path: str, value: Any) -> None:
    with pytest.raises(BadReport) as caught:
        parse_report("10.0.0.1", changed(path, value))
    named = path.split(".")[-1]
    assert named in str(caught.value)
    assert len(str(caught.value)) < 500
    assert str(caught.value).isprintable()


FIELDS = [*GOOD, *(f"{a}.{b}" for a, inner in GOOD.items() if isinstance(inner, dict) for b in inner)]


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(FIELDS),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=8,
    ),
)
def test_whatever_stands_in_a_field_it_is_a_report_or_a_sentence(path: str, value: Any) -> None:
    with contextlib.suppress(BadReport):
        found = parse_report("10.0.0.1", changed(path, value))
        verdict, _ = judge("uid", found, History(report(), 0.0), 3.0)
        assert verdict is None or verdict.isprintable()


@pytest.mark.parametrize("body", [b"", b"null", b"[]", b"3", b"{" * 100_000, b'{"a":' * 50_000, b"\xff\xfe", b"NaN"])
def test_what_is_no_object_is_no_report(body: bytes) -> None:
    with pytest.raises(BadReport, match="sent no report"):
        parse_report("10.0.0.1", body)


def told(history: list[tuple[float, dict[str, Any]]]) -> list[str | None]:
    """The verdict on each of the reports of one pod, in order."""
    last, verdicts = None, []
    for at, fields in history:
        verdict, last = judge("uid", report(**fields), last, at)
        verdicts.append(verdict)
    return verdicts


def counters(**fields: int) -> dict[str, int]:
    return GOOD["counters"] | fields


@pytest.mark.parametrize(
    ("second", "word"),
    [
        ({"concurrency_seconds_total": 5.0, "uptime_seconds": 103.0}, "concurrency_seconds_total ran backwards"),
        ({"counters": counters(emitted_tokens=7), "uptime_seconds": 103.0}, "counters.emitted_tokens ran backwards"),
        ({"counters": counters(steps=0), "uptime_seconds": 103.0}, "counters.steps ran backwards"),
        ({"concurrency_seconds_total": 1e9, "uptime_seconds": 103.0}, "concurrency_seconds_total jumped"),
        ({"counters": counters(emitted_tokens=10**9), "uptime_seconds": 103.0}, "counters.emitted_tokens jumped"),
        ({"uptime_seconds": 100.0}, "stale"),
        ({"uptime_seconds": 5000.0}, "its clock jumped"),
        ({"uptime_seconds": 103.0, "pod": "another"}, "the report of another pod"),
    ],
)
def test_what_contradicts_the_report_before_is_named_and_not_used(second: dict[str, Any], word: str) -> None:
    first = {"concurrency_seconds_total": 10.0, "uptime_seconds": 100.0, "pod": "uid"}
    before, verdict = told([(0.0, first), (3.0, first | second)])
    assert before is None
    assert verdict is not None
    assert word in verdict


def test_a_pod_that_lied_is_believed_after_some_answers_that_agree() -> None:
    lie = [(0.0, {"concurrency_seconds_total": 9.0}), (3.0, {"concurrency_seconds_total": 1e9})]
    after = [(6.0 + 3 * i, {"concurrency_seconds_total": 1e9 + i}) for i in range(AGREEING + 1)]
    verdicts = told([*lie, *after])
    assert verdicts[1:].index(None) == AGREEING


def test_a_pod_that_goes_on_contradicting_itself_is_never_believed() -> None:
    totals = [50.0 + 50 * (i % 2) for i in range(40)]
    history = [(3.0 * i, {"concurrency_seconds_total": n, "uptime_seconds": 3.0 * i}) for i, n in enumerate(totals)]
    assert all(told(history)[3:])


def test_an_engine_that_started_anew_counts_from_zero_and_is_believed() -> None:
    old = {"concurrency_seconds_total": 900.0, "uptime_seconds": 1000.0}
    assert told([(0.0, old), (30.0, {"concurrency_seconds_total": 0.0, "uptime_seconds": 4.0})]) == [None, None]
    assert told([(0.0, {"concurrency_seconds_total": 900.0}), (30.0, {"concurrency_seconds_total": 0.0})]) == [None] * 2


@given(st.lists(st.tuples(st.floats(0.5, 30), st.integers(0, 64)), min_size=2, max_size=20))
def test_an_honest_engine_is_always_believed(steps: list[tuple[float, int]]) -> None:
    at, total, history = 0.0, 0.0, []
    for passed, load in steps:
        at, total = at + passed, total + passed * load
        history.append((at, {"running": load, "concurrency_seconds_total": total, "uptime_seconds": at, "pod": "uid"}))
    assert told(history) == [None] * len(history)
