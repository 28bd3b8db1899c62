"""Checkpoints on disk: their content, writing and reading, and conversion between Hugging Face's form and mrl's.

Main types: `Manifest` is a checkpoint's description of itself. `Checkpoint` is one opened for reading, in any form.
`BoxReader` reads any box of any tensor, in Hugging Face coordinates. `convert` has the conversions. A rank's half,
which needs torch and Megatron, is mrl/rank/rank_save.py and rank_load.py. May import model, config and data. Reads no
pickled format: mrl.tools.torch_dist adds Megatron's own, as a `Checkpoint` to read and a `Container` to write.
"""
