"""A run's figures as text: levels, latencies, what to know before they are believed, and another run beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from pilotfish_engine.bench.result import PERCENTS, LevelResult, Percentiles, Result

BUSY_CLIENT = 0.8  # of a core
FOREIGN_SHARE = 0.05
NOTHING = "–"
MARK = "*"

LATENCIES: tuple[tuple[str, str], ...] = (
    ("first token, ms", "first_token_ms"),
    ("per token, ms", "per_token_ms"),
    ("between chunks, ms", "chunk_gap_ms"),
    ("end to end, ms", "end_to_end_ms"),
)
LEVEL_COLUMNS: tuple[tuple[str, Callable[[LevelResult], str]], ...] = (
    ("ok", lambda level: str(level.succeeded)),
    ("failed", lambda level: str(level.failed)),
    ("req/s", lambda level: number(level.requests_per_second)),
    ("tokens/s", lambda level: number(level.tokens_per_second)),
    ("prompt", lambda level: _mean(level.prompt_tokens, level)),
    ("answer", lambda level: _mean(level.completion_tokens, level)),
    ("accept len", lambda level: number(None if level.acceptance is None else level.acceptance.accept_length)),
    ("accepted", lambda level: _share(None if level.acceptance is None else level.acceptance.accepted_share)),
    ("speculative", lambda level: _share(None if level.acceptance is None else level.acceptance.speculative_share)),
    ("client", lambda level: _share(level.client_cpu)),
)


def text_of(result: Result, baseline: Result | None = None) -> str:
    blocks = [[f"{result.model} at {result.url}: {describe(result)}"]]
    if result.levels:
        blocks.append(_grid(["", *(title for title, _ in LEVEL_COLUMNS)], map(_level_row, result.levels)))
        blocks += [_latency_block(title, key, result.levels) for title, key in LATENCIES]
        blocks.append(_settings(result))
    if baseline is not None:
        blocks.append(_beside(result, baseline))
    blocks.append(list(notes(result)))
    return "\n\n".join("\n".join(block) for block in blocks if block)


def describe(result: Result) -> str:
    work = result.workload
    length = "" if work.input_len is None else f" of {work.input_len} tokens"
    return (
        f"{work.api}, {work.prompts} prompts{length}, answers of at most {work.output_len} tokens, "
        f"temperature {work.temperature:g}"
    )


def notes(result: Result) -> Iterator[str]:
    """What a reader must know before believing the figures."""
    if result.interrupted is not None:
        yield f"The run was cut short: {result.interrupted}."
    for level in result.levels:
        for note in _notes_of(level, result):
            yield f"{level.name}: {note}"
    if any(not level.whole for level in result.levels):
        yield f"{MARK} Figures of the requests that succeeded; nothing is compared with them."


def _notes_of(level: LevelResult, result: Result) -> Iterator[str]:
    for failure in level.failures:
        yield f"{failure.count} failed, {failure.cause}: {failure.example}"
    if level.unfinished:
        yield f"{_many(level.unfinished, 'request')} cut off"
    good = [request for request in level.requests if request.failure is None]
    uncounted = sum(request.completion_tokens is None for request in good)
    if uncounted:
        yield f"{_many(uncounted, 'answer')} without usage, so that tokens are not counted"
    whole = sum((request.completion_tokens or 0) > 1 and request.pieces < 2 for request in good)
    if whole:
        yield f"{_many(whole, 'answer')} in one piece, so that no time per token is known of it"
    asked = result.workload
    shorter = sum(request.completion_tokens not in (None, asked.output_len) for request in good)
    if asked.input_len is not None and shorter:
        yield f"{_many(shorter, 'answer')} without the {asked.output_len} tokens that were asked for"
    if level.repeated_prompts:
        cached = level.cached_tokens
        known = "" if not cached or not level.prompt_tokens else f" ({cached / level.prompt_tokens:.0%} of the tokens)"
        yield f"{_many(level.repeated_prompts, 'prompt')} asked before, which a prefix cache may have served{known}"
    if level.client_cpu > BUSY_CLIENT:
        yield f"this client used {level.client_cpu:.0%} of a core and may have been what was measured"
    yield from _foreign(level)


def _foreign(level: LevelResult) -> Iterator[str]:
    emitted = None if level.acceptance is None else level.acceptance.emitted_tokens
    if emitted is None or level.completion_tokens is None or not level.whole:
        return
    if abs(emitted - level.completion_tokens) > FOREIGN_SHARE * level.completion_tokens:
        yield (
            f"the server emitted {emitted} tokens and {level.completion_tokens} came here: others used it, "
            "so its acceptance is not this load's alone"
        )


def _level_row(level: LevelResult) -> list[str]:
    return [_name(level), *(shown(level) for _, shown in LEVEL_COLUMNS)]


def _latency_block(title: str, key: str, levels: Sequence[LevelResult]) -> list[str]:
    header = [title, "mean", *(f"p{percent}" for percent in PERCENTS)]
    return _grid(header, ([_name(level), *_latency_row(getattr(level, key))] for level in levels))


def _latency_row(values: Percentiles | None) -> list[str]:
    if values is None:
        return [NOTHING] * (1 + len(PERCENTS))
    return [number(value) for value in (values.mean, *(getattr(values, f"p{percent}") for percent in PERCENTS))]


def _settings(result: Result) -> list[str]:
    """What the server ran with at each level's end, said once where it is the same."""
    told = [(level.name, level.acceptance.settings) for level in result.levels if level.acceptance is not None]
    lines = [
        (name, ", ".join(f"{key} {value}" for key, value in settings.items())) for name, settings in told if settings
    ]
    if lines and len({line for _, line in lines}) == 1:
        return [f"In force: {lines[0][1]}"]
    return [f"In force after {name}: {line}" for name, line in lines]


def _beside(result: Result, baseline: Result) -> list[str]:
    """Levels that both runs have, each figure as `this / baseline (ratio)`."""
    columns = ("tokens/s", "first token p50, ms", "p99", "per token p50, ms", "p99")
    others = {level.name: level for level in baseline.levels}
    rows = []
    for level in result.levels:
        other = others.get(level.name)
        if other is not None:
            comparable = level.whole and other.whole
            pairs = zip(_compared(level), _compared(other), strict=True)
            rows.append([_name(level), *(_pair(own, its, comparable) for own, its in pairs)])
    title = f"Beside the baseline, {baseline.model} at {baseline.url}, {baseline.began}:"
    if not rows:
        return [title, "the runs have no level in common"]
    different = [
        f"{key} {value!r} here and {its!r} there"
        for (key, value), its in zip(result.workload, dict(baseline.workload).values(), strict=True)
        if value != its
    ]
    warning = [f"Not the same work: {'; '.join(different)}."] if different else []
    return [title, *_grid(["", *columns], rows), *warning]


def _compared(level: LevelResult) -> list[float | None]:
    first, each = level.first_token_ms, level.per_token_ms
    latencies = [None if values is None else (values.p50, values.p99) for values in (first, each)]
    return [level.tokens_per_second, *(value for pair in latencies for value in pair or (None, None))]


def _pair(own: float | None, other: float | None, comparable: bool) -> str:
    ratio = f" ({own / other:.2f}×)" if comparable and own is not None and other else ""
    return f"{number(own)} / {number(other)}{ratio}"


def _grid(header: Sequence[str], rows: Iterator[list[str]] | Sequence[list[str]]) -> list[str]:
    """Columns to the right, the first to the left."""
    table = [list(header), *rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    ]


def _name(level: LevelResult) -> str:
    return level.name if level.whole else f"{level.name} {MARK}"


def number(value: float | None) -> str:
    """Three digits that count, more before the point."""
    if value is None:
        return NOTHING
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _share(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.0%}"


def _mean(total: int | None, level: LevelResult) -> str:
    return number(None if total is None or not level.succeeded else total / level.succeeded)
