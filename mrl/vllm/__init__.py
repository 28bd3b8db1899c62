"""All code that knows vLLM: it starts engines, calls them, and brings the trainer's weights into them.

`engine.VllmEngine` is one engine in its Ray actor. `engine_state.VERBS` says which calls are legal in which state.
`receive.FastPath` and `receive.SlowPath` take weights inside its worker processes. `sleeping.SleepingExtension` gives
their memory back. These classes use one generation of vLLM through `load_layout.Adapter` (v0_23.py, v0_32.py). May
import floors 1 to 3: reshard, config, model, data, platforms. Inside this room `import vllm` means the upstream
package.
"""
