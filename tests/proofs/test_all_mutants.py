"""Every mistake that stands in tests/proofs/mutants is seen by a unit test, but for those that nobody can see."""

import pytest
from mutants import mutants, wrong


@pytest.mark.long
@pytest.mark.timeout(2 * 3600)
def test_each_mutant_is_seen_by_a_unit_test_and_those_that_change_nothing_by_none():
    assert wrong(mutants(), jobs=2) == []
