"""The HTTP process: OpenAI's API in front of the model process, and the life of both.

Reading order: process (starts and ends everything) → app (routes) → bodies → generation → link (to the model process).
Imports no torch. Text becomes tokens here, and tokens text.
"""
