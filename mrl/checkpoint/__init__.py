"""Checkpoints on disk: their content, writing and reading, and conversion between Hugging Face's form and mrl's.

Main types: `Manifest` is a checkpoint's description of itself. `Checkpoint` is one opened for reading, in any form.
`BoxReader` reads any box of any tensor, in Hugging Face coordinates. A rank saves with `rank_save` and resumes with
`rank_load`; `convert` has the conversions. May import model, config and data. Only the three `rank_` files import torch
and mrl.megatron. Reads no pickled format: mrl.tools.torch_dist adds Megatron's own, as a `Checkpoint` to read and a
`Container` to write.
"""
