"""Every setting of the engine, frozen, grouped, resolved once from flags and PILOTFISH_… variables.

The only reader of the environment in the engine. Knows nothing about tensors.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import TypeAdapter

from pilotfish_engine.contract.speculation import (
    MAX_NUM_DRAFT_TOKENS,
    MAX_NUM_STEPS,
    MAX_THRESHOLD,
    MAX_TOPK,
    MIN_NUM_DRAFT_TOKENS,
    Envelope,
)
from pilotfish_engine.errors import UsageError


@dataclass(frozen=True)
class ModelConfig:
    """source: hf:// pvc:// file:// package:// or a plain path. dtype: auto float32 bfloat16."""

    source: str
    dtype: str = "auto"
    max_model_len: int | None = None  # None: the checkpoint's own


@dataclass(frozen=True)
class SpeculationConfig:
    """method: a registered name, None or Auto (by what the checkpoint and `draft` hold). draft_corpus: a file."""

    method: str = "Auto"
    draft: str | None = None
    envelope: Envelope = field(default_factory=Envelope)
    draft_corpus: str | None = None


@dataclass(frozen=True)
class CapacityConfig:
    """memory_fraction: of the device's memory, that may be taken in all. kv_tokens None: what is left of it, and no
    more than the running requests can use."""

    max_running_requests: int = 32
    page_size: int = 16
    kv_tokens: int | None = None
    memory_fraction: float = 0.9
    chunk_size: int = 512
    tensor_parallel_size: int = 1
    overlap: bool | None = None  # None: on a GPU
    max_waiting_requests: int = 1024


@dataclass(frozen=True)
class ServerConfig:
    host: str = "127.0.0.1"
    port: int = 8000
    served_name: str | None = None
    api_key_file: str | None = None
    admin_token_file: str | None = None
    drain_seconds: float = 30.0
    allowed_origins: tuple[str, ...] = ()
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    pod_uid: str = ""


@dataclass(frozen=True)
class EngineConfig:
    model: ModelConfig
    speculation: SpeculationConfig = SpeculationConfig()
    capacity: CapacityConfig = CapacityConfig()
    server: ServerConfig = ServerConfig()


CONFIG = TypeAdapter(EngineConfig)  # to and from JSON, for the processes of an engine


# ---- from flags and variables ---------------------------------------------------------------------------------------

Group = Literal["model", "speculation", "envelope", "capacity", "server"]
Parse = Callable[[str], Any]  # raises ValueError with what is wrong and what would work


@dataclass(frozen=True)
class Option:
    """One setting as a person writes it. `key` names the field of its group."""

    group: Group
    key: str
    parse: Parse
    metavar: str
    help: str

    @property
    def flag(self) -> str:
        return "--" + self.key.replace("_", "-")

    @property
    def variable(self) -> str:
        return "PILOTFISH_" + self.key.upper()


def _whole(low: int, high: int) -> Parse:
    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = low - 1
        if not low <= number <= high:
            raise ValueError(f"is not a whole number from {low} to {high}; one of these would work")
        return number

    return parse


def _power_of_two(high: int) -> Parse:
    def parse(text: str) -> int:
        number = int(text) if text.isdecimal() else 0
        if not (0 < number <= high and number & (number - 1) == 0):
            raise ValueError(f"is not a power of two from 1 to {high}; 16 would work")
        return number

    return parse


def _one_of(*values: str) -> Parse:
    def parse(text: str) -> str:
        if text not in values:
            raise ValueError(f"is unknown; one of {', '.join(values)} would work")
        return text

    return parse


def _threshold(text: str) -> int | str:
    if text == "Auto":
        return text
    try:
        number: int = _whole(1, MAX_THRESHOLD)(text)
    except ValueError as error:
        raise ValueError("is neither Auto nor a number of running requests from 1; Auto would work") from error
    return number


def _fraction(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0.1 <= number <= 0.98:
        raise ValueError("is not a number from 0.1 to 0.98; 0.9 would work")
    return number


def _seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number <= 86400:
        raise ValueError("is not a number of seconds from 0 to 86400; 30 would work")
    return number


def _switch(text: str) -> bool:
    if text.lower() not in ("true", "false", "1", "0"):
        raise ValueError("is neither true nor false; one of these would work")
    return text.lower() in ("true", "1")


def _origins(text: str) -> tuple[str, ...]:
    origins = tuple(origin.strip() for origin in text.split(","))
    if not all(re.fullmatch(r"\*|[a-z][a-z0-9+.-]*://[^/\s,]+", origin) for origin in origins):
        raise ValueError("is no list of origins; https://a.example,http://localhost:3000 or * would work")
    return origins


def _text(text: str) -> str:
    return text


_MANY = 1 << 31
_DRAFT_TOKENS = _whole(MIN_NUM_DRAFT_TOKENS, MAX_NUM_DRAFT_TOKENS)
MODEL = Option(
    "model", "model", _text, "MODEL", "a folder, a GGUF file, or hf:// pvc:// file:// package:// and what follows"
)
OPTIONS = (
    Option("speculation", "draft", _text, "D", "draft model, in the forms of MODEL"),
    Option("speculation", "draft_corpus", _text, "FILE", "texts to draft from where a method matches text"),
    Option("speculation", "method", _text, "NAME", "speculative method; None: plain decoding; Auto: by what is there"),
    Option("server", "host", _text, "ADDR", "address to listen on"),
    Option("server", "port", _whole(0, 65535), "N", "port to listen on; 0: any free one"),
    Option("model", "dtype", _one_of("auto", "float32", "bfloat16"), "T", "auto, float32 or bfloat16"),
    Option("envelope", "num_steps", _whole(0, MAX_NUM_STEPS), "K", "draft steps: upper bound, or the value when Fixed"),
    Option("envelope", "topk", _whole(1, MAX_TOPK), "k", "branches of the draft tree at each node"),
    Option("envelope", "num_draft_tokens", _DRAFT_TOKENS, "m", "nodes verified a request, root included"),
    Option("envelope", "tuning", _one_of("Adaptive", "Fixed"), "MODE", "Adaptive or Fixed"),
    Option("envelope", "disable_threshold", _threshold, "Auto|N", "running requests from which it decodes plainly"),
    Option("capacity", "max_running_requests", _whole(1, 4096), "N", "largest batch"),
    Option("model", "max_model_len", _whole(16, _MANY), "N", "longest prompt and answer together, in tokens"),
    Option("capacity", "page_size", _power_of_two(256), "P", "tokens of one KV page"),
    Option("capacity", "kv_tokens", _whole(16, _MANY), "N", "tokens in the KV cache; default: what memory allows"),
    Option("capacity", "memory_fraction", _fraction, "F", "share of the device's memory that may be taken in all"),
    Option("capacity", "chunk_size", _whole(16, 1 << 17), "N", "prompt tokens that go through the model at once"),
    Option("capacity", "tensor_parallel_size", _whole(1, 64), "T", "devices that share the model"),
    Option("capacity", "overlap", _switch, "BOOL", "plan the next step while this one runs; default: on a GPU"),
    Option("capacity", "max_waiting_requests", _whole(0, 1 << 20), "N", "requests that may wait before a 503"),
    Option("server", "served_name", _text, "NAME", "name of the model in the API"),
    Option("server", "tool_call_parser", _text, "NAME", "how the model writes calls of tools; auto: by its template"),
    Option("server", "reasoning_parser", _text, "NAME", "how it writes reasoning; auto: by its template"),
    Option("server", "drain_seconds", _seconds, "S", "how long running requests may finish after SIGTERM"),
    Option("server", "allowed_origins", _origins, "O,O", "origins whose pages may call the API from a browser; *: any"),
    Option("server", "api_key_file", _text, "F", "file with the key that API clients must send"),
    Option("server", "admin_token_file", _text, "F", "file with the token that admin routes want"),
    Option("server", "pod_uid", _text, "UID", "where this engine runs, as its report says"),
)


def resolve(flags: Mapping[str, str | None], environment: Mapping[str, str] = os.environ) -> EngineConfig:
    """flags: by Option.key, as written (None: not given). A flag wins over its variable, that over the default.

    Raises UsageError naming the flag or variable, its value and what would work.
    """
    groups: dict[str, dict[str, Any]] = {"model": {}, "speculation": {}, "envelope": {}, "capacity": {}, "server": {}}
    for option in OPTIONS:
        written = _written(option, flags, environment)
        if written is None:
            continue
        name, value = written
        try:
            groups[option.group][option.key] = option.parse(value)
        except ValueError as error:
            raise UsageError(f"{name} {value!r} {error}") from error
    model = _written(MODEL, flags, environment)
    if model is None:
        raise UsageError("no MODEL is given; name a folder or a GGUF file, or set PILOTFISH_MODEL")
    config = EngineConfig(
        model=ModelConfig(source=model[1], **groups["model"]),
        speculation=SpeculationConfig(**groups["speculation"], envelope=Envelope(**groups["envelope"])),
        capacity=CapacityConfig(**groups["capacity"]),
        server=ServerConfig(**groups["server"]),
    )
    _check(config)
    return config


def _written(option: Option, flags: Mapping[str, str | None], environment: Mapping[str, str]) -> tuple[str, str] | None:
    if (value := flags.get(option.key)) is not None:
        return option.flag, value
    value = environment.get(option.variable)
    # Kubernetes sets PILOTFISH_PORT=tcp://… in every pod of a namespace that has a Service called pilotfish.
    if not value or (option.key == "port" and value.startswith("tcp://")):
        return None
    return option.variable, value


def _check(config: EngineConfig) -> None:
    capacity, longest = config.capacity, config.model.max_model_len
    if capacity.kv_tokens is not None and longest is not None and capacity.kv_tokens < longest:
        raise UsageError(
            f"--kv-tokens {capacity.kv_tokens} cannot hold one request of --max-model-len {longest}; "
            f"{longest} or more would work"
        )


def share_cores(environment: MutableMapping[str, str] = os.environ) -> None:
    """Has threads that wait for the next parallel region sleep after some 60 µs. Else they spin for milliseconds.

    A spinning thread takes the core from the one that it waits for as soon as anything else runs on the machine. Two
    engines with two threads each on two cores then hardly move; so they give 50 tokens/s together, and one alone gives
    98% of what it gives when it spins. Half the value would cost a fifth: gaps between regions would be slept through.
    Read when torch is imported; a value from outside wins.
    """
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", "3000")


def stay_on_this_machine(environment: MutableMapping[str, str] = os.environ) -> None:
    """Has the ranks of a tensor-parallel group listen on the loopback interface only. They ask nobody for a password.

    Read when the group is made; a value from outside does not count.
    """
    environment["GLOO_SOCKET_IFNAME"] = environment["NCCL_SOCKET_IFNAME"] = "lo"
