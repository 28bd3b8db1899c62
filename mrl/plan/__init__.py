"""What a configuration will take, from sizes alone: bytes, seconds, the weight sync.

`PlanInputs` is everything that a plan follows from, `Phase` the bytes on a device while a phase runs. `run_plan` puts a
plan together, hashes, stores and compares it.
Imports `reshard`, `config`, `model`, `data` and `platforms`; neither torch nor Ray, Megatron or vLLM.
"""
