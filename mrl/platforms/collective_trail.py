"""Counts the collectives of this process by group, to name a rank for which others wait in vain.

Ranks meet in the collectives of a group in one order: the seventh of one rank is the seventh of every other. A rank
that has come to six is waited for by all that have come to seven. `mrl.cluster.missing_ranks` compares the trails.

A call is counted where it enters torch's ProcessGroup, before it waits. That takes microseconds: nothing is asked of
the system, and a thread beside the waiting one hands out what this process remembers.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, wraps
from math import prod
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

_MARK = "keeps_trail"
KEPT = 4096  # of the newest collectives; an update of the tiny model has about 100
MOST_TOLD = 8  # ranks of a group, one by one
# Names of torch 2.9 to 2.13; a class has some of them.
_COLLECTIVES = (
    *("allreduce", "allreduce_coalesced", "allgather", "allgather_coalesced", "all_gather_single", "_allgather_base"),
    *("all_gather_single_coalesced", "allgather_into_tensor_coalesced", "reduce_scatter", "reduce_scatter_single"),
    *("_reduce_scatter_base", "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"),
    *("all_to_all_single", "alltoall_base", "alltoall", "broadcast", "reduce", "gather", "scatter", "barrier"),
)
# the argument with what a rank gives, of those of which the rows of all ranks are alike
_GIVEN = {"allreduce": 0, "broadcast": 0, "all_gather_single": 1, "reduce_scatter_single": 1, "all_to_all_single": 1}


@dataclass(frozen=True)
class RankGroup:
    """Ranks that meet, by the same name on all of them.

    `is_pair`: messages from the first rank to the second one, which are counted apart from collectives.
    """

    name: str
    ranks: tuple[int, ...]
    is_pair: bool = False

    def __hash__(self) -> int:
        return hash((self.name, self.ranks[:2], self.is_pair))  # of hundreds, where groups are looked up very often

    def __reduce__(self) -> tuple[Callable[..., "RankGroup"], tuple]:
        return _group, (self.name, self.ranks, self.is_pair)

    def __str__(self) -> str:
        if self.is_pair:
            return f"{self.name} (ranks {' to '.join(map(str, self.ranks))})"
        if len(self.ranks) > MOST_TOLD:
            return f"{self.name} ({len(self.ranks)} ranks, {min(self.ranks)} to {max(self.ranks)})"
        return f"{self.name} (ranks {', '.join(map(str, self.ranks))})"


@cache
def _group(name: str, ranks: tuple[int, ...], is_pair: bool) -> RankGroup:
    """Makes one object of what several ranks hand out, so that equal groups are compared in no time."""
    return RankGroup(name, ranks, is_pair)


class Entry(NamedTuple):
    """A collective that a rank has come to. `number` counts those of its group from 1, since the rank started.

    `row_bytes` are those of a row of what this rank gives: alike on all ranks, from one micro-batch to the next. 0
    where they are not known.
    """

    group: RankGroup
    number: int
    operation: str
    row_bytes: int = 0

    def __str__(self) -> str:
        size = ""
        if self.row_bytes:
            size = f" with rows of {self.row_bytes} bytes"
        return f"{self.operation} {self.number} of {self.group}{size}"


@dataclass(frozen=True)
class Trail:
    """What a rank has come to: how many collectives of each group, and the newest ones in their order."""

    counts: dict[RankGroup, int]
    recent: tuple[Entry, ...]

    @property
    def total(self) -> int:
        """All collectives and messages since the rank started."""
        return sum(self.counts.values())


class _Count:
    """How many collectives of a group this rank has come to."""

    def __init__(self, group: RankGroup) -> None:
        self.group = group
        self.done = 0

    def note(self, operation: str, row_bytes: int = 0) -> None:
        self.done += 1
        _recent.append(Entry(self.group, self.done, operation, row_bytes))


_counts: list[_Count] = []
_recent: deque[Entry] = deque(maxlen=KEPT)


def trail() -> Trail:
    """Returns the trail of this process; an empty one where nobody called `keep_trail`. Any thread may ask."""
    recent = tuple(_recent.copy())  # a copy is made at once, while other threads go on
    return Trail({count.group: count.done for count in _counts.copy()}, recent)


def keep_trail(leaves_out: Callable[[], bool] | None = None) -> None:
    """Counts from now on, in this process. Call it before other threads use a group. A second call changes nothing.

    `leaves_out` is asked before each collective, for tests: this rank does not take part where it says so.
    """
    from torch.distributed import ProcessGroup

    if hasattr(ProcessGroup.send, _MARK):
        return
    groups = _Groups()
    for name in _COLLECTIVES:
        if method := getattr(ProcessGroup, name, None):
            counted = _counted(method, name, groups)
            if leaves_out is not None:
                counted = _left_out(counted, leaves_out)
            setattr(ProcessGroup, name, counted)
    ProcessGroup.send = _sent(ProcessGroup.send, groups)
    ProcessGroup.recv = _received(ProcessGroup.recv, groups)
    setattr(ProcessGroup.send, _MARK, True)


def _counted(method: Callable[..., Any], name: str, groups: "_Groups") -> Callable[..., Any]:
    index = _GIVEN.get(name)

    @wraps(method)
    def counted(group: Any, *arguments: Any, **named: Any) -> Any:
        row_bytes = 0
        if index is not None and len(arguments) > index:
            row_bytes = _row_bytes(arguments[index])
        groups.of(group).note(name, row_bytes)
        return method(group, *arguments, **named)

    return counted


def _row_bytes(given: Any) -> int:
    """Returns the bytes of a row of a tensor, or of the only one of a list; there may be no row.

    0 for whatever else torch takes: counting never ends a collective.
    """
    if isinstance(given, list | tuple):
        if len(given) != 1:
            return 0
        given = given[0]
    try:
        return given.element_size() * prod(given.shape[1:])
    except (AttributeError, RuntimeError, TypeError):  # no tensor, or one without a shape
        return 0


class _Nothing:
    """Stands for the work of a collective that this rank left out."""

    def wait(self, *_: Any) -> bool:
        return True


def _left_out(method: Callable[..., Any], leaves_out: Callable[[], bool]) -> Callable[..., Any]:
    @wraps(method)
    def maybe(*arguments: Any, **named: Any) -> Any:
        if leaves_out():
            return _Nothing()
        return method(*arguments, **named)

    return maybe


def _sent(method: Callable[..., Any], groups: "_Groups") -> Callable[..., Any]:
    @wraps(method)
    def send(group: Any, tensors: Any, to: int, *arguments: Any, **named: Any) -> Any:
        groups.pair(group, group.rank(), to).note("send")
        return method(group, tensors, to, *arguments, **named)

    return send


def _received(method: Callable[..., Any], groups: "_Groups") -> Callable[..., Any]:
    @wraps(method)
    def recv(group: Any, tensors: Any, source: int, *arguments: Any, **named: Any) -> Any:
        groups.pair(group, source, group.rank()).note("receive")
        return method(group, tensors, source, *arguments, **named)

    return recv


class _Groups:
    """The counts of torch's groups, under names that all their ranks have."""

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[Any, _Count] = WeakKeyDictionary()
        self._pairs: dict[tuple[RankGroup, int, int], _Count] = {}

    def of(self, group: Any) -> _Count:
        """Returns the count of a group. torch numbers groups alike on all ranks, also where it describes them."""
        found = self._known.get(group)
        if found is None:
            found = self._known[group] = _new(_named(group))
        return found

    def pair(self, group: Any, source: int, target: int) -> _Count:
        """Returns the count of what goes from one place in a group to another."""
        whole = self.of(group).group
        key = (whole, source, target)
        found = self._pairs.get(key)
        if found is None:
            pair = RankGroup(whole.name, (whole.ranks[source], whole.ranks[target]), is_pair=True)
            found = self._pairs[key] = _new(pair)
        return found


def _new(group: RankGroup) -> _Count:
    found = _Count(group)
    _counts.append(found)
    return found


def _named(group: Any) -> RankGroup:
    import torch.distributed as dist

    try:
        ranks = tuple(dist.get_process_group_ranks(group))
    except (KeyError, ValueError):  # made without torch.distributed's table
        ranks = tuple(range(group.size()))
    description = getattr(group, "group_desc", "")
    name = f"group {group.group_name}"
    if description and description != "undefined":
        name = f"{description} {group.group_name}"
    return RankGroup(name, ranks)
