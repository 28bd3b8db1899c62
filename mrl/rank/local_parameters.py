"""Looks up this rank's current weights under their Megatron names, for the reshard plan that sends them."""

from collections.abc import Mapping

from torch import Tensor
from torch.nn import Module

from mrl.rank.offload import check_resident

_SHOWN = 8  # names in one message


class LocalParameters:
    """Looks up this rank's parameters by (name, model chunk), as mrl.model.megatron_shards names them.

    They are read after the last update of a step without a forward. The next forward would end pending gathers of
    weights. So they are ended here instead (mrl.rank.overlap).
    """

    def __init__(self, chunks: list[Module], beside: Module | None = None):
        """`beside`: what is described as a part of the last chunk without being in it."""
        self._parameters = {
            (plain_name(name), number): parameter
            for number, chunk in numbered(chunks, beside)
            for name, parameter in chunk.named_parameters()
        }

    def __call__(self, name: str, chunk: int) -> Tensor:
        """Returns the parameter's data.

        Raises RuntimeError for an unknown parameter, or one that is not on the device.
        """
        parameter = self._parameters.get((name, chunk))
        if parameter is None:
            raise RuntimeError(
                f"model chunk {chunk} has no parameter {name}: the model is not as "
                "mrl.model.megatron_shards describes it"
            )
        check_resident(name, [parameter])
        return parameter.data

    def check(self, wanted: Mapping[tuple[str, int], tuple[int, ...]]) -> None:
        """Compares the model with its description. `wanted`: (name, model chunk) -> shape.

        Raises RuntimeError naming parameters that only one of them has, or whose shapes differ.
        """
        actual = {key: tuple(parameter.shape) for key, parameter in self._parameters.items()}
        faults = [
            f"{name} of chunk {chunk} is {actual.get((name, chunk), 'not there')}, described as "
            f"{wanted.get((name, chunk), 'not there')}"
            for name, chunk in sorted(actual.keys() | wanted.keys())
            if actual.get((name, chunk)) != wanted.get((name, chunk))
        ]
        if faults:
            more = ""
            if len(faults) > _SHOWN:
                more = f"; and {len(faults) - _SHOWN} more"
            raise RuntimeError(f"the model is not as its description: {'; '.join(faults[:_SHOWN])}{more}")


def numbered(chunks: list[Module], beside: Module | None) -> list[tuple[int, Module]]:
    """Returns the chunks with their numbers, and what is `beside` the last one under its number."""
    last = [] if beside is None else [(len(chunks) - 1, beside)]
    return [*enumerate(chunks), *last]


def plain_name(name: str) -> str:
    """Returns a parameter's name without the prefixes of Megatron's wrappers."""
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name
