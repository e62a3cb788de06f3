"""`python -m examples.prompts`: the prompts that the head in examples/drafts is trained on, made anew by seed.

Of three kinds, all with known terms: composed here from own words and tasks (words.txt, tasks.txt), with functions of
Python's standard library where code is to be read; begun here (openings.txt) and ended by the target; and user's turns
that the target writes from nothing (Magpie, arXiv 2406.08464). None is of a set that drafts are judged by.
"""
