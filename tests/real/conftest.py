"""How real tests are spread over the workers of pytest-xdist: files have expensive fixtures and are never split."""

from pathlib import Path

import pytest
from deadlines import TEST_S
from xdist.scheduler import LoadScopeScheduling

# One after the other: they start Ray and engines, and look for what is left of them in /dev/shm and /tmp. First, as they take longest.
IN_TURN = (
    "test_sync", "test_runs", "test_reshard_faults", "test_recipes", "test_lost_worker", "test_bad_input", "test_rehearse", "test_dp2",
    "test_dp_runs",
)  # fmt: skip


class FileScheduling(LoadScopeScheduling):
    """A worker gets a whole file; those that come in turn are as one file."""

    def _split_scope(self, nodeid: str) -> str:
        name = Path(nodeid.partition("::")[0]).stem
        return "in turn" if name in IN_TURN else name


def pytest_xdist_make_scheduler(config: pytest.Config, log) -> FileScheduling:
    """In the order of collection; xdist itself would begin with the file of most tests."""
    config.option.loadscopereorder = False
    return FileScheduling(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.stem not in IN_TURN)
    for item in items:
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TEST_S))
