"""What some users need and the trainer does not: verl's launch scripts read, torch_dist checkpoints read and written.

`import_verl` turns a script into an `Import`, whose YAML is a configuration of ours; `torch_dist` is Megatron's own file format.
May import every room but `cli`, and is imported by `cli` alone: nothing of the trainer depends on it.
"""
