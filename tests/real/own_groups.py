"""Counts the process groups of a second model in which this rank has met others: what a plan has to count."""

from collections.abc import Callable
from contextlib import AbstractContextManager

from megatron.core import parallel_state as mpu
from torch.distributed import ProcessGroup

from mrl.platforms.collective_trail import trail


def groups_met_in(in_place: Callable[[], AbstractContextManager]) -> int:
    """`in_place` makes the model's groups Megatron's; `keep_trail` was called before they were made."""
    with in_place():
        held = [value for value in vars(mpu).values() if isinstance(value, ProcessGroup)]
    own = {group.group_name for group in held}
    met = {group.name for group in trail().counts if len(group.ranks) > 1 and group.name.split()[-1] in own}
    return len(met)
