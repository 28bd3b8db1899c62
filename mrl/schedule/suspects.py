"""Finds the prompt that kills engines: each loss names the prompts that the engine was computing.

Example: prompt 4 kills its engine whenever it is computed.

    loss 1   2 3 4 5      nobody was suspected before; all four are suspected now
    loss 2   3 4 5 9      3, 4 and 5 were under a lost engine before, and nothing distinguishes them: from now on they
                          run one at a time
    loss 3   4 11 12      only 4 was under two losses before: it is set aside, by its id

A prompt that is the only suspect of a second loss is set aside at once. If engines are lost for other reasons, the
prompts differ each time and nothing happens; or they are the same, and run one at a time for a while.
"""

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Suspects:
    """Ids of suspected prompts."""

    aside: frozenset[int] = frozenset()  # no response to them is requested any more
    alone: frozenset[int] = frozenset()  # they run one at a time, so that the next loss identifies the cause


def suspects(losses: Iterable[Collection[int]]) -> Suspects:
    """Returns the suspects. `losses`: prompts that ran on each lost engine, in order of time."""
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
