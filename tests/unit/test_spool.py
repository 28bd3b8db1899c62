"""Finished groups on disk: written once, named again by every checkpoint; what a full disk or late writer changes."""

import time
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest
from orders import files_order
from replicas import stored

from mrl.checkpoint.group_files import group_file, write_group
from mrl.checkpoint.manifest import file_facts
from mrl.config.load import load_config
from mrl.data.samples import Sample
from mrl.driver.assemble_files import _spool
from mrl.errors import EnvironmentFault, Interrupted, LostLock, NumericAbort
from mrl.generate.group_writer import GroupParts, record_of
from mrl.generate.kept_groups import KeptGroups
from mrl.generate.sampled_by import UNKNOWN
from mrl.generate.spool import Spool
from mrl.record.run_dir import RunDir
from mrl.schedule.groups import Group, State
from mrl.schedule.ledger import Ledger


class Writer:
    """Writes when it is asked how it went, as late as may be; a disk that is full takes nothing into the spool."""

    def __init__(self):
        self.written_files: list[Path] = []
        self.is_full = False
        self.most = 99  # files that are under way at once
        self.under_way = 0

    def begin(self, path, parts):
        if self.under_way >= self.most:
            return None
        self.under_way += 1
        return path, parts

    def facts(self, begun):
        return {name: self._write(*each) for name, each in begun.items()}

    def written(self, begun):
        path, _ = begun
        return file_facts(path) if path in self.written_files else None

    def _write(self, path, parts):
        if path.parent.parent.name == "spool" and self.is_full:
            raise EnvironmentFault("no space left")
        if path not in self.written_files:
            write_group(path, record_of(parts))
            self.written_files.append(path)
            self.under_way -= 1
        return file_facts(path)


def group(number: int, responses: int = 3) -> GroupParts:
    """Responses of 5, 6 ... tokens."""
    rows = [
        stored([Sample(7, 9, 9, 99 + k, (1, 2), tuple(range(5 + k)), tuple(-i / 7 for i in range(5 + k)), "stop", 0)])
        for k in range(responses)
    ]
    return GroupParts(number, 0, dict(enumerate(rows)), {})


@pytest.fixture
def spool(tmp_path):
    made = Spool(tmp_path / "spool", Writer())
    made.checkpoint = lambda step, *numbers: save(made, tmp_path / f"step-{step}", numbers)
    return made


def save(spool: Spool, folder: Path, numbers) -> dict:
    folder.mkdir()
    files = spool.pinned(numbers)
    facts = spool.write(folder, files, {number: group(number) for number in numbers})
    spool.release(files.values())
    return facts


def test_a_finished_group_is_written_once_however_many_checkpoints_have_it(spool, tmp_path):
    for number in (4, 5):
        spool.put(group(number))
    first, second = spool.checkpoint(1, 4, 5, 6), spool.checkpoint(2, 5)
    assert first.keys() == {group_file(number, 0) for number in (4, 5, 6)}
    assert second == {group_file(5, 0): first[group_file(5, 0)]}
    assert [path.parent for path in spool._writer.written_files] == [spool.folder, spool.folder, tmp_path / "step-1"]
    assert (tmp_path / "step-2" / group_file(5, 0)).stat().st_nlink == 3
    for step, facts in ((1, first), (2, second)):
        assert {name: file_facts(tmp_path / f"step-{step}" / name) for name in facts} == facts


def test_what_is_trained_on_leaves_the_spool_and_stays_in_its_checkpoint(spool, tmp_path):
    spool.put(group(4))
    facts = spool.checkpoint(1, 4)
    spool.forget([4])
    assert not spool.pinned([4]) and list(spool.folder.iterdir()) == []
    assert file_facts(tmp_path / "step-1" / group_file(4, 0)) == facts[group_file(4, 0)]
    spool.put(group(5))
    late = spool._files[5].under_way
    spool.forget([5])
    spool._writer.facts({"late": late})
    spool.forget([])
    assert list(spool.folder.iterdir()) == [], "one that was written after it was forgotten goes too"


def test_what_finds_no_room_beside_the_loop_is_told_once_and_written_with_the_checkpoint(spool, tmp_path, capsys):
    spool._writer.is_full = True
    for number in (4, 5):
        spool.put(group(number))
    facts = spool.checkpoint(1, 4, 5)
    assert facts.keys() == {group_file(4, 0), group_file(5, 0)} and (tmp_path / "step-1" / group_file(5, 0)).exists()
    assert capsys.readouterr().out.count("no space left") == 1


def test_what_comes_faster_than_it_is_written_is_written_with_the_checkpoint(spool, tmp_path):
    """Nothing is queued beyond what may wait, not by a checkpoint either."""
    spool._writer.most = 2
    for number in range(5):
        spool.put(group(number))
    files = spool.pinned(range(5))
    assert files.keys() == {0, 1}
    spool._writer.facts({str(number): file.under_way for number, file in files.items()})
    facts = spool.checkpoint(1, *range(5))
    assert facts.keys() == {group_file(number, 0) for number in range(5)}
    assert {name: file_facts(tmp_path / "step-1" / name) for name in facts} == facts
    assert [path.parent for path in spool._writer.written_files] == [spool.folder] * 2 + [tmp_path / "step-1"] * 3


def test_a_disk_without_second_names_gets_a_copy(spool, tmp_path, monkeypatch):
    monkeypatch.setattr("os.link", lambda *_: (_ for _ in ()).throw(PermissionError("no links")))
    spool.put(group(4))
    facts = spool.checkpoint(1, 4)
    assert file_facts(tmp_path / "step-1" / group_file(4, 0)) == facts[group_file(4, 0)]


def test_a_resumed_process_has_its_checkpoints_files_and_nothing_else(spool, tmp_path):
    name = group_file(4, 0)
    spool.put(group(4))
    facts = spool.checkpoint(1, 4)
    (tmp_path / "spool" / "group-9.0.npz").touch()  # of an older version
    again = Spool(tmp_path / "spool", Writer())
    assert list((tmp_path / "spool").iterdir()) == [again.folder] and not list(again.folder.iterdir())
    again.take_over(4, tmp_path / "step-1" / name, facts[name])
    assert save(again, tmp_path / "step-2", [4]) == facts and again._writer.written_files == []
    again.close()
    assert not (tmp_path / "spool").exists() and file_facts(tmp_path / "step-2" / name) == facts[name]


def test_a_writer_that_outlives_its_process_replaces_no_file_of_the_next(spool, tmp_path, monkeypatch):
    """It was killed in the middle of a group; who resumes makes a group of the same number and attempt."""
    left = spool.folder / group_file(4, 0)
    again = Spool(tmp_path / "spool", Writer())
    again.put(group(4, responses=1))
    written = again._writer.facts({"": again._files[4].under_way})[""]
    with suppress(FileNotFoundError):
        write_group(left, record_of(group(4)))
    assert save(again, tmp_path / "step-1", [4]) == {group_file(4, 0): written}
    assert file_facts(tmp_path / "step-1" / group_file(4, 0)) == written


def test_an_older_folder_that_cannot_be_removed_is_no_obstacle(spool, tmp_path, monkeypatch):
    """A writer that still runs makes a file in it while it is removed."""
    monkeypatch.setattr("mrl.generate.spool.shutil.rmtree", lambda path, ignore_errors: None)
    again = Spool(tmp_path / "spool", Writer())
    assert again.folder != spool.folder and again.folder.is_dir()


def test_one_that_lost_the_run_directory_puts_and_removes_nothing(spool, tmp_path):
    with pytest.raises(LostLock):
        Spool(tmp_path / "spool", Writer(), lost)
    assert spool.folder.is_dir()
    spool._check = lost
    with pytest.raises(LostLock):
        spool.put(group(4))
    assert spool._writer.under_way == 0


def test_what_a_writer_failed_at_is_not_waited_for(spool):
    for number in (4, 5):
        spool.put(group(number))
    late = spool._files[5].under_way

    def written(begun):
        if begun is not late:
            raise EnvironmentFault("no space left")
        return None

    spool._writer.written = written
    spool.forget([4, 5])
    assert [file.path.name for file in spool._unheld] == [group_file(5, 0)], "this one may still come"
    spool._writer.facts({"late": late})
    spool.forget([])
    assert not spool._unheld and not list(spool.folder.iterdir())


def test_the_lock_is_looked_at_only_where_a_line_is_due(tmp_path):
    looks = []
    spool = Spool(tmp_path / "spool", Writer(), lambda: looks.append(True))
    spool.serve(UNKNOWN.by(0, "w"), most=9)
    spool.put(group(4))
    looks.clear()
    for _ in range(5):
        spool.note()
    assert not looks, "nothing is written yet"
    spool._writer.facts({"": spool._files[4].under_way})
    for _ in range(5):
        spool.note()
    assert len(looks) == 1
    spool.put(group(5))
    spool._writer.facts({"": spool._files[5].under_way})
    spool._check = lost
    with pytest.raises(LostLock):
        spool.note()
    assert (spool.folder / "by-0.jsonl").read_text().count("group-") == 1


def lost():
    raise LostLock("another's")


def test_a_checkpoint_waits_for_a_writer_that_takes_nothing_yet_without_asking_all_the_time(spool, tmp_path):
    """What keeps it busy was begun by others: there is nothing of the checkpoint's own to wait for."""
    spool._writer.most = 0
    asked = []
    begin = spool._writer.begin

    def busy(path, parts):
        asked.append(time.monotonic())
        spool._writer.most = 99 * (asked[-1] - asked[0] > 0.5)
        return begin(path, parts)

    spool._writer.begin = busy
    assert spool.checkpoint(1, 4).keys() == {group_file(4, 0)}
    assert 2 <= len(asked) <= 20


def test_room_is_asked_for_what_the_spool_has_not(spool):
    """Two prompt tokens, and 5, 6 and 7 of responses: 4 bytes an id, 4 a log-prob."""
    spool.put(group(4))
    ledger = Ledger(
        None, 0, 6, 0, (), tuple(Group(n, [5, 6, 7], [True] * 3, state=State.FINISHED) for n in (4, 5)), None
    )
    kept = KeptGroups.of(ledger, None, {4: group(4), 5: group(5)}, (), spool, UNKNOWN.by(0, "w"))
    without = 4 * (3 * 2 + 5 + 6 + 7) + 4 * (5 + 6 + 7)
    assert kept.bytes_to_write(0) == without
    assert kept.bytes_to_write(48) == without + 48 * (3 * 2 + 5 + 6 + 7)


@pytest.mark.parametrize("error", [None, Interrupted("an engine died"), NumericAbort("nan"), KeyboardInterrupt()])
def test_however_a_run_ends_its_spool_goes_once_nobody_writes(tmp_path, monkeypatch, error):
    folder, seen = tmp_path / "spool", []
    writer = Writer()
    writer.close = lambda: seen.append(folder.is_dir())
    monkeypatch.setattr("mrl.driver.assemble_files.GroupWriter", lambda timeout_s, route_bytes: writer)
    config = load_config("parallel_configs/tiny-moe/cpu.yaml", None, ["trainer.schedule=one_step_off"]).config
    with pytest.raises(type(error)) if error else nullcontext(), _spool(files_order(config), RunDir(tmp_path), None):
        (next(folder.iterdir()) / "group-3.0.npz").touch()
        if error:
            raise error
    assert seen == [True] and not folder.exists()
