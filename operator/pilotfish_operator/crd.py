"""The CustomResourceDefinition, generated from the models of `api.py`: `python -m pilotfish_operator.crd FOLDER`.

Turns pydantic's JSON schema into the structural form that API servers demand: no references, no null, no titles, and
only those defaults that are marked as stored. Knows nothing about what the fields mean.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from pilotfish_operator.api import Spec
from pilotfish_operator.kinds import GROUP, MODELS, VERSION
from pilotfish_operator.reported import Status
from pilotfish_operator.schema import STORED, rule

Schema = dict[str, Any]
FILE = f"{GROUP}_{MODELS.plural}.yaml"

_CONDITION = '.status.conditions[?(@.type=="{}")].status'
_COLUMNS = (
    ("Ready", "string", _CONDITION.format("Ready"), 0, "Whether pods of the current generation serve."),
    ("Replicas", "integer", ".status.readyReplicas", 0, "Pods that serve."),
    ("Method", "string", ".status.speculation.method", 0, "The method that the engines run."),
    ("Speculating", "string", _CONDITION.format("SpeculationActive"), 0, "Whether the engines speculate now."),
    ("Accept", "number", ".status.speculation.acceptLength", 0, "Tokens that a speculative step commits."),
    ("Speedup", "number", ".status.speculation.speedup", 0, "Tokens/s over plain decoding's at this load."),
    ("Age", "date", ".metadata.creationTimestamp", 0, "Since creation."),
    ("Threshold", "string", ".status.speculation.desired.disableThreshold", 1, "From how many requests plain."),
    ("Concurrency", "number", ".status.load.concurrency", 1, "Running plus waiting requests."),
    ("Reason", "string", ".status.speculation.reason", 1, "Why these settings."),
)


def structural(model: type[BaseModel]) -> Schema:
    """The model's schema as Kubernetes wants it, each field described."""
    schema = model.model_json_schema(by_alias=True)
    definitions = schema.pop("$defs", {})
    result = _inline(schema, definitions)
    assert isinstance(result, dict)
    return result


def _inline(node: Any, definitions: Schema) -> Any:
    if isinstance(node, list):
        return [_inline(item, definitions) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        target = definitions[node["$ref"].rsplit("/", 1)[1]]
        return _inline(target | {key: value for key, value in node.items() if key != "$ref"}, definitions)
    options = [option for option in node.get("anyOf", ()) if option.get("type") != "null"]
    if "anyOf" in node and len(options) == 1:
        outer = {key: value for key, value in node.items() if key not in ("anyOf", "default", "title")}
        return _inline(options[0] | outer, definitions)
    kept: Schema = {}
    for key, value in node.items():
        if key in ("title", "default"):
            continue
        if key == STORED:
            kept["default"] = value
            continue
        if key == "properties":
            kept[key] = {name: _inline(field, definitions) for name, field in value.items()}
        elif key == "const":
            kept["enum"] = [value]
        elif key == "exclusiveMinimum":
            kept |= {"minimum": value, "exclusiveMinimum": True}
        elif key == "additionalProperties" and isinstance(value, bool):
            continue
        else:
            kept[key] = _inline(value, definitions)
    return kept


def definition() -> Schema:
    """The whole CustomResourceDefinition."""
    name = rule(
        "self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$') && size(self.metadata.name) <= 52",
        "choose a name of at most 52 lower-case letters, digits and dashes that begins with a letter: "
        "the model's Service and Deployment are named after it",
    )
    schema = {
        "type": "object",
        "description": "A model served with speculative decoding that pays for itself at every load.",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": structural(Spec),
            "status": structural(Status),
        },
        "x-kubernetes-validations": [name],
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{MODELS.plural}.{GROUP}", "annotations": {"helm.sh/resource-policy": "keep"}},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": MODELS.name,
                "listKind": f"{MODELS.name}List",
                "plural": MODELS.plural,
                "singular": MODELS.name.lower(),
                "shortNames": ["spm", "specmodel"],
                "categories": ["all"],
            },
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": schema},
                    "subresources": {
                        "status": {},
                        "scale": {
                            "specReplicasPath": ".spec.replicas",
                            "statusReplicasPath": ".status.replicas",
                            "labelSelectorPath": ".status.selector",
                        },
                    },
                    "additionalPrinterColumns": [
                        {"name": title, "type": kind, "jsonPath": path, "priority": priority, "description": text}
                        for title, kind, path, priority, text in _COLUMNS
                    ],
                }
            ],
        },
    }


class _Plain(yaml.SafeDumper):
    """Lists indented, no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def text() -> str:
    """The definition as it lies in crds/."""
    body = yaml.dump(definition(), Dumper=_Plain, sort_keys=False, allow_unicode=True, width=120)
    return f"# Generated from operator/pilotfish_operator/api.py: python -m pilotfish_operator.crd crds\n{body}"


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FILE).write_text(text(), encoding="utf-8")


if __name__ == "__main__":
    main()
