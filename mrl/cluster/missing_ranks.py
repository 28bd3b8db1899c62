"""Names which of the ranks that wait for each other in vain has not come, and to which collective.

Three cases, with two ranks A and B and the collectives of two groups, g and h:

    B stands still, or is done too early   A: g1 h1 g2     B: g1 h1           B is behind in g and ahead in nothing
    B goes on to another operation         A: g1 reduce 2  B: g1 gather 2     both have come to the second of g
    B left one out, and waits elsewhere    A: g1 h1 g2     B: g1 h1 h2        each is behind the other in one group

In the first case B is named, also where a third rank waits for A: it is followed from rank to rank until one waits for
nobody. In the others the two trails say only that they differ. Which of them is wrong is told by each rank's own past.
Each came to its last collective behind others: named is the one for whom that is newer. If it is as new for both,
both are named. The same tells who is named of several that wait for each other in a circle. Pure: trails in, names out.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations, islice

from mrl.platforms.collective_trail import MOST_TOLD, Entry, Trail

MOST_PAIRS = 16  # of ranks that are compared entry by entry, each in some 20 ms of the driver
LONGEST = 512  # newest collectives of a rank that are compared with others', or with those of its past


@dataclass(frozen=True)
class Missing:
    """Ranks that others wait for, and why, in words."""

    ranks: tuple[int, ...]
    text: str


def missing_ranks(trails: Mapping[int, Trail]) -> Missing | None:
    """Names who did not come. None where all have come to the same collectives, or there is only one trail."""
    waiting = _waiting(trails)
    partings = [*_partings(trails)]
    if clear := [parting for parting in partings if parting.is_of_one_number]:
        return _of_partings(clear, trails)
    awaited = {rank for others in waiting.values() for rank in others}
    idle = sorted(awaited - waiting.keys())
    if idle and (len(idle) == 1 or not partings):
        return _absent(idle, trails)
    if partings:
        return _of_partings(partings, trails)
    if awaited:
        return _absent(_least_usual_now(awaited, trails), trails)
    return None


def last_collectives(trails: Mapping[int, Trail]) -> str:
    """Says where these ranks are, one operation for all that are in the same."""
    at: dict[Entry, list[int]] = {}
    for rank, own in sorted(trails.items()):
        if own.recent:
            at.setdefault(own.recent[-1], []).append(rank)
    return "; ".join(f"{_ranks(ranks)} came to {entry}" for entry, ranks in at.items())


def _waiting(trails: Mapping[int, Trail], with_messages: bool = True) -> dict[int, set[int]]:
    """Returns for each rank those that have come to fewer collectives of a group. Only receivers wait for messages."""
    found: dict[int, set[int]] = {}
    for group in {group for own in trails.values() for group in own.counts}:
        if group.is_pair and not with_messages:
            continue
        come = {rank: trails[rank].counts.get(group, 0) for rank in group.ranks if rank in trails}
        if len(set(come.values())) == 1:
            continue
        awaited = group.ranks
        if group.is_pair:
            awaited = group.ranks[:1]
        for rank, count in come.items():
            behind = {other for other in awaited if come.get(other, count) < count}
            if behind:
                found.setdefault(rank, set()).update(behind)
    return found


def _absent(ranks: Sequence[int], trails: Mapping[int, Trail]) -> Missing:
    absences = [_absence(rank, trails) for rank in ranks[:MOST_TOLD]]
    if more := len(ranks) - len(absences):
        absences.append(f"nor have {more} more")
    return Missing(tuple(ranks), "; ".join(absences))


def _absence(rank: int, trails: Mapping[int, Trail]) -> str:
    """Says what a rank has not come to: the first collective in which somebody is ahead, who waits there longest.

    Ranks do about as much as each other, so that is the one that has come to the fewest.
    """
    own = trails[rank].counts
    for other, theirs in sorted(trails.items(), key=lambda item: (item[1].total, item[0])):
        missed = {
            group
            for group, count in theirs.counts.items()
            if count > own.get(group, 0) and rank in group.ranks and not (group.is_pair and group.ranks[0] == other)
        }
        if not missed:
            continue
        for entry in theirs.recent:
            if entry.group in missed and entry.number > own.get(entry.group, 0):
                if entry.group.is_pair:  # what the other one receives
                    entry = entry._replace(operation="send")
                return f"rank {rank} has not come to {entry}, to which rank {other} has"
    return f"rank {rank} is more collectives behind the others than they remember"


@dataclass(frozen=True)
class _Parting:
    """Where two ranks first went to different collectives, of groups that both are in: an index into each trail."""

    positions: dict[int, int]
    entries: dict[int, Entry]

    @property
    def is_of_one_number(self) -> bool:
        """Both came to the same number of the same group, with different operations."""
        one, other = self.entries.values()
        return (one.group, one.number) == (other.group, other.number)


def _partings(trails: Mapping[int, Trail]) -> Iterator[_Parting]:
    """Compares ranks that came to different operations under one number, then ranks that wait for each other."""
    clashing = _clashing(trails)
    waiting = _waiting(trails, with_messages=False)
    circles = {(one, other) for one, others in waiting.items() for other in others if one in waiting.get(other, ())}
    mutual = {(one, other) for one, other in circles if one < other}
    for one, other in islice(chain(sorted(clashing), sorted(mutual - clashing)), MOST_PAIRS):
        mine = _common(one, other, trails)
        theirs = _common(other, one, trails)
        for (i, entry), (j, another) in zip(mine, theirs, strict=False):
            if entry != another:
                yield _Parting({one: i, other: j}, {one: entry, other: another})
                break


def _clashing(trails: Mapping[int, Trail]) -> set[tuple[int, int]]:
    """Returns pairs of ranks that came to the same number of a group with different operations."""
    met: dict[tuple, dict[Entry, int]] = {}
    for rank, own in sorted(trails.items()):
        for entry in own.recent[-LONGEST:]:
            if not entry.group.is_pair:
                met.setdefault((entry.group, entry.number), {}).setdefault(entry, rank)
    found: set[tuple[int, int]] = set()
    for kinds in met.values():
        found |= set(islice(combinations(sorted(kinds.values()), 2), MOST_PAIRS))
    return found


def _common(rank: int, other: int, trails: Mapping[int, Trail]) -> list[tuple[int, Entry]]:
    """Returns the newest collectives of groups that both are in, with their places, from where both remember them."""
    since: dict = {}
    for each in (rank, other):
        first = {}
        for entry in trails[each].recent:
            first.setdefault(entry.group, entry.number)
        for group, count in trails[each].counts.items():
            since[group] = max(since.get(group, 0), first.get(group, count + 1))
    return [
        (i, entry)
        for i, entry in enumerate(trails[rank].recent)
        if not entry.group.is_pair and other in entry.group.ranks and entry.number >= since[entry.group]
    ]


def _of_partings(partings: Sequence[_Parting], trails: Mapping[int, Trail]) -> Missing:
    """Names of each two that went apart the one that is wrong by its past. Only those that are so most often stay."""
    named: dict[int, int] = {}
    for parting in partings:
        for rank in _least_usual(parting.positions, trails):
            named[rank] = named.get(rank, 0) + 1
    most = max(named.values())
    ranks = tuple(_least_usual_now([rank for rank, times in named.items() if times == most], trails))
    shown = next(parting for parting in partings if ranks[0] in parting.entries)
    return Missing(ranks, _shown_text(shown, ranks))


def _shown_text(parting: _Parting, ranks: Sequence[int]) -> str:
    rank = ranks[0]
    other = next(each for each in parting.entries if each != rank)
    text = f"rank {rank} went on to {parting.entries[rank]} where rank {other} came to {parting.entries[other]}"
    if len(ranks) > 1:
        return f"{text}; which of them is wrong is not known"
    return f"{text}, as before"


def _least_usual_now(ranks: Iterable[int], trails: Mapping[int, Trail]) -> list[int]:
    return _least_usual({rank: len(trails[rank].recent) - 1 for rank in ranks}, trails)


def _least_usual(positions: Mapping[int, int], trails: Mapping[int, Trail]) -> list[int]:
    """Returns the rank whose way to its place is least like its past, or all that are as unusual."""
    usual = {rank: _likeness(trails[rank].recent, position) for rank, position in positions.items()}
    least = min(usual.values())
    return [rank for rank in sorted(usual) if usual[rank] == least]


def _likeness(recent: Sequence[Entry], position: int) -> tuple[int, int]:
    """Returns how many entries before this one are as they were before the same operation at some earlier time.

    The second number counts those whose rows had as many bytes, too.
    """
    kinds = [(entry.group, entry.operation) for entry in recent[: position + 1]]
    whole = [(*kind, entry.row_bytes) for kind, entry in zip(kinds, recent, strict=False)]
    return _longest(kinds), _longest(whole)


def _longest(done: Sequence) -> int:
    """Returns how many entries at the end are as they were at an earlier place, at most LONGEST.

    This is the Z algorithm on the reversed entries: each is compared about once, also where all are alike.
    """
    back = done[::-1]
    alike = [0] * len(back)
    start = end = 0  # the match that reaches furthest
    for at in range(1, len(back)):
        n = 0
        if at < end:
            n = min(end - at, alike[at - start])
        while at + n < len(back) and back[n] == back[at + n]:
            n += 1
            if n == LONGEST:  # as most ranks are soon, which go their usual way
                return n
        alike[at] = n
        if at + n > end:
            start = at
            end = at + n
    return max(alike, default=0)


def _ranks(ranks: Sequence[int]) -> str:
    return ", ".join(f"rank {rank}" for rank in ranks)
