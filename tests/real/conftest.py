"""How real tests are spread over the workers of pytest-xdist, and what the whole session must not leave behind.

A file has expensive fixtures and is never split. Files that start Ray and engines fill the machine, so they come in
turn, in two rows:
those whose test process holds the engines, and those that run commands; rehearsals, which run commands too, make the
rows equally long. Every other file may go anywhere. A new file that starts Ray or an engine belongs into one of the
rows; one that is in neither may run beside both.
"""

import os
from contextlib import suppress
from pathlib import Path

import pytest
from deadlines import TEST_S
from world import FOUR_GRPO_STEPS, GRPO, PRESET, make_world, overrides, succeeded
from xdist.scheduler import LoadScopeScheduling

ROWS = {
    "engines": (
        "test_sync", "test_reshard_faults", "test_dp2", "test_engine_sleep", "test_engine_slices", "test_engine_routes",
        "test_weights_in_flight", "test_rehearse",
    ),
    "runs": (
        "test_combinations", "test_runs", "test_colocated", "test_bad_input", "test_lost_worker", "test_engines_back",
        "test_ahead_runs", "test_dp_runs",
        "test_eval", "test_full_disk",
        "test_glm_run", "test_hybrid_run", "test_latent_run", "test_lora_run", "test_offload_run", "test_recipes",
        "test_submit",
        "test_supervised", "test_rank_restart", "test_turns", "test_held_turns", "test_wide_turns",
    ),
}  # fmt: skip
ROW_OF = {name: row for row, names in ROWS.items() for name in names}
# Rows first, in their order, as they take longest; then the file with most ranks, so that it does not come last and
# alone.
BEGIN_WITH = [name for names in ROWS.values() for name in names] + ["test_parity"]
# What is ours in shared memory: of multiprocessing and vLLM, buckets and arenas of syncs
OURS = ("/dev/shm/psm_*", "/dev/shm/mrl-sync-*", "/dev/shm/mrl-reshard-*")
BEFORE, LEFT = pytest.StashKey[set[Path]](), pytest.StashKey[set[Path]]()


class FileScheduling(LoadScopeScheduling):
    """A worker gets a whole file; those of a row are as one file."""

    def _split_scope(self, nodeid: str) -> str:
        name = Path(nodeid.partition("::")[0]).stem
        return ROW_OF.get(name, name)


@pytest.fixture(scope="session")
def four_grpo_steps(tmp_path_factory) -> tuple[Path, Path]:
    """A world, and the directory of a run of FOUR_GRPO_STEPS in it that nobody disturbed."""
    folder = tmp_path_factory.mktemp("four_grpo_steps")
    world = make_world(folder / "world")
    given = overrides(world, **FOUR_GRPO_STEPS)
    succeeded("train", str(PRESET), "--run-dir", str(folder / "run"), *GRPO, *given)
    return world, folder / "run"


def pytest_xdist_make_scheduler(config: pytest.Config, log) -> FileScheduling:
    """In the order of collection; xdist itself would begin with the file of most tests."""
    config.option.loadscopereorder = False
    return FileScheduling(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {name: number for number, name in enumerate(BEGIN_WITH)}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))
    for item in items:
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TEST_S))


def pytest_sessionstart(session: pytest.Session) -> None:
    if not _is_worker():
        session.config.stash[BEFORE] = _ours()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Nothing is left over of runs, engines and syncs, killed ones too.

    Asked once, at the end: files run beside each other.
    """
    if _is_worker() or not session.testscollected or session.config.option.collectonly:
        return
    if left := _ours() - session.config.stash[BEFORE] - _mapped():
        session.config.stash[LEFT] = left
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if left := config.stash.get(LEFT, None):
        terminalreporter.section("left over by these tests", red=True)
        terminalreporter.write_line("\n".join(sorted(map(str, left))))


def _ours() -> set[Path]:
    return {path for pattern in map(Path, OURS) for path in pattern.parent.glob(pattern.name)}


def _mapped() -> set[Path]:
    """Shared memory of living processes, which are somebody else's."""
    found = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            found |= {Path(line.split()[5]) for line in maps.read_text().splitlines() if " /dev/shm/" in line}
    return found


def _is_worker() -> bool:
    return "PYTEST_XDIST_WORKER" in os.environ
