"""Placeholder weights of an engine that waits for its first sync. No file is read for them.

vLLM's own load format `dummy` has two faults here. Its numbers are so small that all tokens are about equally likely.
The check of batch order at the start would then compare next to nothing. It also overwrites buffers, which a sync does
not write. The loader that vLLM calls stands in v0_common.py, v0_23.py and v0_32.py.
"""

from collections.abc import Iterable
from math import sqrt

import torch
from torch import Tensor, nn

_SEED = 0
_AROUND_ONE = (0.5, 1.5)  # unlike real vectors, so that digests show what a sync leaves out
_SMALLEST_BITS = 16  # the smallest format in which torch draws numbers


@torch.no_grad()
def fill(parameters: Iterable[nn.Parameter]) -> None:
    """Draws every floating-point parameter; the same model gets the same numbers each time.

    Matrices are scaled so that they keep the size of what they multiply; vectors are around one. Scalars stay.
    """
    generators: dict[torch.device, torch.Generator] = {}
    for parameter in parameters:
        if parameter.is_meta or not parameter.is_floating_point() or not parameter.dim():
            continue  # a scalar marks that the scales of a cache are not given
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
