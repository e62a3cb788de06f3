"""What a person chooses for a training run, with defaults for one GPU. Torch-free."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from pilotfish_engine.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How a run is made; it may go on with others. Seconds bound the two phases, of which the learning rate falls to
    nothing by the end of the second, and saves. ranks: processes with a device each that share every step."""

    dtype: str = "auto"
    max_running_requests: int = 64
    generate_seconds: float | None = None
    train_seconds: float | None = None
    save_seconds: float = 60.0
    ranks: int = 1


FREE = ("target", "data", "out", *(field.name for field in fields(Pace)))


@dataclass(frozen=True, kw_only=True)
class TrainSettings(Pace):
    """target: a source, as for serving. data: see `prompts`. out: the head's folder. draft_steps: of training-time
    test. held_out: prompts kept apart, whose greedy answers measure acceptance. batch_tokens: of one optimizer step,
    padding included. max_length: of prompt and answer together; a prompt takes half of it at most."""

    target: str
    data: str
    out: str
    draft_vocab: int = 8192
    draft_steps: int = 6
    epochs: int = 4
    batch_tokens: int = 8192
    max_length: int = 1024
    answer_tokens: int = 512
    learning_rate: float = 5e-4
    held_out: int = 128
    seed: int = 0

    def identity(self) -> dict[str, Any]:
        """What may not change when a run goes on."""
        return {name: value for name, value in asdict(self).items() if name not in FREE}


@dataclass(frozen=True)
class TrainOption:
    key: str
    kind: type
    low: float
    high: float
    help: str

    @property
    def flag(self) -> str:
        return "--" + self.key.replace("_", "-")

    @property
    def default(self) -> Any:
        return next(field.default for field in fields(TrainSettings) if field.name == self.key)

    def parse(self, text: str) -> float | str:
        """Raises UsageError with what would work."""
        if self.kind is str:
            return text
        try:
            value: float = self.kind(text)
        except ValueError:
            value = float("nan")
        if not self.low <= value <= self.high:
            kind = "a whole number" if self.kind is int else "a number"
            raise UsageError(f"{self.flag} {text!r} is not {kind} from {self.low:g} to {self.high:g}")
        return value


OPTIONS = (
    TrainOption("draft_vocab", int, 1, 1 << 20, "tokens that the draft can say"),
    TrainOption("draft_steps", int, 1, 16, "steps of its own that the head is trained on"),
    TrainOption("epochs", int, 1, 10_000, "passes over all answers"),
    TrainOption("batch_tokens", int, 16, 1 << 24, "tokens of one optimizer step"),
    TrainOption("max_length", int, 16, 1 << 20, "longest prompt and answer together, in tokens"),
    TrainOption("answer_tokens", int, 2, 1 << 20, "longest answer that the target writes"),
    TrainOption("learning_rate", float, 1e-8, 1.0, "at its highest"),
    TrainOption("held_out", int, 1, 1 << 16, "prompts to measure acceptance on, not trained on"),
    TrainOption("seed", int, 0, (1 << 31) - 1, "of the order, the first weights and the answers"),
    TrainOption("dtype", str, 0, 0, "of the target: auto, float32 or bfloat16; the head learns in float32"),
    TrainOption("max_running_requests", int, 1, 4096, "answers that are written at once"),
    TrainOption("generate_seconds", float, 0, 1e9, "the target answers no longer than this"),
    TrainOption("train_seconds", float, 0, 1e9, "training takes no longer than this"),
    TrainOption("save_seconds", float, 0, 1e9, "from one checkpoint to the next"),
    TrainOption("ranks", int, 1, 64, "GPUs of this machine that share the work"),
)


def add_flags(parser: ArgumentParser) -> None:
    parser.add_argument("--data", metavar="F", required=True, help="JSON lines with `messages` or `prompt` each")
    parser.add_argument("--out", metavar="DIR", required=True, help="folder of the head, made where it is not there")
    for option in OPTIONS:
        default = "" if option.default is None else f" [{option.default:g}]" if option.kind is not str else " [auto]"
        parser.add_argument(option.flag, metavar="T" if option.kind is str else "N", help=option.help + default)


def from_flags(flags: Mapping[str, Any]) -> TrainSettings:
    """flags: by key, as written (None: not given). Raises UsageError."""
    given = {option.key: option.parse(flags[option.key]) for option in OPTIONS if flags[option.key] is not None}
    return TrainSettings(target=flags["model"], data=flags["data"], out=flags["out"], **given)  # type: ignore[arg-type]
