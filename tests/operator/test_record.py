"""The log of decisions: each stands alone, all of them are bounded, and what is no decision is named."""

from __future__ import annotations

import gzip
import io
import os
from pathlib import Path

import pytest

from pilotfish_engine.contract.speculation import Envelope
from pilotfish_operator import cli, plan, record
from pilotfish_operator.api import Spec
from pilotfish_operator.record import Decided, Entry, Inputs, Log, Unread, read, read_file
from tests.operator.engines import report

SPEC = Spec.model_validate(
    {
        "model": {"source": "file:///m"},
        "autoscaling": {"maxReplicas": 4, "targetConcurrency": 4, "stableWindow": "6s"},
    }
)


def decisions(loads: list[float]) -> list[Entry]:
    """As the operator makes them, on a fake clock: one engine, and what is asked for is there at the next look."""
    memory, found, total, replicas = plan.Memory(), list[Entry](), 0.0, 1
    for number, load in enumerate(loads):
        total += load * 3
        engines = {f"pod-{n}": report(running=int(load), concurrency_seconds_total=total) for n in range(replicas)}
        inputs = Inputs(replicas=replicas, ready=replicas, reports=engines)
        at = number * 3.0
        before = plan.learn(memory, inputs.observed(), at)
        decision, memory = plan.decide(SPEC, inputs.observed(), before, at)
        replicas = decision.replicas
        found.append(
            Entry(
                time=1e9 + at,
                namespace="space",
                name="fish",
                at=at,
                spec=SPEC,
                inputs=inputs,
                memory=before,
                decided=Decided.of(decision),
            )
        )
    return found


LOADS = [1.0] * 10 + [12.0] * 10 + [2.0] * 10


def test_what_was_written_is_read_and_decided_again_alike() -> None:
    made = decisions(LOADS)
    again = list(read(io.StringIO("".join(entry.line() for entry in made))))
    assert again == made
    lines = list(cli.replay(again, changes=True))
    assert any("2 replicas for " in line for line in lines)
    assert lines[-1] == f"{len(LOADS)} decisions, 0 of which would be others today"


def test_what_today_s_code_would_not_decide_is_told_with_its_reasons() -> None:
    made = decisions(LOADS)
    other = made[3].decided.model_copy(update={"replicas": 9, "envelope": Envelope(num_steps=1)})
    made[3] = made[3].model_copy(update={"decided": other})
    first, second, last = cli.replay(made)
    assert "9 replicas then, 1 today; bounds 1/1/6, threshold Auto then, 4/1/5, threshold 50 today" in first
    assert second.startswith("    today: 1 replica")
    assert last == "30 decisions, 1 of which would be others today"


def test_another_version_is_named_and_not_used() -> None:
    good = decisions([1.0])[0].line()
    found = list(read(io.StringIO(good.replace('"version":1', '"version":7') + good)))
    assert found[0] == Unread(1, "7")
    assert list(cli.replay(found)) == [
        "1 entries are of version 7 and not used; 1 is read here",
        "1 decisions, 0 of which would be others today",
    ]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("hello", "line 2 is no recorded decision"),
        ("{}", "line 2 is no recorded decision: time"),
        (lambda good: good.replace('"at":0.0', '"at":NaN'), "at"),
        (lambda good: good.replace('"ready":1', '"ready":-1'), "inputs.ready"),
        (lambda good: good.replace('"running":1', '"running":1e400'), "line 2"),
    ],
)
def test_what_is_no_decision_is_named(line: object, says: str) -> None:
    good = decisions([1.0])[0].line()
    bad = line(good) if callable(line) else line
    with pytest.raises(record.RecordError, match=says):
        list(read(io.StringIO(f"{good}{bad}\n")))


def test_a_log_is_bounded_and_keeps_the_last(tmp_path: Path) -> None:
    size, log = 60_000, Log(tmp_path, 60_000)
    made = decisions([float(n % 7) for n in range(120)])
    for entry in made:
        log.write(entry)
        longest = len(entry.line())
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= size + longest
    kept = [entry for path in record.files(tmp_path) for entry in read_file(path)]
    assert kept == made[-len(kept) :]
    assert len(kept) * longest > size  # packed ones hold more than they take


def test_explain_shows_the_last_changes_of_its_model(tmp_path: Path) -> None:
    log = Log(tmp_path)
    for entry in decisions(LOADS):
        log.write(entry)
        log.write(entry.model_copy(update={"name": "other"}))
    title, *lines = cli.last_changes(tmp_path, "space", "fish")
    assert title == "last changes"
    assert any("  2 replicas for " in line for line in lines)
    assert len(lines) <= cli.LAST
    assert lines == sorted(lines)
    assert cli.last_changes(tmp_path / "nothing", "space", "fish") == []
    (tmp_path / "space.fish.jsonl").write_text("broken\n")
    assert "the log ends early" in cli.last_changes(tmp_path, "space", "fish")[-1]


def test_models_do_not_share_a_log_and_the_oldest_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "MODELS", 2)
    log, entry = Log(tmp_path, 8_000), decisions([1.0])[0]
    for name in ("a", "a.b", "c"):
        for _ in range(5):
            log.write(entry.model_copy(update={"name": name}))
        for path in tmp_path.iterdir():
            os.utime(path, (path.stat().st_mtime - 10,) * 2)  # so that the next ones are younger on any file system
    found = [entry for path in record.files(tmp_path) for entry in read_file(path)]
    assert {entry.name for entry in found if isinstance(entry, Entry)} == {"a.b", "c"}


def test_a_log_that_cannot_be_written_fails_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    log = Log(tmp_path / "file", 1000)
    for _ in range(3):
        log.write(decisions([1.0])[0])
    assert len(caplog.records) == 1


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "space.fish.00000000.jsonl.gz"
    path.write_bytes(gzip.compress(b"much text" * 1000)[:40])
    with pytest.raises(record.RecordError, match="is no log of decisions"):
        list(read_file(path))
