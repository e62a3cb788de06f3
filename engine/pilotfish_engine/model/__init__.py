"""Decoders and how they come from files. Knows nothing about requests, sampling or speculation."""

from pilotfish_engine.model.decoder import Decoder
from pilotfish_engine.model.loading import load, read_shape
from pilotfish_engine.model.shape import ModelShape, RopeShape

__all__ = ["Decoder", "ModelShape", "RopeShape", "load", "read_shape"]
