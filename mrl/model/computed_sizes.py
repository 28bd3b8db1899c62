"""Sizes of the trained model's computation, which both the computation and the plan of its memory read."""

from mrl.model.hf_config import ModelSpec
from mrl.units import MIB

# Bytes of one chunk of float32 logits on accelerators (mrl/rank/logprob.py). Two tensors of this size exist at a
# time.
LOGIT_CHUNK = 256 * MIB
# Tokens. Plain attention (mrl/rank/attention.py) pads the sequences of a pack to the next of these. Longer
# sequences share a call only with sequences of equal length.
ATTENTION_LENGTHS = (16, 24, 32, 48, 64, 96, 128)
# Columns of queries and keys that make the logit of a sink (mrl/rank/attention.py). One is used: kernels of devices
# want rows of so many numbers.
SINK_COLUMNS = 8
DELTA_CHUNK = 64  # tokens of a sequence that gated delta attention (mrl/rank/gated_delta.py) updates together


def delta_float32(m: ModelSpec) -> int:
    """Returns the float32 elements that chunks of gated delta attention keep a token in one layer, over all tensor
    ranks.

    A value head has queries, keys, and keys times their rate, twice each. Then come the solved and written values, and
    five rows of a matrix between the chunk's tokens. The last is a share of the state before the chunk.
    """
    keys = m.linear_key_head_dim
    values = m.linear_value_head_dim
    of_head = 7 * keys + 3 * values + 5 * DELTA_CHUNK + -(-keys * values // DELTA_CHUNK)
    return m.linear_num_value_heads * of_head


def delta_of_fla(m: ModelSpec) -> int:
    """Returns the 16-bit elements that flash-linear-attention's gated delta kernel keeps a token in one layer, over all
    tensor ranks, beside what goes in and out.

    A value head has normalised queries and keys, a row of the solved matrix between the chunk's tokens, and the running
    sum of its decay in float32 (fla-core 0.6, ops/gated_delta_rule/chunk.py: ctx.save_for_backward).
    """
    return m.linear_num_value_heads * (2 * m.linear_key_head_dim + DELTA_CHUNK + 2)
