"""`python -m benchmarks.acceptance`: what drafts are worth on MT-bench, HumanEval and GSM8K prompts, by section.

asked (prompts) → engines (a method each) → counting (steps, watched from outside) → methods, nodes, split, calibration
and speed (a section each: rows, printed as they come) → pictures. All but `speed` count and take no time, so that their
figures are the same on a busy machine. Nothing in the engine knows that it is watched.
"""
