"""How real tests are spread over two workers of pytest-xdist (`--dist loadgroup`): files have expensive fixtures and are never split."""

from pathlib import Path

import pytest

# One after the other: they start Ray and engines, and look for what is left of them in /dev/shm and /tmp. First, as they take longest.
IN_TURN = ("test_sync", "test_runs", "test_reshard_faults", "test_recipes", "test_lost_worker", "test_bad_input")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: Path(item.path).stem not in IN_TURN)
    for item in items:
        name = Path(item.path).stem
        item.add_marker(pytest.mark.xdist_group("in turn" if name in IN_TURN else name))
