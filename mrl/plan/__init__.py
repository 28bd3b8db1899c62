"""Predicts from sizes alone what a configuration needs: bytes, seconds, and the weight sync.

`PlanInputs` holds everything that decides a plan. `Phase` is the bytes on a device during a phase. `run_plan` composes
a plan, hashes, stores and compares it.

Imports `reshard`, `config`, `model`, `data` and `platforms`, but neither torch nor Ray, Megatron or vLLM.
"""
