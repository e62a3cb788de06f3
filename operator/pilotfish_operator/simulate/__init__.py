"""Simulates engines and a cluster as discrete events. Controller and `decide` are those that run in earnest.

Pure but for `command` and `picture`: time is simulated, dice are seeded, and the same seed gives the same figures. A
step takes what a measured profile says; tokens are accepted by dice. Knows nothing of Kubernetes, HTTP or tensors.
"""
