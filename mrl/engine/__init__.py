"""One vLLM engine, in its own process and in those that vLLM starts below it. All code that knows vLLM is here.

`EngineWorker` is the Ray actor, `VllmEngine` the engine in it. `engine_state.VERBS` says which calls are legal in which
state. Responses wait in an `Outbox` until the driver knows of them. Those of several turns are `Conversations` with a
partner: tools and environments, or an agent (agents.py) that talks to the model over HTTP (endpoint.py).

`receive.FastPath` and `receive.SlowPath` take weights inside vLLM's worker processes. `sleeping.SleepingExtension`
gives their memory back. These classes use one generation of vLLM through `load_layout.Adapter` (v0_23.py, v0_32.py).
Files cpu_*.py and forking.py fill gaps of vLLM's CPU build, ascend_wake.py one of vllm-ascend. May import store,
process, reshard and lower layers. Inside this package `import vllm` means the upstream package.
"""
