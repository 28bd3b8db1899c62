"""Bytes that adapters (actor.lora) keep from a forward pass beside their layers, by term, on one rank.

An adapter keeps its input x. The layer would keep it for its own weight's gradient, so it is counted there. Beside it
stand:

* A x, once for each target that shares x, and the joined factors A of those targets;
* x made again, where the layer's norm is fused into it;
* with dropout the mask, and the masked x.

These were read from mrl/rank/lora_layers.py, and tests compare them with what ranks keep
(tests/real/test_memory_truth.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from mrl.model import ModelSpec
from mrl.model.adapters import DELTA_INPUTS, Lora, adapted_modules
from mrl.model.hf_config import LayerKind
from mrl.model.layout import TrainLayout

_F32 = 4
_ATTENTION = ("q_proj", "k_proj", "v_proj")
_OF_LATENTS = ("q_a_proj", "kv_a_proj_with_mqa")  # whole on every rank
_TO_HEADS = ("q_b_proj", "kv_b_proj")
_GATED = ("gate_proj", "up_proj")
_DOWN = ("down_proj",)


@dataclass(frozen=True)
class AdapterActivations:
    """Bytes that the adapters of one layer keep from a micro-batch."""

    lora: Lora
    dropout: bool
    model: ModelSpec
    layout: TrainLayout
    bytes: int  # per element
    is_plain: bool  # the kernels are torch's
    tokens: int  # tokens of the rank
    sharded: int  # those that it has between tensor-parallel layers
    expert_tokens: int  # rows of its experts

    def terms(self, kind: LayerKind) -> dict[str, int]:
        """Returns the bytes of a layer by term, without recomputation."""
        m = self.model
        tensor = self.layout.tensor
        attention = self._delta() if kind.is_linear else self._attention()
        if kind.has_experts:
            return {"attention adapters": attention} | self._of_experts()
        width = m.intermediate_size // tensor
        mlp = self._before(_GATED, self.tokens, self.sharded, again=True)
        mlp += self._kept(_DOWN, self.sharded) + self._dropped(_DOWN, self.tokens * width)
        return {"attention adapters": attention, "mlp adapters": mlp}

    def _attention(self) -> int:
        m = self.model
        heads = m.num_attention_heads * m.value_head_dim // self.layout.tensor
        kept = self._latent() if m.is_latent else self._before(_ATTENTION, self.tokens, self.sharded, again=True)
        return kept + self._kept(("o_proj",), self.sharded) + self._dropped(("o_proj",), self.tokens * heads)

    def _delta(self) -> int:
        """Returns the bytes of gated delta attention, whose norm is a module of its own."""
        m = self.model
        values = m.linear_num_value_heads * m.linear_value_head_dim // self.layout.tensor
        kept = sum(self._before(names, self.tokens, self.sharded) for names in DELTA_INPUTS)
        return kept + self._kept(("out_proj",), self.sharded) + self._dropped(("out_proj",), self.tokens * values)

    def _latent(self) -> int:
        """Returns the bytes of the projections of latent attention, each of which has an input of its own."""
        m = self.model
        kept = self._kept(_OF_LATENTS, self.sharded) + self._kept((*_TO_HEADS, "q_proj"), self.tokens)
        inputs = dict.fromkeys((*_OF_LATENTS, "q_proj"), m.hidden_size)
        latents = dict(zip(_TO_HEADS, (m.q_lora_rank, m.kv_lora_rank), strict=True))
        for name, width in (inputs | latents).items():
            kept += self._dropped((name,), self.sharded * width)
            if name in latents and self._targets((name,)):
                kept += self.sharded * (width * self._of_a_norm + _F32)
        return kept

    def _of_experts(self) -> dict[str, int]:
        m = self.model
        rows = self.expert_tokens
        width = m.moe_intermediate_size // self.layout.expert_tensor
        experts = self._before(_GATED, rows, rows, copies=m.num_experts // self.layout.expert)
        experts += self._kept(_DOWN, rows) + self._dropped(_DOWN, rows * width)
        if not m.shared_expert_intermediate_size:
            return {"expert adapters": experts}
        inner = m.shared_expert_intermediate_size // self.layout.tensor
        shared = self._before(_GATED, self.tokens, self.tokens)
        shared += self._kept(_DOWN, self.tokens) + self._dropped(_DOWN, self.tokens * inner)
        return {"expert adapters": experts, "shared adapters": shared}

    def _before(self, names: Sequence[str], gathered: int, own: int, copies: int = 1, again: bool = False) -> int:
        """Returns the bytes of modules that share an input x of `own` tokens, as wide as the model.

        `gathered`: tokens of A x. `copies`: copies of the factors, one an expert. `again`: x is made again.
        """
        width = self.model.hidden_size
        targets = self._targets(names)
        if not targets:
            return 0
        joined = 0
        if targets > 1:
            joined = targets * self.lora.rank * width * copies * self.bytes
        made = 0
        if again:
            made = own * (width * self._of_a_norm + _F32)
        return self._kept(names, gathered) + joined + made + self._dropped(names, own * width)

    def _kept(self, names: Sequence[str], tokens: int) -> int:
        """Returns the bytes of A x over all modules."""
        return tokens * self._targets(names) * self.lora.rank * self.bytes

    def _dropped(self, names: Sequence[str], elements: int) -> int:
        """Returns the bytes of a mask and of the masked input. On a CPU torch's mask has the input's format."""
        if not self.dropout or not self._targets(names):
            return 0
        mask = 1
        if self.is_plain:
            mask = self.bytes
        return elements * (self.bytes + mask)

    def _targets(self, names: Sequence[str]) -> int:
        return len(set(names) & set(adapted_modules(self.model, self.lora)))

    @property
    def _of_a_norm(self) -> int:
        """Bytes an element that a second norm of an input keeps: in torch the input in float32, unless it is float32
        already.
        """
        if not self.is_plain:
            return self.bytes
        if self.bytes < _F32:
            return _F32
        return 0
