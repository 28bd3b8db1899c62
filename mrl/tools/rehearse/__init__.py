"""`mrl rehearse`: any configuration in small, on the CPUs of this machine, through the ordinary `mrl train`.

    configuration --small--> a configuration of ours, what changed, what is out of reach small_*.py, compose.py
       --files--> a checkpoint of random weights, a tokenizer, rows, a reward            prepare.py and what it calls
       --run----> `mrl train` for a step and a save, `mrl train --resume` for the next   stages.py
       --marks--> which switch left a trace in the run directory                         marks.py, evidence.py
       --report-> exercised, not exercised, failed                                       report.py

Nothing here trains: what runs is what a cluster would run, with the same switches. Imports neither torch, Ray, Megatron
nor vLLM; the processes that it starts do.
"""
