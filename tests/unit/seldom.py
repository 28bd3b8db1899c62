"""Which cases of a test run every time: the others are marked long (`scripts/test.sh long`)."""

from collections.abc import Iterable
from typing import Any

import pytest


def seldom(cases: Iterable[Any], *kept: Any) -> list[Any]:
    """For `parametrize`: the cases, those marked long that are not `kept`, which names cases, or their places.

    A case that is a tuple has a value for each argument.
    """
    cases = list(cases)
    often = [one if one in cases else cases[one] for one in kept]
    values = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [
        case if case in often else pytest.param(*of_it, marks=pytest.mark.long)
        for case, of_it in zip(cases, values, strict=True)
    ]
