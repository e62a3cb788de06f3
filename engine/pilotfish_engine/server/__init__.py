"""The HTTP process: OpenAI's API in front of the model process, and the life of both.

Reading order: process (starts and ends everything) → app → api (routes) → bodies (with conversation and structure) →
service → generation → link (to the model process) → shapes (with logprobs and
tool_calls: how an answer is told). responses is a second way to say and tell a chat.
Imports no torch. Text becomes tokens here, and tokens text.
"""
