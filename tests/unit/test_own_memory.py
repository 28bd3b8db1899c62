"""A command's own shared memory: what it leaves there is told, what others have in theirs is not."""

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "proofs"))

from own_memory import OwnMemory, is_possible

pytestmark = pytest.mark.skipif(not is_possible(), reason="needs root, or namespaces of users")
LEAVES = "from pathlib import Path; Path('/dev/shm/psm_left').touch(); Path('/dev/shm/mrl-sync-left').mkdir()"
GOES = """
from multiprocessing import shared_memory
one = shared_memory.SharedMemory(create=True, size=64)
one.unlink()
"""


def test_what_a_command_leaves_is_told_and_gone_with_its_memory():
    with OwnMemory() as memory:
        subprocess.run(memory.command([sys.executable, "-c", LEAVES]), check=True)
        assert memory.left() == ["mrl-sync-left", "psm_left"]
        assert not Path("/dev/shm/psm_left").exists()
    assert not memory.folder.exists()


def test_what_others_have_meanwhile_is_not_told():
    with OwnMemory() as memory, OwnMemory() as other:
        subprocess.run(other.command([sys.executable, "-c", LEAVES]), check=True)
        subprocess.run(memory.command([sys.executable, "-c", GOES]), check=True)
        assert memory.left() == []


def test_the_command_is_the_process_that_was_started():
    with OwnMemory() as memory:
        process = subprocess.Popen(memory.command(["sh", "-c", "echo $$"]), stdout=subprocess.PIPE, text=True)
        assert int(process.communicate()[0]) == process.pid
