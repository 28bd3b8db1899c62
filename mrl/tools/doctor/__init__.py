"""Checks within seconds whether this host is fit for a run: `mrl doctor`.

`host_facts` reads the facts (`HostFacts`) and defines findings (`Finding`). `host_checks` and `version_checks` are pure
functions from facts to findings. `probes` tries what needs a heavy import, in separate processes. `agent_checks` looks
for what agents and MCP servers need, and tries those of a configuration. torch, Ray and vLLM run only in programs that
`probes` starts.
"""
