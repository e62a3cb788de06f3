"""`pytest -p tests.gpu.eager`: steps run as they are on a GPU too, instead of as CUDA graphs."""

from __future__ import annotations

from pilotfish_engine.speculation.step import Step
from pilotfish_engine.worker import graphs
from pilotfish_engine.worker.recording import Recorder


def never(step: Step) -> Recorder | None:
    return None


# before the modules that take it from there are read
graphs.recorder = never
