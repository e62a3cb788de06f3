"""Training of drafts: an EAGLE-3 head is distilled from a target's own answers.

The parts: `prompts` reads what to ask, `answers` lets the engine answer, `sequences` makes batches of that, `teacher`
is the target's dense pass, `head` the head and its unrolling, `learning` what it learns and how well it drafts,
`preparing` what leads to the first step, `steps` a rank's part of each, `group` and `follower` the other ranks,
`progress` what is kept of a run so that it goes on after a kill, `publish` the checkpoint that engines load, `run` all
of it in order. No part of serving.
"""
