"""The SpeculativeModel as pydantic models: the single source of the CRD's schema (`crd.py` writes it) and of defaults.

Descriptions are what `kubectl explain` shows; CEL rules carry the sentence that a refused manifest gets. Defaults live
here. Of them, those that other clients of the API count on are in the schema too (STORED), where they are outside of
what a template is rendered from: a newer default must not roll pods. Knows nothing about other Kubernetes objects.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from pilotfish_engine.contract import speculation as contract
from pilotfish_engine.contract.methods import AUTO, METHODS, NO_METHOD
from pilotfish_operator.schema import (
    STORED,
    AutoOrSize,
    Free,
    OneOf,
    Part,
    Quantity,
    Source,
    auto_or_int,
    duration_schema,
    rule,
    rules,
)

MethodName = Annotated[str, OneOf((NO_METHOD, *(method.name for method in METHODS), AUTO))]
NEEDS_DRAFT = [method.name for method in METHODS if method.needs_draft]
FORBIDS_DRAFT = [NO_METHOD, *(method.name for method in METHODS if not method.takes_draft)]
UP_TO_THRESHOLD = auto_or_int(1, "a number of running requests", contract.MAX_THRESHOLD)


FormatName = Annotated[str, Field(pattern="^[a-z0-9_]{1,40}$")]  # the engine knows which there are


class SecretKey(Part):
    """One key of a Secret in the model's namespace."""

    name: str = Field(min_length=1, max_length=253, description="Name of the Secret.")
    key: str = Field(min_length=1, max_length=253, description="Key within the Secret.")


class Model(Part):
    """The target model: the one whose answers are served."""

    source: Source = Field(
        description="Where the weights are: hf://ORG/REPO, pvc://CLAIM/PATH, file:///PATH (in the "
        "image) or package://PACKAGE/FILE (inside an installed Python package)."
    )
    revision: str | None = Field(
        None, max_length=256, description="Branch, tag or commit of an hf:// source that names none."
    )
    token_secret_ref: SecretKey | None = Field(None, description="Access token for a gated hf:// source.")
    served_name: str | None = Field(
        None, min_length=1, max_length=253, description="Model name that clients send. Default: the object's name."
    )


class Draft(Part):
    """The draft model or head that swims ahead of the target."""

    source: Source = Field(description="Where the draft's weights are; the same four schemes as model.source.")


class Speculation(Part):
    """How tokens are drafted, and within which bounds the settings may move."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                f"!has(self.method) || !(self.method in {NEEDS_DRAFT}) || has(self.draft)",
                "this method needs a draft model: set spec.speculation.draft.source",
                messageExpression="'method ' + self.method + ' needs a draft model: set spec.speculation.draft.source'",
            ),
            rule(
                f"!has(self.method) || !(self.method in {FORBIDS_DRAFT}) || !has(self.draft)",
                "this method uses no draft model: remove spec.speculation.draft",
                messageExpression="'method ' + self.method + ' uses no draft model: remove spec.speculation.draft, or "
                "choose a method that has one'",
            ),
        )
    )
    method: MethodName = Field(
        AUTO,
        description=f"{NO_METHOD} (plain decoding), "
        + ", ".join(f"{method.name} ({method.summary})" for method in METHODS)
        + f", or {AUTO}: what the model and the draft hold. Default: {AUTO}.",
    )
    draft: Draft | None = Field(None, description=f"Draft model; needed by {', '.join(NEEDS_DRAFT)}.")
    tuning: contract.Tuning = Field(
        "Adaptive",
        description="Adaptive: settings move with load and "
        "acceptance within the bounds below. Fixed: the bounds are the settings. "
        "Changes in running pods without a restart. Default: Adaptive.",
    )
    num_steps: int = Field(
        5,
        ge=1,
        le=contract.MAX_NUM_STEPS,
        description="Draft steps: the upper bound (Adaptive) or the value (Fixed). "
        "A change rolls the pods, which size their memory by it. Default: 5.",
    )
    topk: int = Field(
        1,
        alias="topK",
        ge=1,
        le=contract.MAX_TOPK,
        description="Children of a draft node: bound or value. 1 drafts a chain. A change rolls the pods. Default: 1.",
    )
    num_draft_tokens: int | None = Field(
        None,
        ge=contract.MIN_NUM_DRAFT_TOKENS,
        le=contract.MAX_NUM_DRAFT_TOKENS,
        description="Tokens verified at once for a request, the root "
        "included: bound or value. A change rolls the pods. Default: numSteps x topK + 1, "
        f"{contract.MAX_NUM_DRAFT_TOKENS} at most.",
    )
    disable_threshold: Annotated[contract.Threshold, UP_TO_THRESHOLD] = Field(
        "Auto",
        description="Running requests of one replica from which it decodes "
        "plainly. Auto: where the measured profile says that speculation stops paying. "
        "Changes in running pods without a restart. Default: Auto.",
    )

    @property
    def draft_tokens(self) -> int:
        return self.num_draft_tokens or min(contract.MAX_NUM_DRAFT_TOKENS, self.num_steps * self.topk + 1)


class Engine(Part):
    """Start-up settings of the engine; a change rolls the pods."""

    tensor_parallel_size: int = Field(1, ge=1, le=64, description="Accelerators of one replica. Default: 1.")
    max_model_len: int | None = Field(None, ge=16, description="Longest context in tokens. Default: the model's own.")
    max_concurrency: int = Field(
        256, ge=1, le=4096, description="Requests that one replica runs at once; more wait. Default: 256."
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field("auto", description="Precision. Default: auto.")
    memory_fraction: float = Field(
        0.9,
        ge=0.1,
        le=0.98,
        description="Share of an accelerator's memory, or of a container's limit on CPUs, that the engine takes in "
        "all: weights, draft, largest pass and, of what is left, the KV cache. Default: 0.9.",
    )
    kv_tokens: int | None = Field(
        None, ge=16, description="Tokens in the KV cache. Default: what memoryFraction leaves for it."
    )
    chunk_size: int | None = Field(
        None,
        ge=16,
        le=131072,
        description="Prompt tokens that go through at once. Default: the engine's own.",
    )
    page_size: int | None = Field(
        None,
        ge=1,
        le=256,
        description="Tokens of a KV page: a power of two. Default: the engine's own.",
        json_schema_extra=rules(
            rule("self in [1, 2, 4, 8, 16, 32, 64, 128, 256]", "choose a power of two from 1 to 256 for pageSize")
        ),
    )
    tool_call_parser: FormatName | None = Field(
        None,
        description="How the model writes calls of tools, such as hermes, mistral or llama3_json; none reads no calls, "
        "auto goes by the chat template. Default: auto.",
    )
    reasoning_parser: FormatName | None = Field(
        None,
        description="How the model writes its reasoning, such as think or harmony; none leaves it in the answer, auto "
        "goes by the chat template. Default: auto.",
    )


class Resources(Part):
    """What a replica asks of its node."""

    accelerator: str = Field(
        "nvidia.com/gpu",
        min_length=1,
        max_length=253,
        description="Extended resource to request, as "
        "many as tensorParallelSize; None runs on CPUs. Default: nvidia.com/gpu.",
    )
    requests: dict[str, Quantity] = Field(
        default_factory=dict, description="Container requests, such as cpu and memory."
    )
    limits: dict[str, Quantity] = Field(default_factory=dict, description="Container limits, such as memory.")


class Toleration(Part):
    """A taint that the pods tolerate."""

    key: str | None = Field(None, description="Taint key; empty matches all keys.")
    operator: Literal["Exists", "Equal"] | None = Field(None, description="How the key relates to the value.")
    value: str | None = Field(None, description="Taint value.")
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = Field(None, description="Taint effect.")
    toleration_seconds: int | None = Field(None, description="How long a NoExecute taint is tolerated.")


class Scheduling(Part):
    """Where the pods may run; each field goes into the pod as it is."""

    node_selector: dict[str, str] = Field(default_factory=dict, description="Labels that a node must have.")
    tolerations: list[Toleration] = Field(default_factory=list, description="Taints that the pods tolerate.")
    affinity: Free | None = Field(None, description="Affinity rules of the pod.")
    topology_spread: list[Free] = Field(default_factory=list, description="The pod's topologySpreadConstraints.")
    priority_class_name: str | None = Field(None, description="PriorityClass of the pods.")
    runtime_class_name: str | None = Field(None, description="RuntimeClass of the pods.")


class Autoscaling(Part):
    """Replicas by observed concurrency, which is running plus waiting requests."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                "(has(self.minReplicas) ? self.minReplicas : 1) <= self.maxReplicas",
                "minReplicas must not exceed maxReplicas: lower minReplicas or raise maxReplicas",
            )
        )
    )
    min_replicas: int = Field(
        1, ge=1, le=10000, description="Never fewer replicas. Default: 1.", json_schema_extra={STORED: 1}
    )
    max_replicas: int = Field(ge=1, le=10000, description="Never more replicas.")
    target_concurrency: AutoOrSize = Field(
        "Auto",
        description="Requests that one replica should carry. Auto: the most at "
        "which spec.slo holds by the measured profile; without an slo 70% of what a "
        "replica can run at once. Default: Auto.",
    )
    stable_window: Annotated[str, duration_schema("6s", "1h")] = Field(
        "60s",
        description="Window of the mean that replicas "
        "follow; bursts are judged over a tenth of it, 6s at "
        "least. Default: 60s.",
    )
    scale_down_delay: Annotated[str, duration_schema("0s", "24h")] = Field(
        "300s", description="Replicas leave only when they were not needed for this long. Default: 300s."
    )


class Slo(Part):
    """What each user must get; Auto capacity is computed from it."""

    tokens_per_second_per_user: float = Field(gt=0, description="Least decoding speed of one request, in tokens/s.")


class EmptyDir(Part):
    """Node-local scratch space that ends with the pod."""

    size_limit: Quantity | None = Field(None, description="Most that it may hold.")


class Cache(Part):
    """Where downloaded weights are kept: one of persistentVolumeClaim, emptyDir or size."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                "[has(self.persistentVolumeClaim), has(self.emptyDir), has(self.size)].filter(x, x).size() == 1",
                "set exactly one of persistentVolumeClaim, emptyDir and size",
            ),
            rule(
                "!has(self.storageClassName) || has(self.size)",
                "storageClassName belongs to size: set size, or remove storageClassName",
            ),
        )
    )
    persistent_volume_claim: str | None = Field(None, min_length=1, max_length=253, description="An existing claim.")
    empty_dir: EmptyDir | None = Field(None, description="Node-local scratch space.")
    size: Quantity | None = Field(
        None, description="Size of a claim that the operator makes and that goes with the model."
    )
    storage_class_name: str | None = Field(
        None, max_length=253, description="Class of the claim that the operator makes."
    )


class Rollout(Part):
    """How pods are replaced."""

    drain_seconds: int = Field(
        600, ge=0, le=86400, description="How long a leaving pod may finish its requests. Default: 600."
    )
    max_surge: AutoOrSize = Field(
        "Auto",
        description="Extra pods during a rollout. Auto: one without accelerators, none "
        "with them, since a spare one is seldom free. Default: Auto.",
    )


class Access(Part):
    """Who may call the model."""

    api_key_secret_ref: SecretKey = Field(description="API key that clients must send as a Bearer token.")


class Spec(Part):
    """A model to serve. Only model.source is required."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                "!has(self.autoscaling) || !has(self.replicas) || self.replicas == 1",
                "replicas and autoscaling exclude each other: remove spec.replicas to scale by load, or "
                "spec.autoscaling to keep a fixed number",
            ),
            rule(
                "!has(self.resources) || !has(self.resources.accelerator) || self.resources.accelerator != 'None' || "
                "!has(self.engine) || !has(self.engine.tensorParallelSize) || self.engine.tensorParallelSize == 1",
                "tensorParallelSize above 1 needs accelerators: set resources.accelerator, or tensorParallelSize to 1",
            ),
        )
    )
    model: Model
    speculation: Speculation = Field(default_factory=Speculation)
    engine: Engine = Field(default_factory=Engine)
    resources: Resources = Field(default_factory=Resources)
    scheduling: Scheduling = Field(default_factory=Scheduling)
    paused: bool = Field(
        False,
        description="Freezes what the operator decides by itself: replicas of autoscaling, speculation settings, going "
        "back from a rollout. What the spec says is applied all the same, and drift is put right. Default: false.",
    )
    replicas: int | None = Field(
        None,
        ge=0,
        le=10000,
        description="Fixed number of replicas, also written through /scale; excludes autoscaling. Default: 1.",
        json_schema_extra={STORED: 1},
    )
    autoscaling: Autoscaling | None = None
    slo: Slo | None = None
    cache: Cache | None = None
    rollout: Rollout = Field(default_factory=Rollout)
    access: Access | None = None
