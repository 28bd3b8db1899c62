"""Finished groups on disk: written once, named again by every checkpoint; what a full disk or late writer changes."""

from pathlib import Path

import numpy as np
import pytest
from replicas import InMemory, stored

from mrl.checkpoint.group_files import group_file, read_group, write_group
from mrl.checkpoint.manifest import file_facts
from mrl.data.samples import Sample
from mrl.errors import EnvironmentFault
from mrl.train import kept_groups
from mrl.train.kept_groups import KeptGroups, by_group, of_group
from mrl.train.spool import Spool


class Writer:
    """Writes when it is asked how it went, as late as may be; a disk that is full takes nothing into the spool."""

    def __init__(self):
        self.written: list[Path] = []
        self.is_full = False

    def begin(self, path, responses):
        return path, responses

    def facts(self, begun):
        return {name: self._write(*each) for name, each in begun.items()}

    def _write(self, path, responses):
        if path.parent.name == "spool" and self.is_full:
            raise EnvironmentFault("no space left")
        if path not in self.written:
            write_group(path, responses.read())
            self.written.append(path)
        return file_facts(path)


def group(number: int, responses: int = 3) -> InMemory:
    """Responses of 5, 6 ... tokens."""
    return stored([
        Sample(7, number, k, 99 + k, (1, 2), tuple(range(5 + k)), tuple(-i / 7 for i in range(5 + k)), "stop", k % 2)
        for k in range(responses)
    ])  # fmt: skip


@pytest.fixture
def spool(tmp_path):
    made = Spool(tmp_path / "spool", Writer())
    made.checkpoint = lambda step, *numbers: save(made, tmp_path / f"step-{step}", numbers)
    return made


def save(spool: Spool, folder: Path, numbers) -> dict:
    folder.mkdir()
    return spool.write(folder, {number: group(number) for number in numbers})


def test_a_file_has_every_column_and_the_same_bytes_for_the_same_responses(tmp_path):
    samples = group(4).read()
    facts = [write_group(tmp_path / name, samples) for name in ("one", "two")]
    assert facts[0] == facts[1] == file_facts(tmp_path / "one") and len(list(tmp_path.iterdir())) == 2
    for name, column in read_group(tmp_path / "one").arrays.items():
        np.testing.assert_array_equal(column, samples.arrays[name])
        assert column.dtype == samples.arrays[name].dtype


def test_a_finished_group_is_written_once_however_many_checkpoints_have_it(spool, tmp_path):
    for number in (4, 5):
        spool.put(number, group(number))
    first, second = spool.checkpoint(1, 4, 5, 6), spool.checkpoint(2, 5)
    assert first.keys() == {group_file(number) for number in (4, 5, 6)} and second == {
        group_file(5): first[group_file(5)]
    }
    assert [path.parent.name for path in spool._writer.written] == ["spool", "spool", "step-1"]
    assert (tmp_path / "step-2" / group_file(5)).stat().st_nlink == 3
    for step, facts in ((1, first), (2, second)):
        assert {name: file_facts(tmp_path / f"step-{step}" / name) for name in facts} == facts


def test_what_is_trained_on_leaves_the_spool_and_stays_in_its_checkpoint(spool, tmp_path):
    spool.put(4, group(4))
    facts = spool.checkpoint(1, 4)
    spool.forget([4])
    assert not spool.holds(4) and list((tmp_path / "spool").iterdir()) == []
    assert file_facts(tmp_path / "step-1" / group_file(4)) == facts[group_file(4)]
    spool.put(5, group(5))
    late = spool._begun[5]
    spool.forget([5])
    spool._writer.facts({"late": late})
    spool.forget([])
    assert list((tmp_path / "spool").iterdir()) == [], "one that was written after it was forgotten goes too"


def test_a_group_that_was_too_old_and_is_finished_again_stays(spool, tmp_path):
    spool.put(5, group(5))
    spool.forget([5])  # before its file is there
    spool.put(5, group(5))
    spool._writer.facts({"": spool._begun[5]})
    spool.forget([])
    assert [file.name for file in (tmp_path / "spool").iterdir()] == [group_file(5)]


def test_a_group_that_is_trained_on_while_its_checkpoint_is_written_is_in_it(spool, tmp_path):
    spool.put(4, group(4))
    spool._writer.facts({"": spool._begun[4]})
    (tmp_path / "spool" / group_file(4)).unlink()
    facts = spool.checkpoint(1, 4)
    assert file_facts(tmp_path / "step-1" / group_file(4)) == facts[group_file(4)]


def test_what_finds_no_room_beside_the_loop_is_told_once_and_written_with_the_checkpoint(spool, tmp_path, capsys):
    spool._writer.is_full = True
    for number in (4, 5):
        spool.put(number, group(number))
    facts = spool.checkpoint(1, 4, 5)
    assert facts.keys() == {group_file(4), group_file(5)} and (tmp_path / "step-1" / group_file(5)).exists()
    assert capsys.readouterr().out.count("no space left") == 1


def test_a_disk_without_second_names_gets_a_copy(spool, tmp_path, monkeypatch):
    monkeypatch.setattr("os.link", lambda *_: (_ for _ in ()).throw(PermissionError("no links")))
    spool.put(4, group(4))
    facts = spool.checkpoint(1, 4)
    assert file_facts(tmp_path / "step-1" / group_file(4)) == facts[group_file(4)]


def test_a_resumed_process_has_its_checkpoints_files_and_nothing_else(spool, tmp_path):
    spool.put(4, group(4))
    facts = spool.checkpoint(1, 4)
    (tmp_path / "spool" / "group-9.npz").touch()
    again = Spool(tmp_path / "spool", Writer())
    again.take_over(4, tmp_path / "step-1" / group_file(4), facts[group_file(4)])
    assert save(again, tmp_path / "step-2", [4]) == facts and again._writer.written == []
    again.close()
    assert not (tmp_path / "spool").exists() and file_facts(tmp_path / "step-2" / group_file(4)) == facts[group_file(4)]


def test_room_is_asked_for_what_the_spool_has_not(spool, monkeypatch):
    """Two prompt tokens, and 5, 6 and 7 of responses: 4 bytes an id, 4 a log-prob."""
    monkeypatch.setattr(kept_groups, "StoredSamples", InMemory)
    responses = {(number, k): group(number).take(np.array([k])) for number in (4, 5) for k in range(3)}
    spool.put(4, of_group(4, by_group(responses)[4]))
    kept = KeptGroups(None, None, responses, {}, (), spool)
    without = 4 * (3 * 2 + 5 + 6 + 7) + 4 * (5 + 6 + 7)
    assert kept.bytes_to_write(0) == without
    assert kept.bytes_to_write(48) == without + 48 * (3 * 2 + 5 + 6 + 7)
