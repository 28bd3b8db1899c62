"""Megatron's own checkpoint format (torch_dist), read and written without torch and without running a pickle.

Two entry points: `read.open_torch_dist` gives a `Checkpoint` that every conversion of mrl.checkpoint takes, and
`write.write_torch_dist` writes one. Weights only. May import checkpoint, model and what lies below them; nothing but
cli imports this room.
"""
