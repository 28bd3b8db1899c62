"""What switches of the actor came to in an update: bytes on the host, layers computed twice, gradients
summed early, what is frozen. Metrics of one rank.

A switch that is off writes nothing, so that a line of metrics tells which code ran.
"""

from collections.abc import Sequence

from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch.nn import Module

from mrl.algo.aggregate import FloatParts
from mrl.megatron.adam_state import AdamState
from mrl.megatron.offload import FrozenWeights, Residence
from mrl.megatron.optimizer import is_frozen
from mrl.megatron.overlap import GradientReduction
from mrl.megatron.recompute import RecomputeCount


class SwitchTraces:
    """Watches one rank.

    `recomputes`: whether layers are recomputed; `reference`: weights that are on the host, if any.
    """

    def __init__(
        self,
        chunks: Sequence[Module],
        residence: Residence,
        optimizer: MegatronOptimizer,
        reference: FrozenWeights | None,
        recomputes: bool,
        reduction: GradientReduction,
    ) -> None:
        self._chunks, self._residence, self._optimizer, self._reference = chunks, residence, optimizer, reference
        self._recompute = RecomputeCount(chunks) if recomputes else None
        self._reduction = reduction

    def begin(self) -> None:
        """An update begins."""
        self._reduction.early = 0
        if self._recompute:
            self._recompute.begin()

    def metrics(self) -> FloatParts:
        """Of the update that ends, on this rank."""
        frozen = sum(is_frozen(parameter) for chunk in self._chunks for parameter in chunk.parameters())
        values = {
            **{f"offload/{kind}_bytes": n for kind, n in self._residence.left_bytes.items()},
            "offload/reference_bytes": sum(piece.nbytes for piece in self._reference.pieces) if self._reference else 0,
            "offload/host_adam_bytes": self._host_adam(),
            "actor/recomputed_layers": self._recompute.count if self._recompute else 0,
            "actor/early_reductions": self._reduction.early,
            "actor/model_chunks": len(self._chunks) if len(self._chunks) > 1 else 0,
            "router/frozen": frozen,
        }
        return {name: (float(value), 1.0) for name, value in values.items() if value}

    def _host_adam(self) -> int:
        parts = (part for part in self._optimizer.chained_optimizers if not getattr(part, "is_stub_optimizer", False))
        return sum(AdamState(part.optimizer).host_bytes() for part in parts)
