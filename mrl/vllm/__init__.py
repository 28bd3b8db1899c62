"""All that knows vLLM: how engines are started, what they are asked, how the trainer's weights get into them.

`engine.VllmEngine` is one engine in its Ray actor, `engine_state.VERBS` what it may be asked in which state;
`receive.FastPath` and `receive.SlowPath` take weights inside its worker processes, `sleeping.SleepingExtension` gives
their memory away; `load_layout.Adapter` is what they ask of one generation of vLLM (v0_23.py, v0_32.py). May import
floors 1 to 3: reshard, config, model, data, platforms. Inside this room `import vllm` means the upstream package.
"""
