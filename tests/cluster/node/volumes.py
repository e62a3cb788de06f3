"""A pod's volumes as folders below its own: written before the start, kept up to date while it runs."""

from __future__ import annotations

import base64
import contextlib
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from tests.cluster.node.environment import MissingReference

Object = dict[str, Any]
FetchData = Callable[[str, str], Awaitable[Mapping[str, bytes] | None]]  # (configmaps | secrets, name) → its keys
FetchToken = Callable[[str | None, int], Awaitable[tuple[str, datetime]]]  # (audience, seconds) → token, its end
Field = Callable[[str], str]  # downward API path → value
Resource = Callable[[Object], str]  # resourceFieldRef → value


class Sources(NamedTuple):
    """Where the contents of volumes come from."""

    data: FetchData
    token: FetchToken
    field: Field
    resource: Resource


class Volumes:
    """The volumes of one pod. ``write`` may be called again at any time: unchanged files are not touched."""

    def __init__(self, pod: Object, folder: Path, sources: Sources) -> None:
        self._volumes: list[Object] = pod["spec"].get("volumes", [])
        self._folder, self._sources = folder, sources
        self._tokens: dict[tuple[str, str], tuple[str, float]] = {}  # (volume, path) → token, when to renew it

    def location(self, name: str) -> Path:
        """The folder of a volume; for a hostPath the path itself."""
        for volume in self._volumes:
            if volume["name"] == name and "hostPath" in volume:
                return Path(volume["hostPath"]["path"])
        return self._folder / name

    async def write(self) -> None:
        """Raises MissingReference when something that is needed is not there."""
        for volume in self._volumes:
            if "hostPath" in volume:
                continue
            folder = self._folder / volume["name"]
            folder.mkdir(parents=True, exist_ok=True)
            if "emptyDir" not in volume:
                _write(folder, await self._contents(volume))

    async def _contents(self, volume: Object) -> dict[str, tuple[bytes, int]]:
        """Path below the volume → (bytes, mode)."""
        for kind in ("configMap", "secret", "downwardAPI", "projected"):
            if kind in volume:
                source = volume[kind]
                mode = source.get("defaultMode", 0o644)
                if kind != "projected":
                    return await self._source(volume["name"], kind, source, mode)
                contents: dict[str, tuple[bytes, int]] = {}
                for part in source.get("sources", []):
                    ((part_kind, part_source),) = part.items()
                    contents |= await self._source(volume["name"], part_kind, part_source, mode)
                return contents
        kind = ", ".join(key for key in volume if key != "name")
        raise MissingReference(
            f"volume {volume['name']!r} is of kind {kind}, which the sandbox does not have; "
            "it has configMap, secret, projected, downwardAPI, emptyDir and hostPath"
        )

    async def _source(self, volume: str, kind: str, source: Object, mode: int) -> dict[str, tuple[bytes, int]]:
        if kind == "downwardAPI":
            return {item["path"]: (self._item(item).encode(), item.get("mode", mode)) for item in source["items"]}
        if kind == "serviceAccountToken":
            token = await self._token(volume, source)
            return {source["path"]: (token.encode(), mode)}
        plural = {"configMap": "configmaps", "secret": "secrets"}.get(kind)
        if plural is None:
            raise MissingReference(f"volume {volume!r} has a source of kind {kind}, which the sandbox does not have")
        name = source.get("name") or source["secretName"]
        data = await self._sources.data(plural, name)
        if data is None:
            if source.get("optional"):
                return {}
            raise MissingReference(f'{plural[:-1]} "{name}" not found')
        if "items" not in source:
            return {key: (value, mode) for key, value in data.items()}
        contents = {}
        for item in source["items"]:
            if item["key"] in data:
                contents[item["path"]] = (data[item["key"]], item.get("mode", mode))
            elif not source.get("optional"):
                raise MissingReference(f'{plural[:-1]} "{name}" has no key {item["key"]}')
        return contents

    def _item(self, item: Object) -> str:
        if "fieldRef" in item:
            return self._sources.field(item["fieldRef"]["fieldPath"])
        return self._sources.resource(item["resourceFieldRef"])

    async def _token(self, volume: str, source: Object) -> str:
        key = (volume, source["path"])
        token, renew = self._tokens.get(key, ("", 0.0))
        if time.time() >= renew:
            token, end = await self._sources.token(source.get("audience"), source.get("expirationSeconds", 3600))
            self._tokens[key] = token, time.time() + 0.8 * (end.timestamp() - time.time())
        return token


def decoded(kind: str, found: Object) -> dict[str, bytes]:
    """The keys of a ConfigMap or Secret as bytes."""
    if kind == "secrets":
        return {key: base64.b64decode(value) for key, value in (found.get("data") or {}).items()}
    plain = {key: value.encode() for key, value in (found.get("data") or {}).items()}
    return plain | {key: base64.b64decode(value) for key, value in (found.get("binaryData") or {}).items()}


def _write(folder: Path, contents: Mapping[str, tuple[bytes, int]]) -> None:
    for name, (data, mode) in contents.items():
        path = folder / name
        with contextlib.suppress(FileNotFoundError):
            if path.read_bytes() == data:
                continue
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"..{path.name}")
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(data)
        partial.chmod(mode & 0o700 or 0o400)  # the owner is the only user: the state folder is closed to others
        partial.rename(path)
    for path in list(folder.rglob("*")):
        if path.is_file() and str(path.relative_to(folder)) not in contents:
            path.unlink()
