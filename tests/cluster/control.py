"""The control plane: which programs, with which flags, and the credentials between them.

Everything listens on the world's own loopback address or on sockets in its state folder, so that several worlds run
side by side. Pure but for writing credentials: starting and ending is the cluster's.
"""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path

SERVICES = "10.96.0.0/16"
ADMIN = "admin"
IDLE_CONTROLLERS = (  # left off, since here they could only fail over and over, in the log and in events
    "endpoints-controller",  # loopback addresses are refused in endpoints
    "endpointslice-controller",
    "endpointslice-mirroring-controller",
    "kube-apiserver-serving-clustertrustbundle-publisher-controller",  # the serving certificate is no CA
)
IDENTITIES = {  # the user name and groups behind each kubeconfig
    ADMIN: (ADMIN, "system:masters"),
    "kube-controller-manager": ("system:kube-controller-manager", ""),
    "kube-scheduler": ("system:kube-scheduler", ""),
}


def write_credentials(state: Path, server: str, nodes: list[str]) -> None:
    """One token file for the API server and one kubeconfig an identity, readable by the owner alone."""
    pki = state / "pki"
    pki.mkdir(mode=0o700)
    (state / "kubeconfigs").mkdir(mode=0o700)
    identities = IDENTITIES | {node: (f"system:node:{node}", "system:nodes") for node in nodes}
    rows = []
    for name, (user, group) in identities.items():
        token = secrets.token_hex(16)
        rows.append(f'{token},{user},{user},"{group}"')
        write_private(kubeconfig(state, name), _kubeconfig(server, pki / "apiserver.crt", token))
    write_private(pki / "tokens.csv", "\n".join(rows) + "\n")


def kubeconfig(state: Path, name: str) -> Path:
    return state / "kubeconfigs" / f"{name}.yaml"


def write_private(path: Path, text: str) -> None:
    """Atomic, and never readable by others."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)
    partial.rename(path)


def _kubeconfig(server: str, authority: Path, token: str) -> str:
    name = "pilotfish-sandbox"
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": name, "cluster": {"server": server, "certificate-authority": str(authority)}}],
        "users": [{"name": name, "user": {"token": token}}],
        "contexts": [{"name": name, "context": {"cluster": name, "user": name}}],
        "current-context": name,
    }
    return json.dumps(config, indent=1)  # JSON is YAML


def etcd(binaries: Path) -> list[str]:
    # Sockets in the working folder instead of ports: etcd has no authentication here, the folder's mode is it.
    client, peer = "unix://etcd:1", "unix://etcd:2"
    return [
        str(binaries / "etcd"), "--name=sandbox", "--data-dir=etcd", "--unsafe-no-fsync", "--log-level=warn",
        f"--listen-client-urls={client}", f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}", f"--initial-cluster=sandbox={peer}",
    ]  # fmt: skip


def api_server(binaries: Path, address: str, port: int) -> list[str]:
    # The server makes its serving certificate itself before it reads the service-account key: one key serves both.
    key = "pki/apiserver.key"
    return [
        str(binaries / "kube-apiserver"), "--etcd-servers=unix://etcd:1", "--cert-dir=pki",
        f"--bind-address={address}", f"--advertise-address={address}", f"--secure-port={port}",
        "--endpoint-reconciler-type=none",  # it refuses to publish a loopback address
        "--token-auth-file=pki/tokens.csv", "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction", "--allow-privileged=true",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={key}", f"--service-account-signing-key-file={key}",
        f"--service-cluster-ip-range={SERVICES}", "--kubelet-preferred-address-types=InternalIP",
        "--shutdown-delay-duration=0s", "--v=1",
    ]  # fmt: skip


def controller_manager(binaries: Path, state: Path) -> list[str]:
    return [
        str(binaries / "kube-controller-manager"), f"--kubeconfig={kubeconfig(state, 'kube-controller-manager')}",
        "--secure-port=0", "--leader-elect=false", "--use-service-account-credentials",
        "--root-ca-file=pki/apiserver.crt", "--service-account-private-key-file=pki/apiserver.key",
        f"--controllers=*,{','.join(f'-{name}' for name in IDLE_CONTROLLERS)}",
        "--kube-api-qps=200", "--kube-api-burst=400",  # at 20/s each of 40 controllers waits its turn: 3 s more
        "--v=1",
    ]  # fmt: skip


def scheduler(binaries: Path, state: Path) -> list[str]:
    return [
        str(binaries / "kube-scheduler"), f"--kubeconfig={kubeconfig(state, 'kube-scheduler')}",
        "--secure-port=0", "--leader-elect=false", "--v=1",
    ]  # fmt: skip
