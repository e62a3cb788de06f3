"""EAGLE-3: a head of one decoder layer that reads several of the target's layers, and then its own output."""

from __future__ import annotations

from pilotfish_engine.contract.methods import Limits
from pilotfish_engine.speculation import eagle
from pilotfish_engine.speculation.eagle import build as build
from pilotfish_engine.speculation.proposer import Models


def recognises(models: Models) -> bool:
    return eagle.is_head(models, "EAGLE3")


def check(models: Models) -> Limits:
    return eagle.check_head(models, "EAGLE3")
