"""Bytes that training keeps for each parameter: weights, gradients, float32 master weights, Adam's moments."""

from dataclasses import dataclass

_FLOAT32 = 4


@dataclass(frozen=True)
class Precision:
    """Bytes per element of what training keeps."""

    parameters: int = 2
    gradients: int = _FLOAT32  # with Megatron's grad_reduce_in_fp32, which mrl switches on
    moments: int = 2 * _FLOAT32
    host_share: float = 0.0  # of Adam, that Megatron's hybrid optimizer has on the host for good
    # the device keeps float32 weights beside those on the host: without use_precision_aware_optimizer
    masters_stay: bool = True

    @property
    def master(self) -> int:
        """A second copy of the weights, where their own format is too coarse for small updates."""
        if self.parameters == _FLOAT32:
            return 0
        return _FLOAT32

    @property
    def adam(self) -> float:
        """Bytes of master weights and moments on the device."""
        staying = 0.0
        if self.masters_stay:
            staying = self.master
        return (self.master + self.moments) * (1 - self.host_share) + staying * self.host_share

    @property
    def adam_on_host(self) -> float:
        """Bytes that the hybrid optimizer has on the host: weights, gradients and moments in float32."""
        return (2 * _FLOAT32 + self.moments) * self.host_share

    @property
    def checkpoint(self) -> int:
        """Bytes in a checkpoint: weights, master weights and moments, each once."""
        return self.parameters + self.master + self.moments


BF16 = Precision()
FLOAT32 = Precision(parameters=_FLOAT32)
