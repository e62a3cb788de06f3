"""Pure: a SpeculativeModel → the manifests of its children.

Manifests hold only fields that the operator means to own. The pod template is a function of the spec's start-up part
alone (`template_hash`); what may change in running pods is in the ConfigMap and goes to them by PUT. Does no I/O.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from pilotfish_engine.contract.methods import NO_METHOD
from pilotfish_engine.contract.speculation import Envelope
from pilotfish_operator.api import Model, Spec
from pilotfish_operator.kinds import (
    CLAIMS,
    CONFIG_MAPS,
    DEPLOYMENTS,
    DISRUPTION_BUDGETS,
    GROUP,
    MANAGED_BY,
    MODEL_LABEL,
    MODELS,
    SECRETS,
    SERVICE_ACCOUNTS,
    SERVICES,
    TEMPLATE_LABEL,
    Kind,
)

Object = dict[str, Any]

PORT = 8000
SERVICE_PORT = 80
RESTART = f"{GROUP}/restart"  # annotation of a SpeculativeModel: any new value rolls the pods
TOKEN_KEY = "token"
ADMIN_DIR, ACCESS_DIR, HUB_DIR = "/etc/pilotfish/admin", "/etc/pilotfish/access", "/etc/pilotfish/hub"
CLAIMS_DIR, CACHE_DIR = "/mnt/models", "/var/cache/pilotfish"  # the first is where the engine looks for pvc://
TEMPLATE_KEY = "template"  # in the ConfigMap that keeps a template
PRE_STOP_SECONDS = 5
SHARED_MEMORY = "2Gi"
START_SECONDS = 3600  # a large model is downloaded and loaded within this
USER = 65532


@dataclass(frozen=True)
class Owner:
    """The SpeculativeModel that the children belong to."""

    namespace: str
    name: str
    uid: str
    restart: str = ""

    @property
    def selector(self) -> dict[str, str]:
        return {"app.kubernetes.io/name": "pilotfish-engine", "app.kubernetes.io/instance": self.name}

    @property
    def labels(self) -> dict[str, str]:
        more = {"app.kubernetes.io/component": "engine", MANAGED_BY: "pilotfish", MODEL_LABEL: self.name}
        return self.selector | more

    @property
    def secret(self) -> str:
        return f"{self.name}-admin"

    @property
    def endpoint(self) -> str:
        port = "" if SERVICE_PORT == 80 else f":{SERVICE_PORT}"
        return f"http://{self.name}.{self.namespace}.svc{port}"


def template_hash(owner: Owner, spec: Spec) -> str:
    """What names a generation of pods: changes with the start-up part of the spec and with nothing else.

    Defaults do not enter it, so neither a newer operator nor a newer default rolls pods by itself.
    """
    whole = spec.model_dump(by_alias=True, exclude_defaults=True, exclude_none=True, mode="json")
    startup = {
        key: whole[key] for key in ("model", "engine", "resources", "scheduling", "cache", "access") if key in whole
    }
    speculation = {k: v for k, v in whole.get("speculation", {}).items() if k not in ("tuning", "disableThreshold")}
    drain = whole.get("rollout", {}).get("drainSeconds")
    text = json.dumps([startup, speculation, drain, owner.restart], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def bounds(spec: Spec) -> Envelope:
    """The envelope that the spec alone gives: bounds for Adaptive, values for Fixed."""
    asked = spec.speculation
    return Envelope(
        num_steps=asked.num_steps,
        topk=asked.topk,
        num_draft_tokens=asked.draft_tokens,
        disable_threshold=asked.disable_threshold,
        tuning=asked.tuning,
    )


def unsupported(spec: Spec) -> list[str]:
    """Sentences about what the spec asks for and this version's engine cannot do; such a model gets no pods."""
    found = []
    source = spec.model.source
    if spec.model.revision is not None and (not source.startswith("hf://") or "@" in source):
        found.append(
            f"spec.model.revision {spec.model.revision!r} has no meaning beside the source {source}: remove it, or "
            "give an hf:// source without @"
        )
    return found


def children(owner: Owner, spec: Spec, claim: Object | None = None) -> list[Object]:
    """Everything but the Deployment and the Secret, in the order to apply them. `claim`: the cache's, as it stands."""
    return [
        _object(SERVICE_ACCOUNTS, owner, owner.name, {"automountServiceAccountToken": False}),
        _object(
            CONFIG_MAPS,
            owner,
            f"{owner.name}-engine",
            {
                "data": {
                    "PILOTFISH_TUNING": spec.speculation.tuning,
                    "PILOTFISH_DISABLE_THRESHOLD": str(spec.speculation.disable_threshold),
                    "PILOTFISH_DRAIN_SECONDS": str(spec.rollout.drain_seconds),
                }
            },
        ),
        *([_claim(owner, spec, claim)] if spec.cache and spec.cache.size else []),
        _object(
            SERVICES,
            owner,
            owner.name,
            {
                "spec": {
                    "type": "ClusterIP",
                    "selector": owner.selector,
                    "ports": [{"name": "http", "port": SERVICE_PORT, "targetPort": "http", "protocol": "TCP"}],
                }
            },
        ),
        _object(
            DISRUPTION_BUDGETS,
            owner,
            owner.name,
            {"spec": {"maxUnavailable": 1, "selector": {"matchLabels": owner.selector}}},
        ),
    ]


def secret(owner: Owner, token: str) -> Object:
    """The admin token that PUT /v1/speculation asks for."""
    return _object(SECRETS, owner, owner.secret, {"type": "Opaque", "stringData": {TOKEN_KEY: token}})


def deployment(owner: Owner, spec: Spec, template: Object, replicas: int, annotations: dict[str, str]) -> Object:
    spare = surge(spec)
    result = _object(
        DEPLOYMENTS,
        owner,
        owner.name,
        {
            "spec": {
                "replicas": replicas,
                "selector": {"matchLabels": owner.selector},
                "strategy": {
                    "type": "RollingUpdate",
                    "rollingUpdate": {"maxSurge": spare, "maxUnavailable": 0 if spare else 1},
                },
                "revisionHistoryLimit": 3,
                "progressDeadlineSeconds": START_SECONDS + 300,
                "template": template,
            }
        },
    )
    result["metadata"]["annotations"] = annotations
    return result


def template(owner: Owner, spec: Spec, image: str) -> Object:
    """The pod template; labels name its hash."""
    volumes, mounts = _storage(owner, spec)
    scheduling = spec.scheduling.model_dump(by_alias=True, exclude_none=True, exclude_defaults=True)
    if "topologySpread" in scheduling:
        scheduling["topologySpreadConstraints"] = scheduling.pop("topologySpread")
    return {
        "metadata": {"labels": owner.labels | {TEMPLATE_LABEL: template_hash(owner, spec)}},
        "spec": {
            "serviceAccountName": owner.name,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,  # a Service called pilotfish would set PILOTFISH_PORT
            "terminationGracePeriodSeconds": spec.rollout.drain_seconds + PRE_STOP_SECONDS + 10,
            "securityContext": {"runAsNonRoot": True, "fsGroup": USER, "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [_container(owner, spec, image, mounts)],
            "volumes": volumes,
            **scheduling,
        },
    }


def _container(owner: Owner, spec: Spec, image: str, mounts: list[Object]) -> Object:
    def probe(path: str, period: int, failures: int) -> Object:
        return {
            "httpGet": {"path": path, "port": "http"},
            "periodSeconds": period,
            "timeoutSeconds": 5,
            "failureThreshold": failures,
        }

    return {
        "name": "engine",
        "image": image,
        "command": ["pilotfish-engine", "serve"],
        "args": arguments(owner, spec),
        "env": _environment(spec),
        "envFrom": [{"configMapRef": {"name": f"{owner.name}-engine"}}],
        "ports": [{"name": "http", "containerPort": PORT, "protocol": "TCP"}],
        "resources": _resources(spec),
        "volumeMounts": mounts,
        "startupProbe": probe("/health", 2, START_SECONDS // 2),
        "readinessProbe": probe("/ready", 2, 2),
        "livenessProbe": probe("/health", 10, 6),
        "lifecycle": {"preStop": {"sleep": {"seconds": PRE_STOP_SECONDS}}},
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "runAsNonRoot": True,
            "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }


def arguments(owner: Owner, spec: Spec) -> list[str]:
    """MODEL and the flags of `pilotfish-engine serve`; only what the spec says, the engine's defaults else."""
    engine, asked = spec.engine, spec.speculation
    flags: dict[str, object] = {
        "method": asked.method,
        "draft": asked.draft.source if asked.draft else None,
        "host": "$(POD_IP)",
        "port": PORT,
        "served-name": spec.model.served_name or owner.name,
        "dtype": engine.dtype,
        "num-steps": asked.num_steps if asked.method != NO_METHOD else None,
        "topk": asked.topk if asked.method != NO_METHOD else None,
        "num-draft-tokens": asked.draft_tokens if asked.method != NO_METHOD else None,
        "max-running-requests": engine.max_concurrency,
        "max-model-len": engine.max_model_len,
        "memory-fraction": engine.memory_fraction,
        "kv-tokens": engine.kv_tokens,
        "chunk-size": engine.chunk_size,
        "page-size": engine.page_size,
        "tool-call-parser": engine.tool_call_parser,
        "reasoning-parser": engine.reasoning_parser,
        "tensor-parallel-size": engine.tensor_parallel_size if engine.tensor_parallel_size > 1 else None,
        "admin-token-file": f"{ADMIN_DIR}/{TOKEN_KEY}",
        "api-key-file": f"{ACCESS_DIR}/{spec.access.api_key_secret_ref.key}" if spec.access else None,
    }
    words = [word for name, value in flags.items() if value is not None for word in (f"--{name}", str(value))]
    return [_revised(spec.model), *words]


def _revised(model: Model) -> str:
    """The source at its revision, as the engine takes it."""
    return model.source if model.revision is None else f"{model.source}@{model.revision}"


def _environment(spec: Spec) -> list[Object]:
    env: list[Object] = [
        {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "PILOTFISH_POD_UID", "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}},
        {"name": "HOME", "value": "/tmp"},
        {"name": "HF_HOME", "value": CACHE_DIR},
    ]
    if spec.model.token_secret_ref:
        env.append({"name": "HF_TOKEN_PATH", "value": f"{HUB_DIR}/{spec.model.token_secret_ref.key}"})
    return env


def _resources(spec: Spec) -> Object:
    accelerator = spec.resources.accelerator
    devices = {} if accelerator == "None" else {accelerator: str(spec.engine.tensor_parallel_size)}
    found = {"requests": spec.resources.requests | devices, "limits": spec.resources.limits | devices}
    return {key: value for key, value in found.items() if value}


def _storage(owner: Owner, spec: Spec) -> tuple[list[Object], list[Object]]:
    volumes: list[Object] = []
    mounts: list[Object] = []

    def add(name: str, path: str, source: Object, read_only: bool = True) -> None:
        volumes.append({"name": name, **source})
        mounts.append({"name": name, "mountPath": path, **({"readOnly": True} if read_only else {})})

    def from_secret(name: str) -> Object:
        return {"secret": {"secretName": name, "defaultMode": 0o440}}

    add("tmp", "/tmp", {"emptyDir": {}}, read_only=False)
    if spec.engine.tensor_parallel_size > 1:
        # NCCL's ranks meet in shared memory, of which a container has 64 MiB by itself
        add("shm", "/dev/shm", {"emptyDir": {"medium": "Memory", "sizeLimit": SHARED_MEMORY}}, read_only=False)
    add("admin", ADMIN_DIR, from_secret(owner.secret))
    if spec.access:
        add("access", ACCESS_DIR, from_secret(spec.access.api_key_secret_ref.name))
    if spec.model.token_secret_ref:
        add("hub", HUB_DIR, from_secret(spec.model.token_secret_ref.name))
    draft = spec.speculation.draft.source if spec.speculation.draft else ""
    claims = {
        source.removeprefix("pvc://").partition("/")[0]: name
        for name, source in (("draft", draft), ("target", spec.model.source))
        if source.startswith("pvc://")
    }
    for claim, name in claims.items():
        add(name, f"{CLAIMS_DIR}/{claim}", {"persistentVolumeClaim": {"claimName": claim, "readOnly": True}})
    add("cache", CACHE_DIR, _cache_volume(owner, spec), read_only=False)
    return volumes, mounts


def _cache_volume(owner: Owner, spec: Spec) -> Object:
    cache = spec.cache
    if cache and cache.size:
        return {"persistentVolumeClaim": {"claimName": f"{owner.name}-cache"}}
    if cache and cache.persistent_volume_claim:
        return {"persistentVolumeClaim": {"claimName": cache.persistent_volume_claim}}
    limit = cache.empty_dir.size_limit if cache and cache.empty_dir else None
    return {"emptyDir": {"sizeLimit": limit} if limit else {}}


def _claim(owner: Owner, spec: Spec, made: Object | None) -> Object:
    """What cannot be changed in a claim stays as it was made."""
    assert spec.cache is not None
    modes = ["ReadWriteMany" if several(spec) else "ReadWriteOnce"]
    storage = {"storageClassName": spec.cache.storage_class_name} if spec.cache.storage_class_name else {}
    if made is not None:
        modes = made.get("accessModes") or modes
        storage = {"storageClassName": made["storageClassName"]} if storage and made.get("storageClassName") else {}
    body = {"accessModes": modes, "resources": {"requests": {"storage": spec.cache.size}}, **storage}
    return _object(CLAIMS, owner, f"{owner.name}-cache", {"spec": body})


def several(spec: Spec) -> bool:
    """Whether more than one pod may run."""
    return (spec.autoscaling.max_replicas if spec.autoscaling else spec.replicas or 1) > 1


def kept_template(owner: Owner, digest: str, body: Object) -> Object:
    """The ConfigMap that keeps what a template hash names: it can be neither changed nor meant otherwise."""
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    result = _object(
        CONFIG_MAPS, owner, template_name(owner, digest), {"immutable": True, "data": {TEMPLATE_KEY: text}}
    )
    result["metadata"]["labels"] = owner.labels | {TEMPLATE_LABEL: digest}
    return result


def template_name(owner: Owner, digest: str) -> str:
    return f"{owner.name}-{digest}"


def surge(spec: Spec) -> int:
    """Pods beyond the replicas during a rollout."""
    if spec.rollout.max_surge == "Auto":
        return 1 if spec.resources.accelerator == "None" else 0
    return spec.rollout.max_surge


def _object(kind: Kind, owner: Owner, name: str, body: Object) -> Object:
    return {
        "apiVersion": kind.api_version,
        "kind": kind.name,
        "metadata": {
            "name": name,
            "namespace": owner.namespace,
            "labels": owner.labels,
            "ownerReferences": owner_references(owner),
        },
        **body,
    }


def owner_references(owner: Owner) -> list[Object]:
    return [
        {
            "apiVersion": MODELS.api_version,
            "kind": MODELS.name,
            "name": owner.name,
            "uid": owner.uid,
            "controller": True,
            "blockOwnerDeletion": True,
        }
    ]
