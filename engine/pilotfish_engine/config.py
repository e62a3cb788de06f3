"""Every setting of the engine, frozen, grouped, resolved once from flags and PILOTFISH_… variables.

The only reader of the environment in the engine. Knows nothing about tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pilotfish_engine.contract.speculation import Envelope


@dataclass(frozen=True)
class ModelConfig:
    """source: hf:// pvc:// file:// package:// or a plain path. dtype: auto float32 bfloat16 float16."""

    source: str
    dtype: str = "auto"
    max_model_len: int | None = None  # None: the checkpoint's own


@dataclass(frozen=True)
class SpeculationConfig:
    """method: a registered name, None or Auto (by what the checkpoint and `draft` hold)."""

    method: str = "Auto"
    draft: str | None = None
    envelope: Envelope = field(default_factory=Envelope)


@dataclass(frozen=True)
class CapacityConfig:
    """kv_tokens None: as much as memory allows, at least one whole request of max_model_len."""

    max_running_requests: int = 32
    page_size: int = 16
    kv_tokens: int | None = None
    chunk_size: int = 512
    tensor_parallel_size: int = 1
    overlap: bool = False
    max_waiting_requests: int = 1024


@dataclass(frozen=True)
class ServerConfig:
    host: str = "127.0.0.1"
    port: int = 8000
    served_name: str | None = None
    api_key_file: str | None = None
    admin_token_file: str | None = None
    drain_seconds: float = 30.0


@dataclass(frozen=True)
class EngineConfig:
    model: ModelConfig
    speculation: SpeculationConfig = SpeculationConfig()
    capacity: CapacityConfig = CapacityConfig()
    server: ServerConfig = ServerConfig()
