"""The run directory of each node is the driver's, or that is told."""

import re
import shutil
import threading

import pytest

from mrl.errors import EnvironmentFault
from mrl.process import shared_folder
from mrl.process.shared_folder import check_seen, marked


def test_a_mark_is_seen_where_it_was_written_and_leaves_nothing(tmp_path):
    with marked(tmp_path / "run") as mark:
        assert mark.is_seen()
    assert list((tmp_path / "run").iterdir()) == []


def test_another_folder_of_that_name_is_not_taken_for_it(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_folder, "SEEN_S", 0.05)
    with marked(tmp_path / "run") as mark:
        shutil.rmtree(tmp_path / "run")
        assert not mark.is_seen(), "not there"
        with marked(tmp_path / "run") as other:
            assert other.is_seen() and not mark.is_seen()


def test_a_mark_that_is_seen_late_is_seen(tmp_path):
    with marked(tmp_path / "run") as mark:
        (tmp_path / "run").rename(tmp_path / "elsewhere")
        threading.Timer(0.3, lambda: (tmp_path / "elsewhere").rename(tmp_path / "run")).start()
        assert mark.is_seen()


def test_nodes_that_do_not_see_it_are_named_with_their_processes(tmp_path):
    check_seen(tmp_path, {"rank 0": ("10.0.0.1", True), "rank 1": ("10.0.0.2", True)})
    seen = {"rank 0": ("10.0.0.1", True), "rank 1": ("10.0.0.2", False), "rank 3": ("10.0.0.2", False)}
    said = "is not the same folder on every node: what is written here is not seen on 10.0.0.2 (rank 1, rank 3)"
    with pytest.raises(EnvironmentFault, match=re.escape(said)):
        check_seen(tmp_path, seen)
