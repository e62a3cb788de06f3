"""A Kubernetes on one machine, for the demo and the tests.

Builds a pinned control plane, runs it on loopback without root, and can run pods as local processes.
Knows nothing about Pilotfish: an image name is mapped to a Python environment by the caller.
"""
