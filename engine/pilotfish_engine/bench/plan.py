"""What a run does, from its flags. Knows nothing about how it is done."""

from __future__ import annotations

import argparse
import importlib.util
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from pilotfish_engine.errors import UsageError

Api = Literal["chat", "completions"]
N = TypeVar("N", int, float)

DATASETS = ("chat", "code", "sums")
MAX_CONCURRENCY = 4096
DEFAULT_CONCURRENCY = "1,2,4,8"
DEFAULT_OUTPUT_LEN = 128
DEFAULT_INPUT_LEN = 512
LEAST_REQUESTS, REQUESTS_A_SLOT, SECONDS_OF_A_RATE = 32, 8, 30


@dataclass(frozen=True)
class Level:
    """So many requests at once, or so many arrivals a second on average."""

    kind: Literal["concurrency", "rate"]
    value: float

    @property
    def name(self) -> str:
        return f"{self.kind} {self.value:g}"

    @property
    def usual_requests(self) -> int:
        """Enough requests that the last ones do not decide the figures. They run with ever fewer beside them."""
        factor = REQUESTS_A_SLOT if self.kind == "concurrency" else SECONDS_OF_A_RATE
        return max(LEAST_REQUESTS, math.ceil(factor * self.value))


@dataclass(frozen=True, kw_only=True)
class Questions:
    """prompts: one of DATASETS, a file, None: synthetic ones of input_len tokens."""

    api: Api = "chat"
    prompts: str | None = None
    input_len: int = DEFAULT_INPUT_LEN
    output_len: int = DEFAULT_OUTPUT_LEN
    temperature: float = 0.0
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Files:
    """json and picture are written, baseline is read."""

    json: Path | None = None
    picture: Path | None = None
    baseline: Path | None = None


@dataclass(frozen=True, kw_only=True)
class Plan(Questions, Files):
    """url: without /v1. model None: the server's first. requests, seconds: of a level, both None:
    `Level.usual_requests`. timeout: seconds of a request. limit: seconds of the run."""

    url: str
    levels: tuple[Level, ...]
    model: str | None = None
    api_key: str | None = None
    requests: int | None = None
    seconds: float | None = None
    warm_up: int = 4
    timeout: float = 600.0
    limit: float = 3600.0

    def requests_of(self, level: Level) -> int | None:
        """How many requests a level has; None: as many as its seconds allow."""
        if self.requests is None and self.seconds is None:
            return level.usual_requests
        return self.requests


def add_flags(parser: argparse.ArgumentParser) -> None:
    def flag(name: str, kind: Callable[[str], Any], metavar: str, text: str, default: object = None) -> None:
        shown = "" if default is None else f" [{default}]"
        parser.add_argument(name, type=kind, metavar=metavar, help=text + shown, default=default)

    flag("--url", str, "URL", "the server", "http://127.0.0.1:8000")
    flag("--model", str, "NAME", "model to ask for [the first that the server lists]")
    flag("--api-key-file", str, "F", "file with the key that the server wants")
    flag("--concurrency", _several(_whole(1, MAX_CONCURRENCY)), "N,…", f"requests at once [{DEFAULT_CONCURRENCY}]")
    flag("--rate", _several(_number(0.001, 100_000)), "R,…", "requests a second, arriving at random (Poisson)")
    flag("--prompts", str, "P", f"{', '.join(DATASETS)} (installed data), or a JSONL file of prompt or messages")
    flag("--input-len", _whole(1, 1 << 20), "N", f"tokens of a random prompt [{DEFAULT_INPUT_LEN}, without --prompts]")
    flag("--output-len", _whole(1, 1 << 20), "N", "most tokens of an answer", DEFAULT_OUTPUT_LEN)
    flag("--api", _one_of("chat", "completions"), "A", "chat or completions [chat with --prompts, else completions]")
    flag("--temperature", _number(0, 2), "T", "of the sampling", 0.0)
    flag(
        "--requests", _whole(1, 1_000_000), "N", "requests of a level [8 for each at once, 30 s of a rate, 32 or more]"
    )
    flag("--seconds", _number(0.1, 86_400), "S", "how long a level sends requests")
    flag("--warm-up", _whole(0, MAX_CONCURRENCY), "N", "requests before the first level, not counted", 4)
    flag("--timeout", _number(0.1, 86_400), "S", "seconds after which a request has failed", 600.0)
    flag("--limit", _number(1, 604_800), "S", "seconds after which the run ends, wherever it is", 3600.0)
    flag("--seed", _whole(0, 1 << 31), "N", "of arrivals, and of the order or text of prompts", 0)
    flag("--json", Path, "FILE", "write every figure here")
    flag("--picture", Path, "FILE", "draw the levels here (.png, .svg, .pdf)")
    flag("--baseline", Path, "FILE", "an earlier run's --json file, shown beside this one")


def plan_from(flags: Mapping[str, Any]) -> Plan:
    """flags: as `add_flags` names them. Raises UsageError on what cannot work, before anything is sent."""
    concurrency, rates = flags["concurrency"], flags["rate"]
    if concurrency is None and rates is None:
        concurrency = _several(_whole(1, MAX_CONCURRENCY))(DEFAULT_CONCURRENCY)
    prompts = flags["prompts"]
    if prompts is not None and flags["input_len"] is not None:
        raise UsageError(f"--input-len is for random prompts, and --prompts is {prompts!r}; one of them would work")
    url = str(flags["url"]).rstrip("/").removesuffix("/v1")
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"--url is {flags['url']!r}; http://HOST:PORT would work")
    for name in ("json", "picture"):
        if flags[name] is not None and not flags[name].absolute().parent.is_dir():
            raise UsageError(f"--{name} is {flags[name]}, in a folder that does not exist; one that does would work")
    if flags["picture"] is not None and importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--picture needs matplotlib, which is not there; pip install 'pilotfish[train]' would work")
    levels = [Level("concurrency", n) for n in concurrency or ()] + [Level("rate", r) for r in rates or ()]
    return Plan(
        url=url,
        levels=tuple(levels),
        api=flags["api"] or ("completions" if prompts is None else "chat"),
        input_len=flags["input_len"] or DEFAULT_INPUT_LEN,
        api_key=_key(flags["api_key_file"]),
        **{key: flags[key] for key in _AS_GIVEN},
    )


_AS_GIVEN = (
    "model", "prompts", "output_len", "temperature", "requests", "seconds", "warm_up", "timeout", "limit", "seed",
    "json", "picture", "baseline",
)  # fmt: skip


def _key(file: str | None) -> str | None:
    if file is None:
        return None
    try:
        key = Path(file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--api-key-file {file!r} cannot be read ({error}); a file of one line would work") from error
    if not key or not key.isascii() or not key.isprintable():
        raise UsageError(f"--api-key-file {file!r} does not hold one line of text; such a file would work")
    return key


def _whole(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {low} to {high}")
        return int(text)

    return parse


def _number(low: float, high: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not low <= number <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number from {low:g} to {high:g}")
        return number

    return parse


def _several(one: Callable[[str], N]) -> Callable[[str], tuple[N, ...]]:
    """Of numbers between commas, each once, in the order given."""

    def parse(text: str) -> tuple[N, ...]:
        return tuple(dict.fromkeys(one(part.strip()) for part in text.split(",")))

    return parse


def _one_of(*values: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in values:
            raise argparse.ArgumentTypeError(f"{text!r} is unknown; one of {', '.join(values)} would work")
        return text

    return parse
