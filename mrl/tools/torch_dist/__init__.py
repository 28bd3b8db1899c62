"""Megatron's own checkpoint format (torch_dist), read and written without torch and without running a pickle.

`read.open_torch_dist` returns a `Checkpoint` for every conversion of mrl.checkpoint, and `write.write_torch_dist`
writes one. Weights only. May import checkpoint, model and lower layers; only cli imports it.
"""
