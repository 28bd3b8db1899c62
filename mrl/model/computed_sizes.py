"""Sizes of the trained model's computation, which both the computation and the plan of its memory read."""

from mrl.units import MIB

# Bytes of one chunk of float32 logits on accelerators (mrl/megatron/logprob.py). Two tensors of this size exist at a
# time.
LOGIT_CHUNK = 256 * MIB
# Tokens. Plain attention (mrl/megatron/attention.py) pads the sequences of a pack to the next of these. Longer
# sequences share a call only with sequences of equal length.
ATTENTION_LENGTHS = (16, 24, 32, 48, 64, 96, 128)
DELTA_CHUNK = 64  # tokens of a sequence that gated delta attention (mrl/megatron/gated_delta.py) updates together
