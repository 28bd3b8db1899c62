"""Checkpoints on disk: what they hold, writing and reading them, and conversion between Hugging Face's form and ours.

Main types: `Manifest` (what a checkpoint says of itself), `Checkpoint` (one that is opened to be read, of whatever form) and `BoxReader`
(reads any box of any tensor, in Hugging Face coordinates). A run saves through `save` and resumes through `load`; `convert` has the
conversions. May import model, config and reshard, and only `save` and `load` import torch and mrl.megatron. Knows no pickled format:
mrl.extras.torch_dist brings Megatron's own, as a `Checkpoint` to read and a `Container` to write.
"""
