"""The operator's settings, frozen, resolved once from flags and the environment; the only reader of the environment.

Knows nothing about what they are used for.
"""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pilotfish_operator import __version__
from pilotfish_operator.schema import seconds

SERVICE_ACCOUNT_DIR = "/var/run/secrets/kubernetes.io/serviceaccount"


@dataclass(frozen=True)
class ClusterAccess:
    """How to reach the API server: the pod's own service account when `server` is set, else a kubeconfig file."""

    server: str | None  # https://host:port
    folder: str  # with token, ca.crt and namespace
    kubeconfig: str | None


@dataclass(frozen=True)
class Election:
    """Whether this operator acts only while it holds a Lease, and which: of all that name it, one acts."""

    identity: str
    namespace: str
    lease_name: str = "pilotfish-operator"
    needed: bool = True


@dataclass(frozen=True)
class Config:
    """Intervals in seconds. `namespaces` empty: all of them."""

    access: ClusterAccess
    election: Election
    engine_image: str = f"pilotfish-engine:{__version__}"
    namespaces: tuple[str, ...] = ()
    port: int = 8080
    host: str = "0.0.0.0"
    resync_seconds: float = 3.0
    workers: int = 8
    patience_seconds: float = 60.0
    again_seconds: float = 300.0
    rollout_seconds: float = 300.0
    log_level: str = "INFO"
    record: Path | None = None


def cluster_access(environ: Mapping[str, str]) -> ClusterAccess:
    """In-cluster credentials when Kubernetes announced itself in the environment, else the kubeconfig."""
    folder = environ.get("KUBERNETES_SERVICEACCOUNT_DIR", SERVICE_ACCOUNT_DIR)
    host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT", "443")
    inside = host is not None and Path(folder, "token").is_file()
    bracketed = f"[{host}]" if host and ":" in host else host
    return ClusterAccess(f"https://{bracketed}:{port}" if inside else None, folder, environ.get("KUBECONFIG"))


def current_access() -> ClusterAccess:
    return cluster_access(os.environ)


def resolve(argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> Config:
    """The configuration of one run; argparse exits with code 2 on a bad flag."""
    environ = os.environ if environ is None else environ
    access = cluster_access(environ)
    parser = argparse.ArgumentParser("pilotfish-operator", description="Serves SpeculativeModels.")
    scope = parser.add_mutually_exclusive_group()
    scope.add_argument("--namespace", action="append", default=[], help="serve this namespace; may be repeated")
    scope.add_argument("--all-namespaces", action="store_true", help="serve every namespace (default)")
    parser.add_argument("--port", type=int, default=8080, help="port of /healthz and /metrics")
    parser.add_argument("--host", default=environ.get("POD_IP", "0.0.0.0"), help="address of /healthz and /metrics")
    parser.add_argument(
        "--leader-elect", action=argparse.BooleanOptionalAction, default=True, help="act only while holding the Lease"
    )
    parser.add_argument("--lease-name", default="pilotfish-operator", help="name of that Lease")
    parser.add_argument(
        "--resync",
        type=seconds,
        default=3.0,
        metavar="DURATION",
        help="how often each model's engines are read (default 3s)",
    )
    parser.add_argument(
        "--patience",
        type=seconds,
        default=60.0,
        metavar="DURATION",
        help="how long nothing may succeed until /healthz says so, and how long after that it ends (default 60s)",
    )
    for name, text in (
        ("--retry-refused", "how long until a model that the engine refused is tried again; doubles each time"),
        ("--rollout-patience", "how long a new pod may be in trouble until a rollout goes back to what served"),
    ):
        parser.add_argument(name, type=seconds, default=300.0, metavar="DURATION", help=f"{text} (default 5m)")
    parser.add_argument("--workers", type=int, default=8, help="models reconciled at once")
    parser.add_argument("--record", type=Path, metavar="FOLDER", help="keep every decision there, 1 MiB a model")
    parser.add_argument("--log-level", default="INFO", choices=("DEBUG", "INFO", "WARNING", "ERROR"))
    flags = parser.parse_args(argv)
    return Config(
        access=access,
        election=Election(
            identity=f"{environ.get('POD_NAME') or socket.gethostname()}-{os.getpid()}",
            namespace=environ.get("POD_NAMESPACE") or _namespace_file(access) or "default",
            lease_name=flags.lease_name,
            needed=flags.leader_elect,
        ),
        engine_image=environ.get("PILOTFISH_ENGINE_IMAGE") or Config.engine_image,
        namespaces=tuple(flags.namespace),
        port=flags.port,
        host=flags.host,
        resync_seconds=flags.resync,
        workers=flags.workers,
        patience_seconds=flags.patience,
        again_seconds=flags.retry_refused,
        rollout_seconds=flags.rollout_patience,
        log_level=flags.log_level,
        record=flags.record,
    )


def _namespace_file(access: ClusterAccess) -> str | None:
    path = Path(access.folder, "namespace")
    return path.read_text(encoding="utf-8").strip() if access.server and path.is_file() else None
