"""What some users need and the trainer does not: verl's launch scripts, and Megatron's checkpoint format torch_dist.

`import_verl` turns a script into an `Import`, whose YAML is a configuration of ours; `torch_dist` reads and writes files
of that format. May import every room but `cli`; no room but `cli` may import it.
"""
