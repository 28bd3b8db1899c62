"""A training run, driven from one process: the loop and its phases, validation, evaluation, resuming, checks before.

`loop.py` is the whole algorithm with a map of the step. Main types: Run (what a run consists of; the loop hands its
parts to phases, which never see it), Rollouts (what a step trains on), Responder (prompts to scored responses).
`preflight.py` and `resume.py` load no torch. May import: everything but mrl.cli and mrl.tools.
"""
