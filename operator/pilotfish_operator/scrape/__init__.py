"""Reads engines and puts settings to them, apart from reconciling.

One task a model goes round its pods: no pod that hangs, floods or lies costs another model, or another pod, more than
one limit of time. `client` speaks HTTP, `trust` judges reports (pure), `rounds` goes round. Decides nothing.
"""
