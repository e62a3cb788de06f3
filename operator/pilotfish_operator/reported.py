"""The status of a SpeculativeModel as pydantic models: what the operator writes back, and its part of the CRD's schema.

Descriptions are what `kubectl explain` shows. Knows nothing about what it is made from.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, WithJsonSchema

from pilotfish_operator.schema import AutoOrSize, Part


class Condition(Part):
    """One condition, as Kubernetes objects have them."""

    type: str = Field(
        description="Ready, Progressing, Degraded, MetricsAvailable, DraftCompatible, SpeculationActive, "
        "ScalingLimited or ModelCached."
    )
    status: Literal["True", "False", "Unknown"] = Field(description="Whether it holds.")
    reason: str = Field(description="Why, in one CamelCase word.")
    message: str = Field(description="Why, in words and numbers.")
    last_transition_time: Annotated[str, WithJsonSchema({"type": "string", "format": "date-time"})] = Field(
        description="When its status last changed."
    )
    observed_generation: int = Field(description="The metadata.generation that it speaks of.")


class Load(Part):
    """What the engines measured."""

    concurrency: float | None = Field(None, description="Running plus waiting requests, mean over the stable window.")
    per_replica: float | None = Field(None, description="The same for one replica.")
    tokens_per_second: float | None = Field(None, description="Tokens that all replicas emit a second.")
    waiting: int | None = Field(None, description="Requests that wait for a place now.")


class SettingsStatus(Part):
    """Speculation settings."""

    num_steps: int | None = Field(None, description="Draft steps; 0 is plain decoding.")
    topk: int | None = Field(None, alias="topK", description="Children of a draft node.")
    num_draft_tokens: int | None = Field(None, description="Tokens verified at once for a request, root included.")
    disable_threshold: AutoOrSize | None = Field(
        None, description="Running requests from which a replica decodes plainly."
    )


class EffectiveStatus(SettingsStatus):
    """What the engines really run."""

    pods_in_step: str | None = Field(None, description="Pods that hold the desired settings, of the pods that serve.")


class SpeculationStatus(Part):
    """What was decided, what runs, and what it brings."""

    active: bool | None = Field(None, description="Whether any replica speculates now, probes left out.")
    method: str | None = Field(None, description="The method that the engines run.")
    desired: SettingsStatus | None = Field(None, description="What the operator set.")
    effective: EffectiveStatus | None = Field(None, description="What the engines report.")
    accept_length: float | None = Field(None, description="Tokens that a speculative step commits, bonus included.")
    speedup: float | None = Field(
        None, description="Tokens/s over plain decoding's at this load, by the measured profile."
    )
    crossover: int | None = Field(
        None, description="Running requests of a replica from which plain decoding is faster."
    )
    reason: str | None = Field(None, description="Why these settings, in words and numbers.")


class Status(Part):
    """What is, beside what was asked for."""

    observed_generation: int | None = Field(None, description="The metadata.generation that this status speaks of.")
    replicas: int | None = Field(None, description="Pods that exist.")
    ready_replicas: int | None = Field(None, description="Pods of the current generation that serve.")
    selector: str | None = Field(None, description="Label selector of the pods, for the scale subresource.")
    endpoint: str | None = Field(None, description="Base URL for OpenAI clients inside the cluster, without /v1.")
    conditions: list[Condition] = Field(
        default_factory=list,
        description="What holds and why.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    )
    load: Load | None = None
    speculation: SpeculationStatus | None = None
