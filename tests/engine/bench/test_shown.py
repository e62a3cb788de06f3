"""What a reader sees of a run: its table, another run beside it, and a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pilotfish_engine.bench.picture import draw
from pilotfish_engine.bench.result import (
    Acceptance,
    FailureCount,
    LevelResult,
    Percentiles,
    Request,
    Result,
    Workload,
    percentiles,
    read,
)
from pilotfish_engine.bench.table import text_of
from pilotfish_engine.errors import UsageError

WORK = Workload(
    api="chat", prompts="code", input_len=None, output_len=128, temperature=0.0, seed=0, requests=None, seconds=None
)


def spread(p50: float) -> Percentiles:
    return Percentiles(count=9, mean=p50 + 1, p50=p50, p90=p50 * 2, p95=p50 * 3, p99=p50 * 4)


def level(value: float, tokens: float | None = 100.0, kind: str = "concurrency", **changes: object) -> LevelResult:
    values: dict[str, object] = {
        "kind": kind,
        "value": value,
        "seconds": 12.0,
        "succeeded": 9,
        "failed": 0,
        "unfinished": 0,
        "failures": (),
        "prompt_tokens": 90,
        "cached_tokens": 0,
        "completion_tokens": 900,
        "requests_per_second": 0.75,
        "tokens_per_second": tokens,
        "first_token_ms": spread(20.0),
        "per_token_ms": spread(10.0),
        "chunk_gap_ms": spread(15.0),
        "end_to_end_ms": spread(1500.0),
        "client_cpu": 0.05,
        "repeated_prompts": 0,
        "acceptance": None,
        "requests": (),
    }
    return LevelResult.model_validate(values | changes)


def run(*levels: LevelResult, **changes: object) -> Result:
    values: dict[str, object] = {
        "pilotfish_version": "0.1.0",
        "began": "2026-11-30T08:00:00+00:00",
        "url": "http://h:1",
        "model": "m",
        "workload": WORK,
        "warm_up": 4,
        "timeout": 600.0,
        "interrupted": None,
        "levels": levels,
    }
    return Result.model_validate(values | changes)


def test_the_table() -> None:
    told = Acceptance(
        source="pilotfish", accept_length=2.5, accepted_share=0.5, speculative_share=0.9, settings={"k": 3}
    )
    text = text_of(run(level(1, acceptance=told), level(16, 1234.5), level(0.5, 50.0, kind="rate")))
    assert (
        text
        == """\
m at http://h:1: chat, code prompts, answers of at most 128 tokens, temperature 0

                ok  failed  req/s  tokens/s  prompt  answer  accept len  accepted  speculative  client
concurrency 1    9       0   0.75       100      10     100         2.5       50%          90%      5%
concurrency 16   9       0   0.75      1234      10     100           –         –            –      5%
rate 0.5         9       0   0.75        50      10     100           –         –            –      5%

first token, ms  mean  p50  p90  p95  p99
concurrency 1      21   20   40   60   80
concurrency 16     21   20   40   60   80
rate 0.5           21   20   40   60   80

per token, ms   mean  p50  p90  p95  p99
concurrency 1     11   10   20   30   40
concurrency 16    11   10   20   30   40
rate 0.5          11   10   20   30   40

between chunks, ms  mean  p50  p90  p95  p99
concurrency 1         16   15   30   45   60
concurrency 16        16   15   30   45   60
rate 0.5              16   15   30   45   60

end to end, ms  mean   p50   p90   p95   p99
concurrency 1   1501  1500  3000  4500  6000
concurrency 16  1501  1500  3000  4500  6000
rate 0.5        1501  1500  3000  4500  6000

In force: k 3

"""[:-2]
    )


def test_a_baseline_stands_beside_the_levels_that_both_have() -> None:
    baseline = run(level(1, 50.0, first_token_ms=spread(10.0)), level(4, 10.0), url="http://plain:1")
    text = text_of(run(level(1), level(2), level(4, 20.0)), baseline)
    beside = text.partition("Beside the baseline, m at http://plain:1, 2026-11-30T08:00:00+00:00:\n")[2]
    assert (
        beside
        == """\
                       tokens/s  first token p50, ms              p99  per token p50, ms              p99
concurrency 1  100 / 50 (2.00×)      20 / 10 (2.00×)  80 / 40 (2.00×)    10 / 10 (1.00×)  40 / 40 (1.00×)
concurrency 4   20 / 10 (2.00×)      20 / 20 (1.00×)  80 / 80 (1.00×)    10 / 10 (1.00×)  40 / 40 (1.00×)"""
    )


def test_nothing_is_compared_with_a_level_in_which_requests_failed() -> None:
    failing = level(1, failed=1, failures=(FailureCount(cause="HTTP 503", count=1, example="full"),))
    for own, other in ((failing, level(1)), (level(1), failing)):
        beside = text_of(run(own), run(other)).partition("Beside the baseline")[2]
        assert "100 / 100" in beside
        assert "×" not in beside


def test_other_work_is_no_baseline_without_a_word() -> None:
    other = run(level(1), workload=WORK.model_copy(update={"prompts": "chat", "output_len": 64}))
    text = text_of(run(level(1)), other)
    assert "Not the same work: prompts 'code' here and 'chat' there; output_len 128 here and 64 there." in text
    assert "the runs have no level in common" in text_of(run(level(1)), run(level(2)))


def request(**changes: object) -> Request:
    values: dict[str, object] = {
        "number": 0,
        "began": 0.0,
        "first_token": 1.0,
        "ended": 2.0,
        "prompt_tokens": 5,
        "cached_tokens": None,
        "completion_tokens": 128,
        "pieces": 9,
        "finish_reason": "length",
        "failure": None,
    }
    return Request.model_validate(values | changes)


@pytest.mark.parametrize(
    ("noted", "changes"),
    [
        ("concurrency 1: this client used 85% of a core and may have been what was measured", {"client_cpu": 0.85}),
        ("concurrency 1: 1 answer without the 128 tokens", {"requests": (request(), request(completion_tokens=9))}),
        ("concurrency 1: 1 answer without usage", {"requests": (request(), request(completion_tokens=None))}),
    ],
)
def test_what_to_know_before_believing(noted: str, changes: Any) -> None:
    random = WORK.model_copy(update={"input_len": 5})
    assert noted in text_of(run(level(1, **changes), workload=random))
    assert "concurrency 1:" not in text_of(run(level(1, client_cpu=0.79, requests=(request(),)), workload=random))


def test_percentiles_lie_between_their_neighbours() -> None:
    assert percentiles([]) is None
    one = percentiles([0.25])
    assert one == Percentiles(count=1, mean=250, p50=250, p90=250, p95=250, p99=250)
    ten = percentiles(second / 1000 for second in (9, 8, 7, 6, 5, 4, 3, 2, 1, 110))
    assert ten is not None
    assert ten.model_dump() == pytest.approx(
        {"count": 10, "mean": 15.5, "p50": 5.5, "p90": 19.1, "p95": 64.55, "p99": 100.91}
    )


def test_the_file_is_the_result(tmp_path: Path) -> None:
    result = run(level(1, requests=(request(),)), level(0.5, None, kind="rate", first_token_ms=None))
    (tmp_path / "r.json").write_text(result.model_dump_json())
    assert read(tmp_path / "r.json") == result


@pytest.mark.parametrize("name", ["p.png", "p.svg"])
def test_the_picture(tmp_path: Path, name: str) -> None:
    told = Acceptance(source="pilotfish", accept_length=2.5)
    result = run(level(1, acceptance=told), level(4, acceptance=told, failed=2), level(2.5, kind="rate"))
    draw(result, run(level(1), level(4)), tmp_path / name)
    drawn = (tmp_path / name).read_bytes()
    assert drawn.startswith(b"\x89PNG" if name == "p.png" else b"<?xml")
    draw(run(level(1, 90.0, per_token_ms=None)), None, tmp_path / name)
    assert (tmp_path / name).read_bytes() != drawn


def test_a_picture_of_no_known_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"p.docx cannot be written .* a .png, .svg or .pdf would work"):
        draw(run(level(1)), None, tmp_path / "p.docx")
