"""The cache: newer wins, lists complete what watches missed, a dead watch is found."""

from __future__ import annotations

from typing import Any

from pilotfish_operator.cache import PATIENCE, Cache
from pilotfish_operator.kinds import MODEL_LABEL, MODELS, PODS


def pod(name: str, version: int, model: str = "fish") -> dict[str, Any]:
    meta = {"namespace": "ns", "name": name, "resourceVersion": str(version), "labels": {MODEL_LABEL: model},
            "managedFields": [{}]}  # fmt: skip
    return {"metadata": meta}


def test_newer_versions_win_wherever_they_come_from() -> None:
    cache = Cache()
    assert cache.put(PODS, pod("a", 5))
    assert not cache.put(PODS, pod("a", 5))
    assert cache.watched(PODS, pod("a", 4), deleted=False) == ("ns", "fish")
    assert cache.family(("ns", "fish"))[PODS, "a"]["metadata"]["resourceVersion"] == "5"
    assert "managedFields" not in cache.family(("ns", "fish"))[PODS, "a"]["metadata"]


def test_a_list_removes_what_is_gone_but_not_what_is_newer_than_it() -> None:
    cache = Cache()
    cache.put(PODS, pod("old", 5))
    cache.put(PODS, pod("new", 20))
    assert cache.listed(PODS, "ns", [], "10", 0.0) == {("ns", "fish")}
    assert set(cache.family(("ns", "fish"))) == {(PODS, "new")}
    assert cache.listed(PODS, "other", [], "30", 0.0) == set()
    assert set(cache.family(("ns", "fish"))) == {(PODS, "new")}


def test_a_watch_that_does_not_deliver_what_a_list_showed_is_stale() -> None:
    cache = Cache()
    cache.listed(PODS, None, [pod("a", 5), pod("b", 6)], "7", 0.0)
    assert cache.stale_watches(PATIENCE) == set()
    cache.watched(PODS, pod("a", 5), deleted=False)
    assert cache.stale_watches(PATIENCE + 1) == {"pods"}
    cache.watched(PODS, pod("b", 6), deleted=True)
    assert cache.stale_watches(PATIENCE + 1) == set()


def test_nothing_is_left_of_a_family_that_is_gone() -> None:
    cache = Cache()
    cache.put(PODS, pod("a", 1))
    cache.remove(PODS, ("ns", "a"))
    cache.remove(PODS, ("ns", "a"))
    assert cache.family(("ns", "fish")) == {}
    assert cache.models() == []
    assert cache.get(MODELS, ("ns", "fish")) is None
