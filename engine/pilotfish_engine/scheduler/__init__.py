"""Scheduler: admit → plan → run → commit. Knows requests, pages and stop conditions; sees the model only as a Worker.

Imports no torch, and knows of drafts only that a step commits between 1 and num_draft_tokens tokens a request.
"""
