"""A key that is rotated in its file counts at once; a file that cannot be read changes nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from starlette.datastructures import Headers

from pilotfish_engine.errors import NotYetError
from pilotfish_engine.server.middleware import same_bearer
from pilotfish_engine.server.secret import SecretFile


def bearer(token: str) -> Headers:
    return Headers({"Authorization": f"Bearer {token}"})


def test_the_old_key_ends_when_the_file_changes_as_kubernetes_changes_it(tmp_path: Path) -> None:
    for version in ("1", "2"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "key").write_text(f"key-{version}\n")
    (tmp_path / "..data").symlink_to("1")
    (tmp_path / "key").symlink_to("..data/key")
    secret = SecretFile.read("--api-key-file", str(tmp_path / "key"))
    assert same_bearer(bearer("key-1"), secret)
    (tmp_path / "next").symlink_to("2")
    os.replace(tmp_path / "next", tmp_path / "..data")
    assert same_bearer(bearer("key-2"), secret)
    assert not same_bearer(bearer("key-1"), secret)


@pytest.mark.parametrize("spoil", ["", "\n", None])
def test_a_file_that_is_empty_or_gone_keeps_the_last_key(tmp_path: Path, spoil: str | None) -> None:
    file = tmp_path / "key"
    file.write_text("right")
    secret = SecretFile.read("--api-key-file", str(file))
    file.unlink()
    if spoil is not None:
        file.write_text(spoil)
    assert same_bearer(bearer("right"), secret)
    assert not same_bearer(bearer(""), secret)
    file.write_text("another one")
    assert same_bearer(bearer("another one"), secret)


def test_without_a_key_at_the_start_it_may_come() -> None:
    with pytest.raises(NotYetError, match="--api-key-file '/nowhere' cannot be read"):
        SecretFile.read("--api-key-file", "/nowhere")
