"""Is this host fit for a run? Facts are read (machine), judged by pure functions (versions, host, engine) and by probes in processes of their own."""
