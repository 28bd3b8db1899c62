"""What some users need and the trainer does not: verl's scripts, Megatron's checkpoint format torch_dist, rehearsals,
pages about runs.

`import_verl` turns a script into an `Import`, whose YAML is a configuration of ours; `torch_dist` reads and writes
files of that format; `rehearse` runs a configuration in small before a cluster is rented; `report` makes pages of run
directories. May import every room but `cli`; no room but `cli` may import it.
"""
