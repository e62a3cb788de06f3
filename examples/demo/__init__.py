"""`make demo`: install the chart, serve a small model, ask it, load it until it scales, take everything down.

Uses what a person would use: helm, kubectl and the OpenAI client. Imports nothing of the operator or the engine.
"""
