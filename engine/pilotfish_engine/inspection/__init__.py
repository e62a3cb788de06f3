"""`pilotfish-engine inspect`: what a checkpoint is, whether it is whole, which methods it goes with, and the memory it
takes. Reads metadata and tensor shapes, no weights.

verdicts (what the methods say) → description (all that is known, as a value) → text.
"""

from __future__ import annotations

from pilotfish_engine.inspection.description import Description, describe
from pilotfish_engine.inspection.text import json_of, text_of

__all__ = ["Description", "describe", "json_of", "text_of"]
