"""Reading verl's launch scripts into configurations of ours. Nothing of a script is ever run.

The way of a script: `shell_syntax` (its text as a tree) -> `shell` and `expansion` (a `Script`: its commands, unknown values named)
-> `verl_command` (a `VerlCommand`) -> `translate` with the rows of `keys` and the functions of `handlers` -> an `Import` (`report`).
May import `config`, `model` and the specs of `algo` and `record`; neither torch, Ray, Megatron nor vLLM.
"""
