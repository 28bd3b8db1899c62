"""Queues of the processes that write files of groups: order, room, a second writer, failures, an end while they write.

Ray is a stand-in: a writer writes its oldest file when the test says so, by the product's own `write`.
"""

import errno
import random
from collections import deque
from types import SimpleNamespace

import pytest
import ray
from replicas import stored

from mrl.checkpoint.group_files import group_file
from mrl.checkpoint.manifest import file_facts
from mrl.cluster import calls
from mrl.data.samples import Sample
from mrl.errors import EnvironmentFault, Interrupted, LostProcess
from mrl.generate import group_writer
from mrl.generate.group_writer import GroupParts, GroupWriter

DIED = ray.exceptions.ActorDiedError()


class Writing:
    """The reference to one file."""

    def __init__(self, path, parts):
        self.path, self.parts, self.done, self.facts, self.error = path, parts, False, None, None


class Handle:
    """One writer; it takes its files in turn, as an actor of Ray does."""

    def __init__(self, product):
        self._product, self.files, self.killed = product, deque(), 0
        self.finished: list[int] = []  # numbers of groups
        self.write = SimpleNamespace(remote=self._take)

    def _take(self, path, parts):
        self.files.append(Writing(path, parts))
        return self.files[-1]

    def step(self, error=None):
        """Writes the oldest file, or fails at it."""
        file = self.files.popleft()
        file.done, file.error = True, error
        self.finished.append(file.parts.number)
        try:
            file.facts = None if error else self._product.write(file.path, file.parts)
        except Exception as raised:
            file.error = ray.exceptions.RayTaskError("write", str(raised), raised).as_instanceof_cause()


class Ray:
    """What the file writer uses of Ray."""

    exceptions = ray.exceptions

    def __init__(self):
        self.writers: list[Handle] = []

    def remote(self, kind):
        def start():
            self.writers.append(Handle(kind()))
            return self.writers[-1]

        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=start))

    def wait(self, refs, num_returns=1, timeout=None):
        ready = [ref for ref in refs if ref.done][:num_returns]
        return ready, [ref for ref in refs if ref not in ready]

    def get(self, ref):
        if ref.error:
            raise ref.error
        return ref.facts

    def kill(self, writer):
        writer.killed += 1
        while writer.files:
            writer.step(DIED)


@pytest.fixture
def cluster(monkeypatch):
    stand_in = Ray()
    monkeypatch.setattr(group_writer, "ray", stand_in)
    monkeypatch.setattr(calls, "ray", stand_in)
    monkeypatch.setattr(group_writer, "on_node", dict)
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    return stand_in


def group(number: int, tokens: int = 6) -> GroupParts:
    sample = Sample(7, 9, 9, 99, (1, 2), tuple(range(tokens)), tuple(-i / 7 for i in range(tokens)), "stop", 0)
    return GroupParts(number, 0, {0: stored([sample])}, {})


def room_for(monkeypatch, groups: float) -> None:
    """So many groups of six tokens may wait for one writer."""
    monkeypatch.setattr(group_writer, "MOST_WAITING", int(groups * group(0).bytes(0)))


def begin(writer, folder, number, tokens=6):
    return writer.begin(folder / group_file(number, 0), group(number, tokens))


def test_a_file_is_none_until_it_is_written_and_its_facts_are_those_of_the_disk(cluster, tmp_path):
    writer = GroupWriter(9, 0)
    first, second = begin(writer, tmp_path, 1), begin(writer, tmp_path, 2)
    (handle,) = cluster.writers
    assert [writer.written(each) for each in (first, second)] == [None, None]
    handle.step()
    assert writer.written(first) == file_facts(tmp_path / group_file(1, 0)) and writer.written(second) is None
    handle.step()
    assert writer.facts({"a": first, "b": second}) == {
        "a": file_facts(tmp_path / group_file(1, 0)),
        "b": file_facts(tmp_path / group_file(2, 0)),
    }


def test_another_writer_starts_when_more_than_a_quarter_waits_for_each(cluster, tmp_path, monkeypatch):
    room_for(monkeypatch, 8)
    writer = GroupWriter(9, 0)
    started = []
    for number in range(13):
        begin(writer, tmp_path, number)
        started.append(len(cluster.writers))
    assert started == [1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4, 4]  # the fourth finds three waiting of eight
    assert sorted(len(handle.files) for handle in cluster.writers) == [3, 3, 3, 4]


def test_there_are_no_more_writers_than_processors(cluster, tmp_path, monkeypatch):
    room_for(monkeypatch, 4)
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    writer = GroupWriter(9, 0)
    assert [begin(writer, tmp_path, number) is None for number in range(5)] == [False] * 4 + [True]
    assert len(cluster.writers) == 1


def test_a_group_of_more_than_all_room_is_written_where_nothing_waits(cluster, tmp_path, monkeypatch):
    room_for(monkeypatch, 1.5)
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    writer = GroupWriter(9, 0)
    huge = begin(writer, tmp_path, 0, tokens=99)
    assert huge is not None and begin(writer, tmp_path, 1) is None
    cluster.writers[0].step()
    assert begin(writer, tmp_path, 1) is not None and begin(writer, tmp_path, 2, tokens=99) is None


def test_routes_take_room_too(cluster, tmp_path, monkeypatch):
    room_for(monkeypatch, 2)
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    taken = {route_bytes: GroupWriter(9, route_bytes) for route_bytes in (0, 64)}
    held = {size: [begin(writer, tmp_path, number) for number in range(2)] for size, writer in taken.items()}
    assert None not in held[0] and held[64][0] is not None and held[64][1] is None


@pytest.mark.parametrize("seed", range(6))
def test_at_every_pace_what_is_taken_is_written_once_in_turn_and_what_is_refused_had_no_room(
    seed, cluster, tmp_path, monkeypatch
):
    drawn = random.Random(seed)
    room_for(monkeypatch, 5)
    most = group_writer.MOST_WAITING
    writer = GroupWriter(9, 0)
    under_way, given = {}, {}
    for number in range(30):
        for handle in cluster.writers:
            for _ in range(min(len(handle.files), drawn.randrange(3) if drawn.random() < 0.4 else 0)):
                handle.step()
        tokens = drawn.choice((1, 6, 30))
        size = group(number, tokens).bytes(0)
        waiting = [sum(file.parts.bytes(0) for file in handle.files) for handle in cluster.writers]
        ref = begin(writer, tmp_path, number, tokens)
        if ref is None:
            assert waiting and all(held and held + size > most for held in waiting)
            assert len(waiting) == group_writer.MOST_WRITERS or min(waiting) <= most // 4
            continue
        (taker,) = [place for place, handle in enumerate(cluster.writers) if ref in handle.files]
        assert taker == len(waiting) or waiting[taker] == min(waiting)
        under_way[str(number)] = ref
        given.setdefault(taker, []).append(number)
        assert all(len(h.files) <= 1 or sum(f.parts.bytes(0) for f in h.files) <= most for h in cluster.writers)
    for handle in cluster.writers:
        while handle.files:
            handle.step()
    assert [handle.finished for handle in cluster.writers] == [given[place] for place in range(len(given))]
    facts = writer.facts(under_way)
    assert {path.name for path in tmp_path.iterdir()} == {group_file(int(name), 0) for name in under_way}
    assert facts == {name: file_facts(tmp_path / group_file(int(name), 0)) for name in under_way}


def test_a_file_that_fails_frees_its_room_and_the_others_are_written(cluster, tmp_path, monkeypatch):
    room_for(monkeypatch, 2)
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    writer = GroupWriter(9, 0)
    refs = {"full": begin(writer, tmp_path, 0), "whole": begin(writer, tmp_path, 1)}
    (handle,) = cluster.writers
    with monkeypatch.context() as full:

        def write(path, record):
            raise OSError(errno.ENOSPC, "No space left on device")

        full.setattr(group_writer, "write_group", write)
        handle.step()
    assert begin(writer, tmp_path, 2) is not None
    handle.step()
    with pytest.raises(EnvironmentFault, match="full found no space left"):
        writer.facts(refs)
    with pytest.raises(EnvironmentFault):
        writer.written(refs["full"])
    assert writer.written(refs["whole"]) == file_facts(tmp_path / group_file(1, 0))


def test_a_writer_that_died_is_worse_than_a_full_disk(cluster, tmp_path):
    writer = GroupWriter(9, 0)
    refs = {name: begin(writer, tmp_path, number) for number, name in enumerate(("full", "died"))}
    (handle,) = cluster.writers
    full = OSError(errno.ENOSPC, "No space left on device")
    handle.step(ray.exceptions.RayTaskError("write", str(full), full).as_instanceof_cause())
    handle.step(DIED)
    with pytest.raises(LostProcess, match="died died"):
        writer.facts(refs)


def test_files_that_are_not_written_in_time_are_named(cluster, tmp_path):
    writer = GroupWriter(0, 0)
    refs = {name: begin(writer, tmp_path, number) for number, name in enumerate(("done", "late"))}
    cluster.writers[0].step()
    with pytest.raises(Interrupted, match="writing groups: no answer from late within"):
        writer.facts(refs)


def test_an_end_while_files_are_written_ends_every_writer_and_leaves_nobody_waiting(cluster, tmp_path, monkeypatch):
    room_for(monkeypatch, 4)
    writer = GroupWriter(9, 0)
    refs = [begin(writer, tmp_path, number) for number in range(6)]
    assert len(cluster.writers) == 3
    cluster.writers[0].step()
    writer.close()
    assert [handle.killed for handle in cluster.writers] == [1, 1, 1]
    assert writer.written(refs[0]) == file_facts(tmp_path / group_file(0, 0))
    for ref in refs[1:]:
        with pytest.raises(LostProcess):
            writer.written(ref)
    assert [path.name for path in tmp_path.iterdir()] == [group_file(0, 0)]


def test_one_that_wrote_nothing_has_nothing_to_end(cluster):
    GroupWriter(9, 0).close()
    assert cluster.writers == []
