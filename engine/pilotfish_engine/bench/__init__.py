"""`pilotfish-engine bench`: load on any server of OpenAI's API, and what came back, in figures.

plan (flags) → prompts → load (arrivals) over client (one request) and acceptance (what the server tells) → result
(figures, their file) → table and picture. `run` puts them in this order. Torch-free; knows no engine but by its routes.
"""
