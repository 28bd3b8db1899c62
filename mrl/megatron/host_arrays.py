"""From arrays of the host to tensors of the device, without a wait."""

import numpy as np
import torch
from torch import Tensor


def brought(array: np.ndarray, device: torch.device) -> Tensor:
    """The array on `device`, which has it before it computes what it is asked for next.

    It is copied from pinned memory. For a copy from any other memory the host would wait, and so for all that the
    device was asked for before.
    """
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == tensor.device.type:
        return tensor
    if len(array):
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
