"""Holds the running requests: rows, the state of each, and the passes over its known tokens. Knows no method."""
