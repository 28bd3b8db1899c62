"""Weights of an engine that waits for its first sync: numbers of nobody, and no file is read for them.

vLLM's own load format `dummy` would do, but for two things. Its numbers are so small that every token is about as
likely as any other, and the check of batch order at the start would compare next to nothing. And it writes over
buffers, which a sync leaves as they were made. The loader that vLLM calls is in v0_common.py.
"""

from collections.abc import Iterable
from math import sqrt

import torch
from torch import Tensor, nn

_SEED = 0
_AROUND_ONE = (0.5, 1.5)  # no usual value of a vector: what a sync leaves out shows in digests
_SMALLEST_BITS = 16  # of formats that torch draws numbers in


@torch.no_grad()
def fill(parameters: Iterable[nn.Parameter]) -> None:
    """Draws every floating-point parameter: matrices of the size that keeps what goes through them as large as it was,
    vectors around one. The same model gets the same numbers each time. Single numbers stay.
    """
    generators: dict[torch.device, torch.Generator] = {}
    for parameter in parameters:
        if parameter.is_meta or not parameter.is_floating_point() or not parameter.dim():
            continue  # a number by itself says that scales of a cache are not given
        if parameter.device not in generators:
            generators[parameter.device] = torch.Generator(parameter.device).manual_seed(_SEED)
        _draw(parameter.data, generators[parameter.device])


def _draw(values: Tensor, generator: torch.Generator) -> None:
    low, high = _AROUND_ONE
    if values.dim() > 1:
        high = sqrt(3 / max(values.shape[-1], 1))
        low = -high
    if torch.finfo(values.dtype).bits < _SMALLEST_BITS:
        values.copy_(torch.empty_like(values, dtype=torch.float16).uniform_(low, high, generator=generator))
    else:
        values.uniform_(low, high, generator=generator)
