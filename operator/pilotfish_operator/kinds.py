"""Lists the API kinds that the operator touches, where they live, and its rights.

Pure data: knows nothing about clients. The chart's roles are checked against `permissions()`.
"""

from __future__ import annotations

from dataclasses import dataclass

GROUP = "pilotfish.dev"
VERSION = "v1alpha1"
MANAGER = "pilotfish-operator"  # the one field manager of every server-side apply
MANAGED_BY = "app.kubernetes.io/managed-by"
MODEL_LABEL = "pilotfish.dev/model"
TEMPLATE_LABEL = "pilotfish.dev/template"
CHILD_SELECTOR = f"{MANAGED_BY}=pilotfish"

READ = ("get", "list", "watch")
WRITE = ("create", "patch")


@dataclass(frozen=True)
class Kind:
    """`verbs`: what the operator does with objects of this kind, and nothing more."""

    group: str
    version: str
    plural: str
    name: str
    verbs: tuple[str, ...]

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str | None, name: str = "", subresource: str = "") -> str:
        """URL path of one object, or of the collection when `name` is empty; None: every namespace."""
        root = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        parts = [root, *(("namespaces", namespace) if namespace else ()), self.plural]
        return "/".join([*parts, *([name] if name else []), *([subresource] if subresource else [])])


MODELS = Kind(GROUP, VERSION, "speculativemodels", "SpeculativeModel", READ)
DEPLOYMENTS = Kind("apps", "v1", "deployments", "Deployment", READ + WRITE)
PODS = Kind("", "v1", "pods", "Pod", READ)
SERVICES = Kind("", "v1", "services", "Service", READ + WRITE)
SECRETS = Kind("", "v1", "secrets", "Secret", READ + WRITE)
CONFIG_MAPS = Kind("", "v1", "configmaps", "ConfigMap", (*READ, *WRITE, "delete"))
SERVICE_ACCOUNTS = Kind("", "v1", "serviceaccounts", "ServiceAccount", READ + WRITE)
DISRUPTION_BUDGETS = Kind("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget", READ + WRITE)
CLAIMS = Kind("", "v1", "persistentvolumeclaims", "PersistentVolumeClaim", READ + WRITE)
EVENTS = Kind("", "v1", "events", "Event", ("create",))
LEASES = Kind("coordination.k8s.io", "v1", "leases", "Lease", ("get", "create", "update"))

CHILDREN = (DEPLOYMENTS, PODS, SERVICES, SECRETS, CONFIG_MAPS, SERVICE_ACCOUNTS, DISRUPTION_BUDGETS, CLAIMS)
TENDED = (DEPLOYMENTS, SERVICES, CONFIG_MAPS, DISRUPTION_BUDGETS)  # nobody else adds fields to these
WATCHED = (MODELS, *CHILDREN)
BY_NAME = {kind.name: kind for kind in (*WATCHED, EVENTS, LEASES)}


def permissions() -> list[dict[str, list[str]]]:
    """RBAC rules for the namespaces served; leases are needed in the operator's own namespace only.

    `speculativemodels/finalizers` update lets owner references block deletion where the cluster enforces that.
    """
    rules = [(kind.group, kind.plural, kind.verbs) for kind in (*WATCHED, EVENTS)]
    rules += [(GROUP, "speculativemodels/status", ("patch",)), (GROUP, "speculativemodels/finalizers", ("update",))]
    return [{"apiGroups": [group], "resources": [plural], "verbs": list(verbs)} for group, plural, verbs in rules]


def lease_permissions() -> list[dict[str, list[str]]]:
    """RBAC rules for the operator's own namespace."""
    return [{"apiGroups": [LEASES.group], "resources": [LEASES.plural], "verbs": list(LEASES.verbs)}]
