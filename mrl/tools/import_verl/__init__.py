"""Translates verl's launch scripts into configurations of mrl. Nothing of a script is run.

The steps: `shell_syntax` parses the text into a tree. `shell` and `expansion` follow it and give a `Script`: its
commands, and what cannot be known about them. `verl_command` reads a `VerlCommand`: the overrides. `translate` applies
the rows of `keys` and the functions of `handlers`, and gives an `Import` (`report`).

This package may import `config`, `model`, `algo.spec` and `record.sinks`. It loads neither torch, Ray, Megatron nor
vLLM.
"""
