"""A node with other software is told by address, package and process."""

import pytest

from mrl.errors import EnvironmentFault
from mrl.process.same_software import check_same, software

HERE = {"torch": "2.13.0", "ray": "2.60.0", "mrl's sources": "aaaa"}


def test_this_process_is_as_itself_and_knows_its_packages():
    check_same({"rank 0": ("10.0.0.1", software())})
    assert {"Python", "torch", "mrl", "mrl's sources"} <= software().keys()
    assert "+" not in software()["torch"]  # a build for CPUs on the driver's node is the same release


def test_nodes_that_differ_are_told_together():
    others = {
        "rank 0": ("10.0.0.1", HERE),
        "engine 0": ("10.0.0.2", HERE | {"torch": "2.12.0"}),
        "engine 1": ("10.0.0.2", HERE | {"torch": "2.12.0"}),
        "engine 2": ("10.0.0.3", HERE | {"mrl's sources": "bbbb"}),
    }
    with pytest.raises(EnvironmentFault) as told:
        check_same(others, HERE)
    assert "torch is 2.12.0 on 10.0.0.2 and 2.13.0 here (engine 0, engine 1)" in str(told.value)
    assert "mrl's sources is bbbb on 10.0.0.3 and aaaa here (engine 2)" in str(told.value)


def test_what_only_one_side_has_is_no_difference():
    check_same({"engine 0": ("10.0.0.2", HERE | {"vllm": "0.32.0"})}, HERE | {"mbridge": "0.15.1"})
