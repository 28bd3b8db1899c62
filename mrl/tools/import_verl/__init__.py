"""Reading verl's launch scripts into configurations of ours. Nothing of a script is ever run.

The way of a script: `shell_syntax` (its text as a tree) -> `shell` and `expansion` (a `Script`: its commands, with what
of them cannot be known) -> `verl_command` (a `VerlCommand`: its overrides) -> `translate`, by the rows of `keys` and
the functions of `handlers` -> an `Import` (`report`). May import `config`, `model`, `algo.spec` and `record.sinks`;
neither torch, Ray, Megatron nor vLLM.
"""
