"""This rank's weights under their Megatron names, current and where they lie: what a reshard plan sends from."""

from megatron.core.distributed import DistributedDataParallel
from torch import Tensor
from torch.nn import Module

from mrl.megatron.offload import check_resident


class RankShards:
    """Looks parameters up by (name, model chunk), as mrl.reshard.source names them."""

    def __init__(self, chunks: list[Module]):
        self._chunks = chunks
        self._parameters = {
            (_plain(name), number): parameter for number, chunk in enumerate(chunks) for name, parameter in chunk.named_parameters()
        }

    def __call__(self, name: str, chunk: int) -> Tensor:
        """The parameter's data. Raises RuntimeError for one that the model does not have, or that is not on the device."""
        parameter = self._parameters.get((name, chunk))
        if parameter is None:
            raise RuntimeError(f"model chunk {chunk} has no parameter {name}: the model is not as mrl.reshard.source describes it")
        check_resident(name, [parameter])
        return parameter.data

    def refresh(self) -> None:
        """Brings every parameter up to date on this rank. Collective over data parallelism.

        With overlap_param_gather an optimizer step leaves the other data-parallel ranks' part of a parameter stale until the next forward.
        """
        for chunk in self._chunks:
            if isinstance(chunk, DistributedDataParallel) and chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)


def _plain(name: str) -> str:
    """Without the wrappers' prefixes."""
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name
