"""Of ranks that wait in vain the one that did not come is named: simulated ranks, each with its program of collectives.

A rank waits in each collective until all ranks of its group are in that number of it, by the same operation. The
oracle is who was made to leave one out, or to stand still.
"""

import pickle
import random
import time
from collections import Counter, defaultdict
from collections.abc import Sequence

import pytest
from machine import times_slower
from seldom import seldom

from mrl.cluster.missing_ranks import last_collectives, missing_ranks
from mrl.platforms.collective_trail import Entry, RankGroup, Trail

LAYERS = 3
Program = list[tuple[RankGroup, str]]


def groups(name: str, *members: Sequence[int]) -> dict[int, RankGroup]:
    """One kind of group by rank."""
    return {rank: RankGroup(name, tuple(ranks)) for ranks in members for rank in ranks}


WORLDS = {
    "two ranks": (groups("tensor", (0, 1)), groups("expert", (0, 1)), groups("data", (0, 1))),
    "four ranks": (groups("tensor", (0, 1), (2, 3)), groups("expert", (0, 2), (1, 3)), groups("data", (0, 1, 2, 3))),
    "eight ranks": (
        groups("tensor", (0, 1), (2, 3), (4, 5), (6, 7)),
        groups("expert", (0, 1, 2, 3), (4, 5, 6, 7)),
        groups("data", (0, 2, 4, 6), (1, 3, 5, 7)),
    ),
}


def program(rank: int, world: str, steps: int, micro_batches: Sequence[int]) -> Program:
    """Of a few updates: collectives of layers forwards and backwards, then gradients and their norm."""
    tensor, expert, data = (kind[rank] for kind in WORLDS[world])
    layer = [(tensor, "all_reduce"), (expert, "all_to_all"), (expert, "all_to_all"), (tensor, "all_gather")]
    done: Program = []
    for step in range(steps):
        done += (layer * LAYERS + layer[::-1] * LAYERS) * micro_batches[step % len(micro_batches)]
        done += [(data, "reduce_scatter"), (data, "all_gather"), (tensor, "all_reduce")]
    return done


def trails_of(programs: dict[int, Program], stops: dict[int, int]) -> dict[int, Trail]:
    """Where ranks stand when none can go on; rank r comes to no more than stops[r] collectives."""
    come: dict[int, list[Entry]] = {rank: [] for rank in programs}
    counts: dict[int, Counter[RankGroup]] = {rank: Counter() for rank in programs}
    operations: dict[tuple[RankGroup, int], set[str]] = defaultdict(set)
    moved = True
    while moved:
        moved = False
        for rank, own in programs.items():
            while len(come[rank]) < min(len(own), stops.get(rank, len(own))):
                if come[rank] and not has_passed(come[rank][-1], counts, operations):
                    break
                group, operation = own[len(come[rank])]
                counts[rank][group] += 1
                entry = Entry(group, counts[rank][group], operation)
                operations[group, entry.number].add(operation)
                come[rank].append(entry)
                moved = True
    return {rank: trail_of(entries) for rank, entries in come.items()}


def has_passed(entry: Entry, counts, operations) -> bool:
    """All are in it, by the same operation; or its message was sent, which waits for nobody."""
    if entry.group.is_pair:
        return counts[entry.group.ranks[0]][entry.group] >= entry.number
    of_one_mind = len(operations[entry.group, entry.number]) == 1
    return of_one_mind and all(counts[other][entry.group] >= entry.number for other in entry.group.ranks)


def trail_of(entries: list[Entry], kept: int = 4096) -> Trail:
    counts: dict[RankGroup, int] = {}
    for entry in entries:
        counts[entry.group] = entry.number
    return Trail(counts, tuple(entries[-kept:]))


@pytest.mark.parametrize("world", WORLDS)
def test_a_rank_that_stands_still_is_named_with_what_it_has_not_come_to(world):
    draw = random.Random(0)
    ranks = range(len(WORLDS[world][0]))
    for _ in range(10):
        programs = {rank: program(rank, world, 2, (2,)) for rank in ranks}
        culprit = draw.choice(ranks)
        at = draw.randrange(5, len(programs[culprit]) - 1)
        found = missing_ranks(trails_of(programs, {culprit: at}))
        assert found.ranks == (culprit,)
        group, operation = programs[culprit][at]
        awaited = sum(each == group for each, _ in programs[culprit][:at]) + 1
        first = f"rank {culprit} has not come to {operation} {awaited} of {group}"
        assert found.text.startswith(first), found.text


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("micro_batches", [pytest.param((2,), marks=pytest.mark.long), (2, 3, 1)])
def test_a_rank_that_leaves_one_out_is_named(world, micro_batches):
    draw = random.Random(1)
    ranks = range(len(WORLDS[world][0]))
    wrong = []
    for _ in range(12):
        programs = {rank: program(rank, world, 4, micro_batches) for rank in ranks}
        culprit = draw.choice(ranks)
        at = draw.randrange(len(programs[culprit]) // 2, len(programs[culprit]))
        skipped = programs[culprit].pop(at)
        found = missing_ranks(trails_of(programs, {}))
        if found is None or found.ranks != (culprit,):
            wrong.append((culprit, at, skipped, found))
    assert not wrong


def stages(rank: int) -> Program:
    """An update of eight ranks, two of each of tensor, data and pipeline: forwards, backwards, gradients."""
    first, other = rank % 4, (rank + 4) % 8
    tensor = RankGroup("tensor", (rank // 2 * 2, rank // 2 * 2 + 1))
    data = RankGroup("data", (rank - rank // 2 % 2 * 2, rank - rank // 2 % 2 * 2 + 2))
    ends = RankGroup("embeddings", (first, first + 4))
    gives = (RankGroup("pipeline", (rank, other), is_pair=True), "send")
    takes = (RankGroup("pipeline", (other, rank), is_pair=True), "receive")
    layers = [(tensor, "all_gather"), (tensor, "reduce_scatter")] * 2
    loss = [(tensor, "all_reduce")] * 2
    after = [(ends, "all_reduce"), (data, "all_reduce"), (RankGroup("world", tuple(range(8))), "all_reduce")]
    if rank < 4:
        return [*layers, gives] * 3 + [takes, *layers] * 3 + after
    return [takes, *layers, *loss] * 3 + [*layers, gives] * 3 + after


@pytest.mark.parametrize("culprit", range(8))
def test_with_pipeline_stages_whoever_leaves_out_a_collective_or_a_message_is_named_alone(culprit):
    own = stages(culprit)
    skipped = [place for place, (_, operation) in enumerate(own) if operation != "receive"]
    assert {own[place][1] for place in skipped} > {"send"}
    wrong = {}
    for place in skipped:
        programs = {rank: stages(rank) * 4 for rank in range(8)}
        del programs[culprit][2 * len(own) + place]
        found = missing_ranks(trails_of(programs, {}))
        if found is None or found.ranks != (culprit,):
            wrong[place] = (own[place], found)
    assert not wrong


def test_where_the_past_tells_nothing_both_are_named():
    first = RankGroup("first", (0, 1))
    second = RankGroup("second", (0, 1))
    trails = {0: trail_of([Entry(first, 1, "all_reduce")]), 1: trail_of([Entry(second, 1, "all_reduce")])}
    found = missing_ranks(trails)
    assert found.ranks == (0, 1) and found.text.endswith("which of them is wrong is not known")


def test_of_many_that_have_not_come_all_are_named_and_the_first_are_told():
    group = RankGroup("world", tuple(range(300)))
    trails = {rank: trail_of([Entry(group, 1, "all_reduce")]) for rank in range(300)}
    trails[299] = trail_of([Entry(group, 1, "all_reduce"), Entry(group, 2, "all_reduce")])
    found = missing_ranks(trails)
    assert found.ranks == tuple(range(299))
    assert "rank 7 has not come to all_reduce 2 of world (300 ranks, 0 to 299), to which rank 299 has" in found.text
    assert "rank 8" not in found.text and found.text.endswith("; nor have 291 more")


def test_ranks_that_have_come_to_the_same_are_nobodys_cause():
    programs = {rank: program(rank, "four ranks", 1, (1,)) for rank in range(4)}
    assert missing_ranks(trails_of(programs, {})) is None
    assert missing_ranks({}) is None
    assert last_collectives({0: trail_of([]), 1: trail_of([])}) == ""


def test_a_stage_that_waits_for_a_message_leads_to_the_one_that_waits_for_nobody():
    """Rank 2 waits for a message of rank 1, which waits for rank 0; what was sent and not received is no wait."""
    down = RankGroup("pipeline", (0, 1), is_pair=True)
    further = RankGroup("pipeline", (1, 2), is_pair=True)
    trails = {
        0: trail_of([Entry(down, 1, "send")]),
        1: trail_of([Entry(down, 1, "receive"), Entry(further, 1, "send"), Entry(down, 2, "receive")]),
        2: trail_of([Entry(further, 1, "receive"), Entry(further, 2, "receive")]),
    }
    found = missing_ranks(trails)
    assert found.ranks == (0,)
    assert "rank 0 has not come to send 2 of pipeline (ranks 0 to 1), to which rank 1 has" in found.text
    ahead = {0: trail_of([Entry(down, 1, "send"), Entry(down, 2, "send")]), 1: trail_of([Entry(down, 1, "receive")])}
    assert missing_ranks(ahead) is None


def test_what_a_rank_forgot_is_no_parting():
    programs = {rank: program(rank, "two ranks", 3, (2,)) for rank in range(2)}
    whole = trails_of(programs, {})
    for kept in (1, 2, 7, 20):
        short = trail_of(list(whole[1].recent), kept)
        assert missing_ranks({0: whole[0], 1: short}) is None


def test_all_that_came_to_the_same_are_told_together():
    group = RankGroup("tensor", (0, 1))
    one = trail_of([Entry(group, 1, "all_reduce")])
    assert last_collectives({0: one, 1: one}) == "rank 0, rank 1 came to all_reduce 1 of tensor (ranks 0, 1)"


def test_a_number_of_another_size_is_a_parting_and_the_past_tells_whose():
    """Both come to the second of the group, rank 1 with what is the third's."""
    group = RankGroup("tensor", (0, 1))
    sizes = (4, 64, 256)

    def own(given: Sequence[int]) -> Trail:
        return trail_of([Entry(group, number, "allreduce", size) for number, size in enumerate(given, start=1)])

    found = missing_ranks({0: own([*sizes, *sizes, 4, 64]), 1: own([*sizes, *sizes, 4, 256])})
    assert found.ranks == (1,)
    assert found.text == (
        "rank 1 went on to allreduce 8 of tensor (ranks 0, 1) with rows of 256 bytes where rank 0 came to "
        "allreduce 8 of tensor (ranks 0, 1) with rows of 64 bytes, as before"
    )


def test_one_exchange_of_several_in_a_row_that_is_left_out_is_told_by_its_rows():
    """As experts have them: rank 1 left out the first of a layer, and came to the second under its number."""
    group = RankGroup("expert", (0, 1))
    layer = [(4, "all_to_all_single"), (256, "all_to_all_single"), (256, "all_to_all_single"), (64, "allreduce")]

    def own(given: Sequence[tuple[int, str]]) -> Trail:
        return trail_of([Entry(group, number, kind, size) for number, (size, kind) in enumerate(given, start=1)])

    found = missing_ranks({0: own([*layer * 3, layer[0]]), 1: own([*layer * 3, layer[1]])})
    assert found.ranks == (1,)


def circle(size: int, culprit: int, times: int) -> dict[int, Trail]:
    """Each rank meets the next one and then the one before, and waits for the next; the culprit did so the other way
    round, and left out the one before.
    """
    trails = {}
    for rank in range(size):
        after = received(RankGroup(f"pair {rank}", (rank, (rank + 1) % size)))
        before = received(RankGroup(f"pair {(rank - 1) % size}", ((rank - 1) % size, rank)))
        whole = received(RankGroup("world", tuple(range(size))))
        order = (after, before, whole)
        if rank == culprit:
            order = (before, after, whole)
        entries = [Entry(group, number, "all_reduce") for number in range(1, times + 1) for group in order]
        trails[rank] = trail_of([*entries, Entry(after, times + 1, "all_reduce")])
    return trails


def received(group: RankGroup) -> RankGroup:
    """As the driver has it of each rank."""
    return pickle.loads(pickle.dumps(group))


@pytest.mark.parametrize("ranks", seldom([64, 256], 64))
def test_hundreds_of_ranks_that_all_remember_thousands_are_compared_in_seconds(ranks):
    """A circle of all is the longest: the past of each is asked."""
    trails = circle(ranks, 47, 1365)
    assert {len(own.recent) for own in trails.values()} == {4096}
    assert trails[0].recent[-2].group is trails[ranks - 1].recent[-2].group, "so that comparing takes no time"
    began = time.process_time()
    found = missing_ranks(trails)
    assert found.ranks == (47,)
    assert time.process_time() - began < 3 * times_slower()
