"""Marks on parameters, by which the optimizer groups them."""

import torch

FROZEN = "mrl_frozen"  # a parameter that must not be updated
OF_TOWER = "mrl_of_tower"  # a vision tower's, which may have a learning rate of its own


def is_frozen(parameter: torch.nn.Parameter) -> bool:
    """Tells whether a parameter must not be updated."""
    return getattr(parameter, FROZEN, False)
