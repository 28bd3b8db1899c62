"""Linear layers of several experts in one product: the rows of each expert times its own weight."""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mrl.platforms.layers import has_grouped_product
from mrl.rank.host_arrays import brought

_ALIGNED = 16  # bytes to which torch wants every row aligned, also of gradients (aten/src/ATen/native/GroupedMMUtils.h)


def grouped_linear(x: Tensor, weights: Tensor, counts: Sequence[int]) -> Tensor:
    """Returns each row of `x` [rows, in] times the weight of its expert, [rows, out].

    `weights` [experts, out, in]. `counts`: rows of each expert, in order; experts may have none. Devices and dtypes
    without a kernel for it multiply expert by expert.
    """
    if not (len(x) and has_grouped_product(x.device.type, x.dtype.itemsize)):
        parts = zip(x.split(list(counts)), weights.unbind(), strict=True)
        return torch.cat([F.linear(part, weight) for part, weight in parts])
    ends = brought(np.cumsum(counts, dtype=np.int32), x.device)
    width = weights.shape[1]
    unit = _ALIGNED // x.element_size()
    x = F.pad(x, (0, -x.shape[1] % unit))
    weights = F.pad(weights, (0, -weights.shape[2] % unit, 0, -width % unit))
    return F.grouped_mm(x.contiguous(), weights.transpose(1, 2), offs=ends)[:, :width]
