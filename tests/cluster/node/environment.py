"""What a container's program is told: command, arguments, environment, and where its files are.

Pure. A process has no root of its own, so the absolute paths of a pod's volumes are replaced, in the command, the
arguments and the values of variables, by the folders that hold them; likewise the wildcard address by the pod's own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any

Object = dict[str, Any]
ACCOUNT_PATH = "/var/run/secrets/kubernetes.io/serviceaccount"
TERMINATION_PATH = "/dev/termination-log"
SUFFIXES = {"n": -9, "u": -6, "m": -3, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
BINARY = {"Ki": 1, "Mi": 2, "Gi": 3, "Ti": 4, "Pi": 5, "Ei": 6}


class MissingReference(Exception):
    """A variable or a volume needs something that is not there (yet); the text is what the status shows."""


def expand(text: str, variables: Mapping[str, str]) -> str:
    """``$(NAME)`` becomes the variable, ``$$`` a dollar sign; a name that is not known stays as it is."""

    def replace(match: re.Match[str]) -> str:
        return "$" if match[0] == "$$" else variables.get(match[1], match[0])

    return re.sub(r"\$\$|\$\(([^()]*)\)", replace, text)


def rewriter(paths: Mapping[str, str], address: str) -> Callable[[str], str]:
    """Replaces every path that is one of ``paths`` or below one, and ``0.0.0.0`` by ``address``."""
    longest_first = sorted((path.rstrip("/") for path in paths), key=len, reverse=True)
    alternatives = "|".join(re.escape(path) for path in longest_first if path)
    folders = {path.rstrip("/"): folder for path, folder in paths.items()}
    wildcard = re.compile(r"(?<![\d.])0\.0\.0\.0(?![\d.])")
    # Not inside another path: before it stands nothing, punctuation, or a scheme; after it nothing, / or punctuation.
    mounted = re.compile(rf"(?:(?<=://)|(?<![\w./~-]))({alternatives})(?![\w.-])") if alternatives else None

    def rewrite(text: str) -> str:
        text = wildcard.sub(address, text)
        return mounted.sub(lambda match: folders[match[1]], text) if mounted else text

    return rewrite


def quantity(text: str | int | float) -> Decimal:
    """The number behind ``500m``, ``2Gi``, ``1e3``."""
    match = re.fullmatch(r"([+-]?[0-9.]+(?:[eE][+-]?[0-9]+)?)([A-Za-z]*)", str(text))
    if not match:
        raise ValueError(f"{text!r} is not a quantity such as 500m or 2Gi")
    number = Decimal(match[1])
    suffix = match[2]
    if suffix in BINARY:
        return number * Decimal(1024) ** BINARY[suffix]
    return number.scaleb(SUFFIXES[suffix]) if suffix else number


def resource_field(container: Object, reference: Object, allocatable: Mapping[str, str]) -> str:
    """``limits.cpu`` and its like, in units of the divisor, rounded up; without a limit the node's whole."""
    kind, _, name = reference["resource"].partition(".")
    resources = container.get("resources", {})
    value = resources.get(kind, {}).get(name)
    if value is None and kind == "limits":
        value = allocatable.get(name)
    divisor = quantity(reference.get("divisor") or "1") or Decimal(1)
    return str(math.ceil(quantity(value or "0") / divisor))


def pod_field(pod: Object, path: str, address: str, host: str) -> str:
    """The value of a downward API field; its labels or annotations as lines when no key is named."""
    if match := re.fullmatch(r"metadata\.(labels|annotations)(?:\['(.*)'\])?", path):
        table: Mapping[str, str] = pod["metadata"].get(match[1], {})
        if match[2] is not None:
            return table.get(match[2], "")
        return "\n".join(f'{key}="{_escape(value)}"' for key, value in sorted(table.items()))
    fields = {
        "metadata.name": pod["metadata"]["name"],
        "metadata.namespace": pod["metadata"]["namespace"],
        "metadata.uid": pod["metadata"]["uid"],
        "spec.nodeName": pod["spec"]["nodeName"],
        "spec.serviceAccountName": pod["spec"].get("serviceAccountName", "default"),
        "status.hostIP": host,
        "status.hostIPs": host,
        "status.podIP": address,
        "status.podIPs": address,
    }
    if path not in fields:
        raise MissingReference(f"field {path} is not known; there are {', '.join(fields)}")
    return str(fields[path])


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def referenced(container: Object) -> set[tuple[str, str]]:
    """(``configmaps`` or ``secrets``, name) of all that the container's variables may come from."""
    found = set()
    for source in container.get("envFrom", []):
        for key, kind in (("configMapRef", "configmaps"), ("secretRef", "secrets")):
            if key in source:
                found.add((kind, source[key]["name"]))
    for variable in container.get("env", []):
        for key, kind in (("configMapKeyRef", "configmaps"), ("secretKeyRef", "secrets")):
            if key in variable.get("valueFrom", {}):
                found.add((kind, variable["valueFrom"][key]["name"]))
    return found


Tables = Mapping[tuple[str, str], Mapping[str, str] | None]  # (kind, name) → its data; None when there is none


def variables(
    container: Object, tables: Tables, field: Callable[[str], str], resource: Callable[[Object], str]
) -> dict[str, str]:
    """The container's own variables, envFrom first, then env in order. Raises MissingReference."""
    result: dict[str, str] = {}
    for source in container.get("envFrom", []):
        kind, reference = _reference(source, "configMapRef", "secretRef")
        table = tables[kind, reference["name"]]
        if table is None and not reference.get("optional"):
            raise MissingReference(f'{_singular(kind)} "{reference["name"]}" not found')
        result |= {source.get("prefix", "") + key: value for key, value in (table or {}).items()}
    for variable in container.get("env", []):
        origin = variable.get("valueFrom")
        if not origin:
            result[variable["name"]] = expand(variable.get("value", ""), result)
        elif "fieldRef" in origin:
            result[variable["name"]] = field(origin["fieldRef"]["fieldPath"])
        elif "resourceFieldRef" in origin:
            result[variable["name"]] = resource(origin["resourceFieldRef"])
        else:
            kind, reference = _reference(origin, "configMapKeyRef", "secretKeyRef")
            table = tables[kind, reference["name"]]
            value = (table or {}).get(reference["key"])
            if value is not None:
                result[variable["name"]] = value
            elif not reference.get("optional"):
                missing = "not found" if table is None else f"has no key {reference['key']}"
                raise MissingReference(f'{_singular(kind)} "{reference["name"]}" {missing}')
    return result


def _reference(source: Object, config_map: str, secret: str) -> tuple[str, Object]:
    return ("configmaps", source[config_map]) if config_map in source else ("secrets", source[secret])


def _singular(kind: str) -> str:
    return {"configmaps": "configmap", "secrets": "secret"}[kind]


def image_name(image: str) -> str:
    """``registry:5000/team/name:tag@digest`` → ``name``."""
    return image.partition("@")[0].rpartition("/")[2].partition(":")[0]


def command_line(container: Object, known: Mapping[str, str], rewrite: Callable[[str], str]) -> Sequence[str]:
    """Without a command, the program that is called like the image."""
    command = container.get("command") or [image_name(container["image"])]
    return [rewrite(expand(text, known)) for text in [*command, *container.get("args", [])]]
