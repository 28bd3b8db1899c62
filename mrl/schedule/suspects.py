"""Which prompt it is that engines are lost under: each loss names the prompts that the engine was at.

An example, prompt 4 kills its engine whenever it is computed:

    loss 1   2 3 4 5      nobody is suspected before; all four are from now on
    loss 2   3 4 5 9      3, 4 and 5 were under a lost engine before, and nothing tells them apart: from now on they go
                          one at a time
    loss 3   4 11 12      4 alone was under two before: it is set aside, by its id

One that is alone under a second lost engine is set aside then. Where engines are lost for other reasons the prompts
under them are others each time, and nothing happens; or they are all the same, and go one at a time for a while.
"""

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Suspects:
    """Ids of prompts."""

    aside: frozenset[int] = frozenset()  # nobody is asked for a response to them any more
    alone: frozenset[int] = frozenset()  # under way one at a time, so that the next loss tells which it is


def suspects(losses: Iterable[Collection[int]]) -> Suspects:
    """`losses`: prompts under way at each engine when it was lost, in the order of time."""
    times: Counter[int] = Counter()
    aside = set[int]()
    alone = set[int]()
    for prompts in losses:
        most = max((times[prompt] for prompt in prompts), default=0)
        worst = {prompt for prompt in prompts if times[prompt] == most} if most else set()
        if len(worst) == 1:
            aside |= worst
        else:
            alone |= worst
        times.update(set(prompts))
    return Suspects(frozenset(aside), frozenset(alone - aside))
