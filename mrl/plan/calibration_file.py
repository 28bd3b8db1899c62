"""A cluster's file of what runs showed: `mrl plan --calibrate` writes it, and `cluster.calibration` names it.

One JSON object: `format`, `device`, `runs` (name, steps, hash of the plan, `actor`: what was measured), `constants`
(name: `value`, and the ends `faster` and `slower` of an interval of 90 %), `phases` (name: factor), `lengths` (the
fields of MeasuredLengths), `left` (assumptions that the runs do not determine, each with the reason), `open` (draws of
what the runs leave open, each with `constants`, all by name, and `phases`, factors that go with them).
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from mrl.errors import ConfigError
from mrl.plain_files import JSON_BYTES, parse_json, read_text, reason
from mrl.plan.devices import USUAL, Assumptions, Device, Measured, MeasuredLengths
from mrl.whole_file import appears_whole

KEY = "cluster.calibration"
FORMAT = 3
SYNC = "sync"  # the phase that phase_seconds leaves out
_CURE = "write it anew with mrl plan CONFIG --calibrate RUN, or leave the key out"
# what seconds follow from; the others say bytes or lengths
CONSTANTS = (
    "compute_share", "head_share", "logit_passes", "prefill_mfu", "decode_memory_share", "decode_layers",
    "untuned_experts", "step_host", "sequence_host", "rest", "host", "moe_launch", "expert_launch",
    "backward_launches", "backward_launches_grouped", "dense_launch", "link_share", "expert_load", "sync_share",
    "host_path_share",
)  # fmt: skip


@dataclass(frozen=True)
class Fitted:
    """An assumption that the runs determine, with the ends of its interval of 90 %."""

    name: str
    value: float
    faster: float
    slower: float


@dataclass(frozen=True)
class OpenDraw:
    """Values of all CONSTANTS, drawn from what runs leave open. With `phases`, factors, they explain the runs."""

    values: tuple[float, ...]
    phases: Mapping[str, float]


@dataclass(frozen=True)
class Calibration:
    """What runs say. `left`: assumptions that they do not determine, each with the reason. `phases`: factors."""

    fitted: tuple[Fitted, ...]
    left: Mapping[str, str]
    phases: Mapping[str, float]
    lengths: MeasuredLengths
    open: tuple[OpenDraw, ...]

    @property
    def assumptions(self) -> Assumptions:
        """The usual assumptions with what was measured in their place."""
        ends = tuple((each.name, each.faster, each.slower) for each in self.fitted)
        measured = Measured(self.lengths, ends, tuple(self.phases.items()))
        return replace(USUAL, **{each.name: each.value for each in self.fitted}, measured=measured)

    @property
    def allowed(self) -> tuple[Assumptions, ...]:
        """Assumptions that explain the runs, drawn from all that do."""
        return tuple(
            replace(
                USUAL,
                **dict(zip(CONSTANTS, draw.values, strict=True)),
                measured=Measured(self.lengths, (), tuple(draw.phases.items())),
            )
            for draw in self.open
        )


@dataclass(frozen=True)
class RunOfCalibration:
    """A run that a calibration was made from."""

    name: str
    steps: int
    plan: str  # its hash; empty without one
    actor: Mapping[str, Any]  # layout, recomputation and micro-batches, as in mrl.plan.plan_inputs.shape_of_actor


def write_calibration(path: Path, device: str, runs: Sequence[RunOfCalibration], found: Calibration) -> None:
    """Writes the file, which appears completely or not at all. Raises ConfigError where the disk refuses it."""
    constants = {each.name: {k: v for k, v in asdict(each).items() if k != "name"} for each in found.fitted}
    content = {
        "format": FORMAT,
        "device": device,
        "runs": [asdict(run) for run in runs],
        "constants": constants,
        "phases": dict(found.phases),
        "lengths": asdict(found.lengths),
        "left": dict(found.left),
        "open": [
            {"constants": dict(zip(CONSTANTS, draw.values, strict=True)), "phases": dict(draw.phases)}
            for draw in found.open
        ],
    }
    try:
        with appears_whole(path) as work:
            work.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output {path}: cannot be written: {error.strerror}") from None


def assumptions_of(calibration: str | None, device: Device) -> Assumptions:
    """Returns the assumptions of a cluster: those of its calibration, a file, or else the usual ones.

    Raises ConfigError for a file that is missing, damaged, or of another device.
    """
    if calibration is None:
        return USUAL
    return _of_device(calibration, device)[0].assumptions


def allowed_by(calibration: str | None, device: Device) -> tuple[Assumptions, ...]:
    """Returns what a cluster's calibration leaves open: assumptions that all explain its runs. Empty without one.

    Raises what `assumptions_of` raises.
    """
    if calibration is None:
        return ()
    return _of_device(calibration, device)[0].allowed


def measured_actors(calibration: str | None, device: Device) -> tuple[Mapping[str, Any], ...]:
    """Returns the actors of a calibration's runs, as in RunOfCalibration; empty without one.

    Raises what `assumptions_of` raises.
    """
    if calibration is None:
        return ()
    return tuple(run.actor for run in _of_device(calibration, device)[1])


def _of_device(calibration: str, device: Device) -> tuple[Calibration, tuple[RunOfCalibration, ...]]:
    path = Path(calibration)
    try:
        changed = path.stat().st_mtime_ns
    except OSError as error:
        raise ConfigError(f"{KEY}: {path} cannot be read: {error.strerror}; {_CURE}") from None
    made_on, found, runs = _read(path, changed)
    if made_on != device.name:
        raise ConfigError(
            f"{KEY}: {path} was measured on {made_on}, and this plan is for {device.name}; set cluster.accelerator to "
            f"{made_on}, or leave the key out"
        )
    return found, runs


@lru_cache(maxsize=8)
def _read(path: Path, changed: int) -> tuple[str, Calibration, tuple[RunOfCalibration, ...]]:
    """Reads a file as it was at a time in nanoseconds."""
    try:
        content = parse_json(read_text(path, JSON_BYTES))
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise ValueError(f"no calibration of this version (format {FORMAT})")
        runs = tuple(RunOfCalibration(**run | {"actor": dict(run["actor"])}) for run in content["runs"])
        return str(content["device"]), _calibration(content), runs
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"{KEY}: {path} is damaged: {reason(error)}; {_CURE}") from None


def _calibration(content: Mapping[str, Any]) -> Calibration:
    """Reads a calibration. Raises ValueError, LookupError or TypeError for another content."""
    fitted = []
    for name, row in content["constants"].items():
        if name not in CONSTANTS:
            raise ValueError(f"constants: {name!r} is no constant of this version")
        ends = (_positive(row[key], f"constants.{name}.{key}") for key in ("value", "faster", "slower"))
        fitted.append(Fitted(name, *ends))
    phases = _phases(content["phases"])
    return Calibration(
        tuple(fitted), dict(content["left"]), phases, _lengths(content["lengths"]), _open(content["open"])
    )


def _phases(row: Mapping[str, Any]) -> dict[str, float]:
    return {str(name): _positive(factor, f"phases.{name}") for name, factor in row.items()}


def _open(rows: Sequence[Mapping[str, Any]]) -> tuple[OpenDraw, ...]:
    return tuple(
        OpenDraw(
            tuple(_positive(row["constants"][name], f"open.constants.{name}") for name in CONSTANTS),
            _phases(row["phases"]),
        )
        for row in rows
    )


def _lengths(row: Mapping[str, Any]) -> MeasuredLengths:
    found = MeasuredLengths(**{**row, "response": tuple(row["response"]), "accepted": tuple(row.get("accepted", ()))})
    if not found.response:
        raise ValueError("lengths.response is empty")
    for tokens in (found.prompt, found.limit, found.spread, *found.response):
        _positive(tokens, "lengths")
    for share in (found.cut, found.hazard, *found.accepted):
        if not 0 <= share <= 1:
            raise ValueError(f"lengths: {share} is not from 0 to 1")
    return found


def _positive(value: Any, where: str) -> float:
    number = float(value)
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f"{where}: {value} is not above 0")
    return number


def at_lengths(assumed: Assumptions, lengths: MeasuredLengths) -> Assumptions:
    """Returns the same assumptions for other lengths of samples."""
    return replace(assumed, measured=replace(assumed.measured or Measured(), lengths=lengths))
