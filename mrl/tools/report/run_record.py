"""The content of a run directory as typed data, for a running, ended or killed run."""

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic_core import PydanticUndefined

from mrl.config.load import COMMAND_LINE, RECIPES, available_recipes, load_config
from mrl.config.schema import RunConfig, schema_keys
from mrl.config.yaml_tree import Node, dump_value, parse_yaml
from mrl.driver.advice import advisers
from mrl.errors import ConfigError, MrlError
from mrl.plain_files import CONFIG_BYTES, LINES_BYTES, open_regular, parse_json, read_text, reason
from mrl.plan.run_plan import load_plan
from mrl.record.attempts import Attempt, read_attempts
from mrl.record.goodput import Goodput, goodput_of
from mrl.record.run_dir import RunDir, read_metrics
from mrl.record.run_lock import in_use
from mrl.tools.report.columns import STEP, Curve, curves_of
from mrl.tools.report.paired_tests import Response, invalid_lines, read_responses

_DEFAULT = "default"
_RECIPE = "recipe "
_LEAF = re.compile(r"(?P<indent> *)(?P<key>[^\s:#][^:]*):(?: (?P<value>.*?)  # (?P<origin>.*))?")
_COMMENTED = re.compile(r"^( +)# ")  # a default whose key would say more if it were read again


@dataclass(frozen=True)
class Setting:
    """One key: its value as YAML text, and its origin."""

    key: str
    value: str
    origin: str

    @property
    def is_own(self) -> bool:
        """Tells whether the user or a preset set it, not the recipe or the schema."""
        return self.origin != _DEFAULT and not self.origin.startswith(_RECIPE)

    @property
    def on_command_line(self) -> bool:
        """Tells whether `--set` set it."""
        return self.origin == COMMAND_LINE


@dataclass(frozen=True)
class Settings:
    """A complete resolved configuration. `recipe`: the name in its head; None if absent."""

    by_key: dict[str, Setting]
    recipe: str | None
    head: tuple[str, ...]

    def text(self, key: str, missing: str = "") -> str:
        """Returns the value of a key: text unchanged, anything else as YAML writes it."""
        if key not in self.by_key:
            return missing
        value = self.by_key[key].value
        plain = parse_yaml(value, key, with_lines=False).value
        if isinstance(plain, str):
            return plain
        return value

    def number(self, key: str) -> float | None:
        """Returns the value of a key if it is a number, else None."""
        try:
            return float(self.text(key))
        except ValueError:
            return None

    def own(self) -> list[tuple[Setting, str]]:
        """Returns settings that differ from the recipe and the schema, each with the value that it would otherwise
        have.
        """
        usual = _usual(self.recipe)
        rows = [(setting, usual.get(key, "")) for key, setting in self.by_key.items() if setting.is_own]
        return [(setting, value) for setting, value in rows if setting.value != value]


def read_settings(path: Path) -> Settings:
    """Reads a resolved configuration. Raises ConfigError for any other file."""
    try:
        text = read_text(path, CONFIG_BYTES)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as text ({reason(error)})") from None
    by_key: dict[str, Setting] = {}
    open_keys: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        match = _LEAF.fullmatch(_COMMENTED.sub(r"\1", line))
        if match is None:
            raise ConfigError(f"{path}:{number}: not a line of a resolved configuration: {line[:80]}")
        open_keys = [*open_keys[: len(match["indent"]) // 2], match["key"].strip()]
        if match["value"] is not None:
            key = ".".join(open_keys)
            by_key[key] = Setting(key, match["value"], match["origin"])
    if not by_key:
        raise ConfigError(f"{path}: holds no key; it is not a resolved configuration")
    head = tuple(line.removeprefix("# ") for line in text.splitlines() if line.startswith("# "))
    return Settings(by_key, _recipe(head), head)


def _recipe(head: tuple[str, ...]) -> str | None:
    names = [line.removeprefix("recipe: ").strip() for line in head if line.startswith("recipe: ")]
    if names and names[0] != "none":
        return names[0]
    return None


def _usual(recipe: str | None) -> dict[str, str]:
    """Returns the value of every key if only the recipe was given."""
    fields = schema_keys()
    usual = {key: dump_value(field.default) for key, field in fields.items() if field.default is not PydanticUndefined}
    if recipe in available_recipes():
        tree = parse_yaml(
            (RECIPES / f"{recipe}.yaml").read_text(encoding="utf-8"), f"recipe {recipe}", with_lines=False
        )
        usual |= {key: _as_resolved(text, fields, key) for key, text in _leaves(tree)}
    return usual


def _as_resolved(text: str, fields: dict, key: str) -> str:
    """Formats a float of the schema in one way, however the recipe wrote it."""
    if key in fields and fields[key].annotation in (float, float | None) and text != "null":
        return dump_value(float(text))
    return text


def _leaves(node: Node, prefix: tuple[str, ...] = ()) -> list[tuple[str, str]]:
    if not node.is_mapping:
        return [(".".join(prefix), dump_value(node.value))]
    return [leaf for key, child in node.value.items() for leaf in _leaves(child, (*prefix, str(key)))]


_NUMBERED = re.compile(r"step-(\d+)(\.\w+)?")
LOG_TAIL_LINES = 12
LOG_TAIL_BYTES = 200_000
_TROUBLE = re.compile(r"\b(ERROR|Error|error|Traceback|Exception|Killed|OutOfMemory)\b")


class NoStepYet(ConfigError):
    """A run directory with neither a step nor a failure, of which no page can be made."""


@dataclass(frozen=True)
class Advice:
    """Advice that a run printed, or would have printed, about a step."""

    step: int
    text: str


@dataclass(frozen=True)
class RunRecord:
    """One run. `config` is None if another version wrote it. `notes` tell what could not be read."""

    path: Path
    settings: Settings
    config: RunConfig | None
    plan: dict[str, Any] | None
    rows: list[dict[str, Any]]
    attempts: list[Attempt]
    running: bool
    notes: tuple[str, ...]

    @property
    def name(self) -> str:
        """Name of the directory."""
        return self.path.resolve().name

    @cached_property
    def curves(self) -> dict[str, Curve]:
        """Every metric over steps."""
        return curves_of(self.rows)

    @cached_property
    def by_step(self) -> dict[int, dict[str, Any]]:
        """The line of each step; the last line of a step that was written twice."""
        return {row[STEP]: row for row in self.rows}

    @property
    def last_step(self) -> int:
        """The number of finished steps."""
        return max(self.by_step, default=0)

    @property
    def compares_responses(self) -> bool:
        """Tells whether the run learns from how responses to one prompt compare; true if that is unknown."""
        return self.config is None or self.config.compares_responses

    @property
    def total_steps(self) -> int | None:
        """Planned steps of the run, if its configuration tells."""
        return self.settings.number("trainer.total_training_steps") and int(
            self.settings.number("trainer.total_training_steps")
        )

    @property
    def finished(self) -> bool:
        """Tells whether the run is complete."""
        return not self.running and (self._ended_well or (not self.attempts and self.last_step == self.total_steps))

    @property
    def _ended_well(self) -> bool:
        return bool(self.attempts) and self.attempts[-1].exit_code == 0

    @cached_property
    def missing_steps(self) -> tuple[int, ...]:
        """Finished steps without a line.

        They are below the newest checkpoint, or below the last step if the last start ended well. The line of a step
        from which a run was resumed is in its checkpoint.
        """
        first = min((attempt.step for attempt in self.attempts), default=min(self.by_step, default=1) - 1)
        done = [self.last_step]
        if not self.running:  # a step is saved before its line is written
            done += self.checkpoints
        if self.finished and self._ended_well:
            done.append(self.total_steps or 0)
        elsewhere = set() if self.finished else {max(self.checkpoints, default=0)}
        return tuple(sorted(set(range(first + 1, max(done) + 1)) - self.by_step.keys() - elsewhere))

    @cached_property
    def goodput(self) -> Goodput | None:
        """How the run's wall time was spent; None if no loop began."""
        return goodput_of(self.path)

    @cached_property
    def checkpoints(self) -> tuple[int, ...]:
        """Steps with a checkpoint."""
        return _numbered(RunDir(self.path).checkpoints)

    @cached_property
    def sample_steps(self) -> tuple[int, ...]:
        """Steps with training samples."""
        return _numbered(RunDir(self.path).samples)

    @cached_property
    def validation_steps(self) -> tuple[int, ...]:
        """Steps with validation responses."""
        return _numbered(RunDir(self.path).validation)

    def responses(self, step: int) -> list[Response]:
        """Returns the validation responses after `step`, whose file is read once; nothing without file."""
        if step not in self._responses:
            self._responses[step] = read_responses(RunDir(self.path).validation, step)
        return self._responses[step]

    @cached_property
    def damaged_validations(self) -> dict[int, int]:
        """Returns the number of damaged lines of the first and the last validation, by step, where there are some."""
        ends = dict.fromkeys([*self.validation_steps[:1], *self.validation_steps[-1:]])
        lines = {step: invalid_lines(RunDir(self.path).validation, step) for step in ends}
        return {step: count for step, count in lines.items() if count}

    @cached_property
    def _responses(self) -> dict[int, list[Response]]:
        """Validation responses that were requested so far, by step."""
        return {}

    def matching(self, pattern: str) -> list[str]:
        """Returns the names of metrics that a regular expression matches completely, in the order of the lines."""
        return [name for name in self.curves if re.fullmatch(pattern, name)]

    @cached_property
    def advice(self) -> list[Advice]:
        """The first advice of each kind, as the run printed it."""
        if self.config is None:
            return []
        config = self.config
        found = []
        left = advisers(config.algorithm, config.rollout, config.cluster.device, config.updates_per_step)
        for row in self.rows:
            for adviser in tuple(left):
                if text := adviser(_numbers(row)):
                    left.remove(adviser)
                    found.append(Advice(row[STEP], text.removeprefix("warning: ")))
        return found

    @cached_property
    def warnings(self) -> list[tuple[int, str]]:
        """(step, text) of what the run warned of beside its metrics, of steps that it has; each once."""
        file = RunDir(self.path).warnings
        lines: list[str] = []
        with suppress(OSError, ValueError):
            lines = read_text(file, LINES_BYTES, errors="replace").split("\n") if file.is_file() else []
        found: dict[tuple[int, str], None] = {}
        for line in lines:
            with suppress(ValueError, KeyError, TypeError, RecursionError):  # such as a line that a kill left torn
                row = parse_json(line)
                if int(row["step"]) in self.by_step:
                    found[int(row["step"]), str(row["text"])] = None
        return list(found)

    def log_tails(self) -> dict[str, list[str]]:
        """Returns the last suspicious lines of each log, at most LOG_TAIL_LINES."""
        tails = {file.name: _troubled(file) for file in sorted(RunDir(self.path).logs.glob("*.log"))}
        return {name: lines for name, lines in tails.items() if lines}


def read_run(path: Path | str) -> RunRecord:
    """Reads a run directory, even while a process writes to it.

    Raises ConfigError for another folder, for a damaged metrics.jsonl and for a plan of another version. Raises
    NoStepYet if neither a step nor a failure is written.
    """
    folder = RunDir(Path(path))
    _check_is_run(folder)
    settings = read_settings(folder.config)
    rows = read_metrics(folder.metrics)
    notes = []
    config = _config(folder.config, notes)
    record = RunRecord(
        folder.path,
        settings,
        config,
        _plan(folder.plan, notes),
        rows,
        read_attempts(folder.path),
        in_use(folder.path),
        tuple(notes),
    )
    if not rows and not any(attempt.exit_code for attempt in record.attempts):
        going = "it ended before its first, or was not started yet"
        if record.running:
            going = "it is being started"
        raise NoStepYet(f"{folder.path}: no step is written yet: {going}")
    return record


def _check_is_run(folder: RunDir) -> None:
    path = folder.path
    if not path.is_dir():
        raise ConfigError(f"{path} is not a folder; give a run directory (trainer.run_dir, such as runs/NAME)")
    if not folder.config.is_file():
        inside = sorted(child.parent for child in path.glob(f"*/{folder.config.name}"))
        those = ""
        if inside:
            those = f"; runs in it: {', '.join(map(str, inside[:4]))}"
        raise ConfigError(f"{path} holds no run: there is no {folder.config.name}{those}")


def _config(file: Path, notes: list[str]) -> RunConfig | None:
    try:
        return load_config(file).config
    except MrlError as error:
        first = " ".join(str(error).splitlines()[:2])
        notes.append(
            f"The configuration was written by another version of mrl; what needs its keys is left out ({first})."
        )
        return None


def _plan(file: Path, notes: list[str]) -> dict[str, Any] | None:
    if not file.exists():
        notes.append("There is no plan.json, so the planned values are left out.")
        return None
    return load_plan(file)


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in row.items() if isinstance(value, int | float)}


def _numbered(folder: Path) -> tuple[int, ...]:
    names = []
    if folder.is_dir():
        names = [_NUMBERED.fullmatch(file.name) for file in folder.glob("step-*")]
    return tuple(sorted({int(found[1]) for found in names if found}))


def _troubled(file: Path) -> list[str]:
    try:
        with os.fdopen(open_regular(file), "rb") as log:
            log.seek(max(0, file.stat().st_size - LOG_TAIL_BYTES))
            lines = log.read().decode("utf-8", errors="replace").splitlines()
    except OSError:
        return []
    return [line for line in lines if _TROUBLE.search(line)][-LOG_TAIL_LINES:]
