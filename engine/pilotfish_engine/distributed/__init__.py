"""Holds what several processes do together: collectives, and the child processes of a group. Knows no model."""
