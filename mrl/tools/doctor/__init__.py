"""Is this host fit for a run? `mrl doctor` asks here, in seconds.

`machine` reads the facts (`Machine`) and gives findings their form (`Finding`); `host_checks` and `version_checks`
have pure functions from one to the other. What needs a heavy import is tried by `probes`, in processes
of their own. Imports `platforms`, and the sandbox of `environments`, alone; torch, Ray and vLLM only as programs that
`probes` starts.
"""
