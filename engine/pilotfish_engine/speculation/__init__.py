"""Speculation: draft → verify → commit, and one file per method that drafts.

`step` reads as the paper; `tree` and `verify` are pure tensor code; `registry` knows the methods by name; `controller`
decides what a step runs with. Knows nothing about queues, HTTP or stop conditions.
"""
