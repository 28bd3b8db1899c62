"""Conversion of checkpoints. No Megatron, no torch and no model: bits are moved from stored blocks to stored blocks."""

from mrl.convert.conversions import Expected, TorchDist, hf_to_megatron, megatron_to_hf, megatron_to_megatron
from mrl.convert.job import Options, Report
from mrl.convert.torch_dist import Trust

__all__ = ["Expected", "Options", "Report", "TorchDist", "Trust", "hf_to_megatron", "megatron_to_hf", "megatron_to_megatron"]
