"""Bytes that training keeps for each parameter: weights, gradients, float32 master weights, Adam's moments."""

from dataclasses import dataclass

_FLOAT32 = 4


@dataclass(frozen=True)
class Precision:
    """Bytes that training keeps for each element."""

    parameters: int = 2
    gradients: int = _FLOAT32  # with Megatron's grad_reduce_in_fp32, which mrl enables
    moments: int = 2 * _FLOAT32
    host_share: float = 0.0  # share of Adam that Megatron's hybrid optimizer keeps on the host
    # the device keeps float32 weights in addition to those on the host: without use_precision_aware_optimizer
    keeps_masters: bool = True

    @property
    def master(self) -> int:
        """Bytes of master weights: a second copy, if the weights' own format is too coarse for small updates."""
        if self.parameters == _FLOAT32:
            return 0
        return _FLOAT32

    @property
    def adam(self) -> float:
        """Bytes of master weights and moments on the device."""
        staying = 0.0
        if self.keeps_masters:
            staying = self.master
        return (self.master + self.moments) * (1 - self.host_share) + staying * self.host_share

    @property
    def adam_on_host(self) -> float:
        """Bytes that the hybrid optimizer keeps on the host: weights, gradients and moments in float32."""
        return (2 * _FLOAT32 + self.moments) * self.host_share

    @property
    def checkpoint(self) -> int:
        """Bytes in a checkpoint: weights, master weights and moments, each once."""
        return self.parameters + self.master + self.moments


BF16 = Precision()
FLOAT32 = Precision(parameters=_FLOAT32)
