"""Compares several runs: their settings, and whether their validation scores differ by more than chance.

The first run is the reference. A test of validation responses distinguishes two sets of weights. It does not tell how
much another seed of training would change them. If there are several tests, each must pass at its share of the 5 %. So
all together are wrong no more often than one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mrl.errors import ConfigError
from mrl.tools.report.paired_tests import LEVEL, Difference, differences
from mrl.tools.report.run_record import RunRecord, read_run

# settings on which a response's score depends
REWARD_SETTINGS = ("reward.function", "reward.custom_reward_function", "reward.bonus_rules", "reward.failure_score")
NO_SETTINGS = ("trainer.run_dir", "trainer.experiment_name", "trainer.resume_mode", "trainer.resume_from_path")

_SHOWN = ("quantity", "prompts", "first", "second", "mean", "half_width", "p")


@dataclass(frozen=True)
class ValidationTest:
    """A test of `other` against the first run, on one data source after the same number of steps."""

    other: str
    source: str
    step: int
    difference: Difference
    level: float

    def words(self) -> str:
        """Describes the test in a sentence."""
        return f"{self.other}, {self.source}, after step {self.step}: {self.difference.words(self.level)}"


@dataclass(frozen=True)
class Comparison:
    """Runs by their names on the page. `settings`: differing keys, with a value for each run. `notes`: what makes the
    runs hard to compare.
    """

    runs: dict[str, RunRecord]
    settings: dict[str, tuple[str, ...]]
    tests: tuple[ValidationTest, ...]
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Returns plain data: `runs`, `settings`, `held_out`, `notes`."""
        tests = [_test_json(test) for test in self.tests]
        runs = {name: {"path": str(run.path), "steps": run.last_step} for name, run in self.runs.items()}
        return {"runs": runs, "settings": self.settings, "held_out": tests, "notes": list(self.notes)}


def _test_json(test: ValidationTest) -> dict[str, Any]:
    return {
        "run": test.other,
        "source": test.source,
        "step": test.step,
        "level": test.level,
        "significant": test.difference.significant(test.level),
    } | {name: getattr(test.difference, name) for name in _SHOWN}


def compare(paths: Sequence[Path]) -> Comparison:
    """Reads the runs and compares them.

    Raises ConfigError for fewer than two, for one that is named twice, and for folders without a run.
    """
    if len(paths) < 2:
        raise ConfigError("give at least two run directories")
    if len({path.resolve() for path in paths}) < len(paths):
        raise ConfigError("a run directory is named twice; each is compared with the first one, once")
    runs = dict(zip(_names(paths), map(read_run, paths), strict=True))
    return Comparison(runs, _settings(list(runs.values())), _tests(runs), tuple(_notes(runs)))


def _names(paths: Sequence[Path]) -> list[str]:
    """Returns the shortest ends of the paths that distinguish them."""
    parts = [path.resolve().parts for path in paths]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-count:]) for part in parts]
        if len(set(names)) == len(names):
            break
    return names


def _settings(runs: Sequence[RunRecord]) -> dict[str, tuple[str, ...]]:
    keys = dict.fromkeys(key for run in runs for key in run.settings.by_key if key not in NO_SETTINGS)
    rows = {key: tuple(run.settings.text(key, "(no such key)") for run in runs) for key in keys}
    return {key: values for key, values in rows.items() if len(set(values)) > 1}


def _tests(runs: dict[str, RunRecord]) -> tuple[ValidationTest, ...]:
    names = list(runs)
    first = runs[names[0]]
    found = []
    for name in names[1:]:
        if step := _shared_step(first, runs[name]):
            changes = differences(first.responses(step), runs[name].responses(step))
            found += [(name, source, step, difference) for source, difference in changes.items()]
    return tuple(ValidationTest(*each, LEVEL / len(found)) for each in found)


def _shared_step(first: RunRecord, second: RunRecord) -> int | None:
    """Returns the last step after training at which both were validated."""
    return max((step for step in set(first.validation_steps) & set(second.validation_steps) if step > 0), default=None)


def _notes(runs: dict[str, RunRecord]) -> list[str]:
    names = list(runs)
    notes = []
    first = runs[names[0]]
    for name in names[1:]:
        run = runs[name]
        if other := [key for key in _settings((first, run)) if key.startswith(REWARD_SETTINGS)]:
            notes.append(
                f"{name} and {names[0]} have different rewards ({', '.join(other)}): their `reward` is not of one "
                "scale, and their `acc` only where both mean the same by it."
            )
        if _shared_step(first, run) is None:
            notes.append(
                f"{name} and {names[0]} were never validated after the same step: their validation scores are "
                "not compared."
            )
        elif not _same_start(first, run):
            notes.append(
                f"{name} and {names[0]} answered differently before training: their weights, prompts or sampling "
                "seeds differ."
            )
        if run.last_step != first.last_step:
            notes.append(f"{name} has {run.last_step} steps, {names[0]} {first.last_step}.")
    return notes


def _same_start(first: RunRecord, second: RunRecord) -> bool:
    """Tells whether both answered the validation prompts equally before training; true if one has no such answers."""
    if 0 not in first.validation_steps or 0 not in second.validation_steps:
        return True
    first_answers = [one.output for one in first.responses(0)]
    second_answers = [one.output for one in second.responses(0)]
    return first_answers == second_answers
