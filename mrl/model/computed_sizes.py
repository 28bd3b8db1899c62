"""Sizes in which the trained model is computed; what computes with them and the plan of its memory read them here."""

from mrl.units import MIB

# Bytes of one chunk of float32 logits on accelerators (mrl/megatron/logprob.py); two tensors of this size are alive at
# a time.
LOGIT_CHUNK = 128 * MIB
# Tokens: plain attention (mrl/megatron/attention.py) pads a sequence of a pack to the next of these; longer ones share
# a call only with sequences of their own length.
ATTENTION_LENGTHS = (16, 24, 32, 48, 64, 96, 128)
DELTA_CHUNK = 64  # tokens of a sequence whose updates gated delta attention (mrl/megatron/gated_delta.py) makes at once
