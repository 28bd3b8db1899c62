"""Drawn runs whose writes are late or cut and which are killed; the long tests have a thousand of them."""

from collections import Counter

import pytest
from late_writes import KINDS, Case
from seldom import seldom
from test_generation import in_memory  # noqa: F401

CASES = 25  # of each part


@pytest.mark.parametrize("part", seldom(range(40), 0))
def test_nothing_is_lost_or_trained_on_twice_however_late_its_files_are(part, tmp_path):
    seen = Counter()
    for number in range(CASES * part, CASES * part + CASES):
        (folder := tmp_path / str(number)).mkdir()
        case = Case(number, folder).run()
        seen.update(case.seen + Counter([case.kind]))
    assert all(seen[kind] for kind in KINDS)
    assert all(seen[what] > 2 for what in ("kills", "resumes", "cuts", "failed saves", "late saves", "replayed")), seen
