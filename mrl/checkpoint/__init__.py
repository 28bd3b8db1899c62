"""Checkpoints on disk: what they hold, writing and reading them, and conversion between Hugging Face's form and ours.

Main types: `Manifest` (what a checkpoint says of itself), `Checkpoint` (one that is opened to be read, of whatever
form) and `BoxReader` (reads any box of any tensor, in Hugging Face coordinates). A rank saves through `rank_save` and
resumes through `rank_load`; `convert` has the conversions. May import model, config and data; only the three `rank_`
files import torch and mrl.megatron. Knows no pickled format: mrl.tools.torch_dist brings Megatron's own, as a
`Checkpoint` to read and a `Container` to write.
"""
