"""What adapters (actor.lora) keep of a forward pass beside the layers that they are on, by term, on one rank.

An adapter keeps its input x, which the layer would keep for the gradient of its own weight, and which is counted there.
Beside it are A x, at most as many times as targets share x; the factors A of those, joined; where the layer's norm is
fused into it, x made again; with dropout the mask and what it leaves of x. They were read off
mrl/megatron/lora_layers.py and are held against what ranks keep (tests/real/test_memory_truth.py).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mrl.model.adapters import Lora
from mrl.model.hf_config import LayerKind

if TYPE_CHECKING:
    from mrl.plan.activations import Activations

_F32 = 4
_ATTENTION = ("q_proj", "k_proj", "v_proj")
_GATED = ("gate_proj", "up_proj")


def adapter_terms(kept: "Activations", kind: LayerKind) -> dict[str, int]:
    """Bytes by term of the adapters in one layer without recomputation; empty where none are trained."""
    if kept.lora is None:
        return {}
    heads = kept.model.num_attention_heads * kept.model.head_dim // kept.layout.tensor
    attention = _into(kept, _ATTENTION, kept.tokens, kept.sharded, kept.model.hidden_size, has_norm=True)
    attention += _out_of(kept, "o_proj", kept.sharded, kept.tokens, heads)
    if kind.has_experts:
        return {"attention adapters": attention} | _of_experts(kept)
    width = kept.model.intermediate_size // kept.layout.tensor
    mlp = _into(kept, _GATED, kept.tokens, kept.sharded, kept.model.hidden_size, has_norm=True)
    return {
        "attention adapters": attention,
        "mlp adapters": mlp + _out_of(kept, "down_proj", kept.sharded, kept.tokens, width),
    }


def _of_experts(kept: "Activations") -> dict[str, int]:
    m = kept.model
    local = m.num_experts // kept.layout.expert
    width = m.moe_intermediate_size // kept.layout.expert_tensor
    tokens = round(kept.expert_tokens)
    experts = _into(kept, _GATED, tokens, tokens, m.hidden_size, copies=local)
    terms = {"expert adapters": experts + _out_of(kept, "down_proj", tokens, tokens, width)}
    if m.shared_expert_intermediate_size:
        inner = m.shared_expert_intermediate_size // kept.layout.tensor
        shared = _into(kept, _GATED, kept.tokens, kept.tokens, m.hidden_size)
        terms["shared adapters"] = shared + _out_of(kept, "down_proj", kept.tokens, kept.tokens, inner)
    return terms


def _into(
    kept: "Activations",
    names: Sequence[str],
    gathered: int,
    own: int,
    width: int,
    copies: int = 1,
    has_norm: bool = False,
) -> int:
    """Bytes of the adapters of modules that share an input x of `own` tokens and of this width.

    `gathered`: the tokens that A x is of. `copies`: of the factors, one an expert. `has_norm`: x is made again.
    """
    targets = _targets(kept.lora, names)
    if not targets:
        return 0
    rows = targets * kept.lora.rank
    joined = rows * width * copies * (targets > 1)
    again = 0
    if has_norm:
        again = own * (width * _norm_bytes(kept) + _F32)
    return (gathered * rows + joined) * kept.bytes + again + _dropped(kept, own * width)


def _out_of(kept: "Activations", name: str, scattered: int, own: int, width: int) -> int:
    """Bytes of the adapter of a module whose input has `own` tokens of this width, and A x `scattered` ones."""
    if not _targets(kept.lora, (name,)):
        return 0
    return scattered * kept.lora.rank * kept.bytes + _dropped(kept, own * width)


def _targets(lora: Lora, names: Sequence[str]) -> int:
    return len(set(names) & set(lora.targets))


def _norm_bytes(kept: "Activations") -> int:
    """Bytes of an element that a second norm of the same input keeps.

    In torch they are what it was normalised to, in float32, and before that the input where it has 16 bits.
    """
    if kept.kernels == "torch" and kept.bytes < _F32:
        return 2 * _F32
    return kept.bytes


def _dropped(kept: "Activations", elements: int) -> int:
    if not kept.dropout:
        return 0
    mask = 1
    if kept.kernels == "torch":  # whose masks are of the input's format
        mask = kept.bytes
    return elements * (kept.bytes + mask)
