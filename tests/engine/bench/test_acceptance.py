"""What servers tell of their drafts: this engine's report, vLLM's counters, SGLang's gauge, or nothing."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from pilotfish_engine.bench.result import Acceptance, Result, read
from pilotfish_engine.bench.run import bench
from pilotfish_engine.cli import parse
from tests.engine.bench.openai_server import GOOD, OpenAIServer, serving
from tests.engine.server.serving import Engine

SMALL_LOAD = ("--input-len", "30", "--output-len", "20", "--requests", "6")

VLLM = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{{engine="0",model_name="m"}} {drafts}
vllm:spec_decode_num_drafts_total{{engine="1",model_name="m"}} 7.0
# HELP vllm:spec_decode_num_draft_tokens_total Number of draft tokens.
# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total{{engine="0",model_name="m"}} {drafted}
# HELP vllm:spec_decode_num_accepted_tokens_total Number of accepted tokens.
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total{{engine="0",model_name="m"}} {accepted}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="m",position="0"}} 99.0
"""
SGLANG = """\
# HELP sglang:spec_accept_length The average acceptance length of speculative decoding.
# TYPE sglang:spec_accept_length gauge
sglang:spec_accept_length{engine_type="unified",model_name="m",tp_rank="0",dp_rank="0"} 3.0
sglang:spec_accept_length{engine_type="unified",model_name="m",tp_rank="0",dp_rank="1"} 2.0
"""


def measured(server: OpenAIServer | Engine, file: Path, *flags: str) -> Result:
    assert bench(parse(["bench", "--url", server.url, "--json", str(file), "--concurrency", "2", *flags])) == 0
    return read(file)


def metrics(*texts: str) -> Callable[[], tuple[int, str, str]]:
    """One after another, at each reading."""
    left = iter(texts)
    return lambda: (200, "text/plain", next(left))


def test_of_this_engine(served: Engine, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The small core emits its prompt again: one token in a plain step, then three at a time, two of them drafted."""
    before = served.get("/v1/speculation").json()["counters"]
    level = measured(served, tmp_path / "r.json", *SMALL_LOAD, "--warm-up", "3").levels[0]
    counters = {name: value - before[name] for name, value in served.get("/v1/speculation").json()["counters"].items()}
    assert (level.succeeded, level.prompt_tokens, level.completion_tokens) == (6, 180, 120)
    assert counters["emitted_tokens"] == 120 + 60  # and the warm-up's
    told = level.acceptance
    assert told is not None
    # each answer: one token, six times three, and the last one alone
    assert (told.emitted_tokens, told.drafted_tokens, told.accepted_tokens) == (120, 6 * 7 * 3, 6 * 12)
    assert told.accept_length == pytest.approx(1 + 12 / 7)
    assert told.accepted_share == pytest.approx(12 / 21)
    assert told.speculative_share == pytest.approx(7 / 8)
    assert told.settings is not None
    assert told.settings["method"] == "ECHO"
    assert told.settings["num_steps"] == 5
    assert all(1 <= request.pieces <= 8 for request in level.requests)  # several tokens a chunk
    out = capsys.readouterr().out
    assert "In force: method ECHO, num_steps 5, topk 1" in out
    assert "2.71" in out
    assert "others used it" not in out


def test_who_else_uses_the_server_is_noticed(served: Engine, tmp_path: Path, capsys) -> None:
    """Of this load's acceptance nothing can be known then."""
    with serving(GOOD) as other:
        reports = itertools.cycle([0, 500])

        def report() -> tuple[int, str, str]:
            told = served.get("/v1/speculation").json()
            told["counters"] = dict.fromkeys(told["counters"], next(reports))
            return 200, "application/json", httpx.Response(200, json=told).text

        other.routes["/v1/speculation"] = report
        measured(other, tmp_path / "r.json", *SMALL_LOAD, "--warm-up", "0", "--output-len", "3")
    assert "the server emitted 500 tokens and 18 came here: others used it" in capsys.readouterr().out


def test_of_vllm(tmp_path: Path) -> None:
    texts = (
        VLLM.format(drafts=10.0, drafted=30.0, accepted=15.0),
        VLLM.format(drafts=50.0, drafted=150.0, accepted=85.0),
    )
    with serving(GOOD, routes={"/metrics": metrics(*texts)}) as server:
        told = measured(server, tmp_path / "r.json", *SMALL_LOAD, "--output-len", "3").levels[0].acceptance
    assert told == Acceptance(
        source="vllm", accept_length=1 + 70 / 40, accepted_share=70 / 120, drafted_tokens=120, accepted_tokens=70
    )


def test_of_vllm_that_did_not_draft(tmp_path: Path) -> None:
    text = VLLM.format(drafts=10.0, drafted=30.0, accepted=15.0)
    with serving(GOOD, routes={"/metrics": metrics(text, text)}) as server:
        told = measured(server, tmp_path / "r.json", *SMALL_LOAD, "--output-len", "3").levels[0].acceptance
    assert told == Acceptance(source="vllm", accept_length=None, drafted_tokens=0, accepted_tokens=0)


def test_of_sglang(tmp_path: Path) -> None:
    with serving(GOOD, routes={"/metrics": metrics(SGLANG, SGLANG)}) as server:
        told = measured(server, tmp_path / "r.json", *SMALL_LOAD, "--output-len", "3").levels[0].acceptance
    assert told == Acceptance(source="sglang, its last moments", accept_length=2.5)


@pytest.mark.parametrize(
    "answer", [(200, "text/html", "<html>"), (500, "text/plain", ""), (200, "text/plain", "# x\n")]
)
def test_of_others_nothing_is_known(tmp_path: Path, answer: tuple[int, str, str]) -> None:
    with serving(GOOD, routes={path: lambda: answer for path in ("/metrics", "/v1/speculation")}) as server:
        assert measured(server, tmp_path / "r.json", *SMALL_LOAD, "--output-len", "3").levels[0].acceptance is None
