"""Implements `mrl rehearse`: runs a small copy of any configuration on this machine's CPUs, by the real `mrl train`.

    configuration --small--> a small configuration, what changed, what is out of reach   small_*.py, compose.py
       --files--> a checkpoint of random weights, a tokenizer, rows, a reward            prepare.py and what it calls
       --run----> `mrl train` for a step and a save, `mrl train --resume` for the next   stages.py, watched.py
       --marks--> which switch left a trace in the run directory                         marks.py, evidence.py
       --report-> exercised, not exercised, failed                                       report.py

Nothing here trains. The processes run the same code as on a cluster, with the same switches. This package loads neither
torch, Ray, Megatron nor vLLM; the processes that it starts do.
"""
