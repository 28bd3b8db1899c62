"""A training run, driven from one process: the loop and its phases, validation, evaluation, resuming, and checks
before.

`loop.py` is the whole algorithm with a map of the step. Main types: `Run` has the parts of a run, which the loop passes
to phases. `StepBatch` is the handle of a step's rows on all ranks. `preflight.py` and `resume.py` load no torch. May
import everything except mrl.cli and mrl.tools.
"""
