"""Is this host fit for a run? Facts are read (machine) and judged by pure functions (versions, host, engine); what needs a heavy
import is tried by probes in processes of their own."""
