"""Names who of the ranks that missed a deadline, or lost each other, is the cause.

It is one that does not run, or did not come to a collective to which others came.
"""

import time
from collections.abc import Callable

import ray

from mrl.cluster.calls import Late, LostPeer, answered
from mrl.cluster.missing_ranks import last_collectives, missing_ranks
from mrl.cluster.process_logs import concerning, processes_of
from mrl.platforms.collective_trail import Trail

AGAIN_S = 1.0  # between two looks at where ranks are, of which the second tells whether they go on


def with_cause(error: Late | LostPeer, refs: Callable[[str], dict[str, ray.ObjectRef]]) -> Late | LostPeer:
    """Adds the cause to an error. `refs` calls a method of all ranks.

    All running ranks write their stacks, so the others are the cause. If all run, it is the rank that did not come to a
    collective to which others have come.
    """
    kind = type(error)
    asked = refs("write_stacks")
    trails = answered(asked)
    silent = [name for name in asked if name not in trails]
    if silent and len(silent) < len(asked):
        text = f"{', '.join(silent)} did not even write its stacks: stopped, or cut off"
        where = f"{_at(trails)}the stacks of the others are in logs/*.stacks"
        return concerning(kind(f"{error}; {text}; {where}"), *silent)
    if silent:
        return concerning(kind(f"{error}; none of them could write its stacks"), *processes_of(error))
    text, names = _cause(trails, refs)
    return concerning(kind(f"{error}; {text}the stacks of ranks are in logs/*.stacks"), *(names or processes_of(error)))


def _cause(trails: dict[str, Trail], refs: Callable[[str], dict[str, ray.ObjectRef]]) -> tuple[str, list[str]]:
    """Returns words, and the ranks that they name: none where all have come to the same, or go on."""
    time.sleep(AGAIN_S)
    later = answered(refs("collectives"))
    done = sum(later[name] - trails[name].total for name in later)
    if done:
        return f"they go on, by {done} collectives in about {AGAIN_S:g} s, so they are slow and do not hang; ", []
    missing = missing_ranks(_numbered(trails))
    if missing is None:
        return _at(trails), []
    return f"{missing.text}; ", [f"rank {number}" for number in missing.ranks]


def _numbered(trails: dict[str, Trail]) -> dict[int, Trail]:
    return {int(name.removeprefix("rank ")): own for name, own in trails.items()}


def _at(trails: dict[str, Trail]) -> str:
    if text := last_collectives(_numbered(trails)):
        return f"{text}; "
    return ""
