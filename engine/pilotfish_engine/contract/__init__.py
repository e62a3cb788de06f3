"""What the engine and the operator agree on. It is all that the operator may import of the engine.

Knows nothing about tensors, Kubernetes, HTTP or time: plain data and pure functions of it. Imports neither torch nor
numpy.
"""
