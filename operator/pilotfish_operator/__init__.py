"""The operator: a SpeculativeModel in, Kubernetes objects, engine settings and an honest status out.

Imports nothing of the engine but `pilotfish_engine.contract`.
"""

__version__ = "0.1.0"
