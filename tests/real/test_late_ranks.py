"""Who stops, or leaves out a collective, is named with the operation and its number: real ranks over gloo, no Ray."""

import pickle
import random
import re
import time
from pathlib import Path

import pytest
from deadlines import END_S
from late_worker import LAYERS, STEPS
from ranks import Rank

from mrl.cluster import late_ranks
from mrl.cluster.calls import Late

pytestmark = [pytest.mark.real, pytest.mark.long]

TRIALS = 10
CALLS = STEPS * (3 * LAYERS + 2)
SILENT_S = 0.5  # a rank that runs answers in hundredths
STANDS_S = 0.3


class Asked:
    """In place of Ray: asks the ranks by files."""

    def __init__(self, out: Path, world_size: int):
        self._out, self._size, self._number = out, world_size, -1
        self._method = ""

    def refs(self, method: str) -> dict[str, int]:
        self._number += 1
        self._method = method
        (self._out / f"ask-{self._number}").touch()
        return {f"rank {rank}": rank for rank in range(self._size)}

    def answered(self, asked: dict[str, int]) -> dict:
        files = {name: self._out / f"trail-{self._number}-{rank}" for name, rank in asked.items()}
        end = time.monotonic() + SILENT_S
        while time.monotonic() < end and not all(file.exists() for file in files.values()):
            time.sleep(0.01)
        trails = {name: pickle.loads(file.read_bytes()) for name, file in files.items() if file.exists()}
        if self._method == "collectives":
            return {name: own.total for name, own in trails.items()}
        return trails

    def until_they_stand(self) -> None:
        """Nobody has come to another collective for a while."""
        end = time.monotonic() + END_S
        before = None
        while time.monotonic() < end:
            now = self.answered(self.refs("collectives"))
            if now == before and any(now.values()):
                return
            before = now
            time.sleep(STANDS_S)
        raise AssertionError("they never stand")


def named(tmp_path: Path, monkeypatch, how: str, seed: int) -> tuple[int, Late]:
    """A trial: the culprit, and what is said of it."""
    draw = random.Random(seed)
    world_size = 2 + 2 * (seed % 2)
    culprit = draw.randrange(world_size)
    at = draw.randrange(CALLS // 2, CALLS)
    out = tmp_path / str(seed)
    out.mkdir()
    asked = Asked(out, world_size)
    monkeypatch.setattr(late_ranks, "answered", asked.answered)
    ranks = []
    try:
        for rank in range(world_size):
            words = [str(rank), str(world_size), str(out), how, str(culprit), str(at)]
            ranks.append(Rank(Path(__file__).with_name("late_worker.py"), words, out / f"rank-{rank}.log"))
        asked.until_they_stand()
        return culprit, late_ranks.with_cause(Late("update: no answer"), asked.refs)
    finally:
        for rank in ranks:
            rank.end()


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("skips", r"rank {0} (has not come to|went on to) \w+ \d+ of group \d+ \(ranks"),
        ("stops", r"rank {0} did not even write its stacks: .*came to \w+ \d+ of group \d+ \(ranks"),
    ],
)
def test_the_right_one_is_named_in_ten_of_ten(tmp_path, monkeypatch, how, said):
    monkeypatch.setattr(late_ranks, "AGAIN_S", 0.2)
    wrong = {}
    for seed in range(TRIALS):
        culprit, error = named(tmp_path, monkeypatch, how, seed)
        if error.processes != (f"rank {culprit}",) or not re.search(said.format(culprit), str(error)):
            wrong[seed] = (culprit, str(error))
    assert not wrong
