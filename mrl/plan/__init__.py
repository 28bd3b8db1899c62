"""What a configuration will take, from sizes alone: bytes, seconds, the weight sync; and layouts that would fit.

`PlanInputs` is everything that a plan follows from, `Phase` the bytes on a device while a phase runs, `Candidate` a
layout that `search` found. `run_plan` puts a plan together, hashes, stores and compares it; `doctor` judges the host.
Imports `reshard`, `config`, `model`, `data` and `platforms`; neither torch nor Ray, Megatron or vLLM.
"""
