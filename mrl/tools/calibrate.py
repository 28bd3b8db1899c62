"""`mrl plan --calibrate RUN ...`: reads runs of one kind of device, and fits a plan's assumptions to them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq

from mrl.config.load import load_config
from mrl.config.schema import RunConfig
from mrl.errors import ConfigError
from mrl.model import ModelSpec, planning_model_spec
from mrl.plan.calibration import MODEL_ERROR, MeasuredRun, calibrate, sync_parts
from mrl.plan.calibration_file import Calibration, RunOfCalibration
from mrl.plan.devices import USUAL, Device, MeasuredLengths, find_device
from mrl.plan.measured_steps import STEP, Row, lengths_of, seconds_of, usable
from mrl.plan.plan_inputs import PlanInputs, batch_plan, shape_of_actor
from mrl.plan.run_plan import load_plan
from mrl.record.run_dir import RunDir, read_metrics
from mrl.record.sample_files import readable

LEAST_STEPS = 2  # steps with seconds that a calibration needs of a run, the first one left out
_PARTS = 4  # of a run, which differ in the lengths of their samples
_STEPS_OF_A_PART = 5
_NEWEST = 20  # steps whose samples say the lengths
_QUANTILES = 64


@dataclass(frozen=True)
class ReadRun:
    """One run as a calibration reads it."""

    path: Path
    config: RunConfig
    plan: dict[str, Any]
    rows: list[Row]  # of steps whose seconds count

    @cached_property
    def model(self) -> ModelSpec:
        """The model that it trained."""
        return planning_model_spec(self.config.model.path)[0]

    @property
    def limit(self) -> int:
        """Most tokens of a response."""
        return self.config.data.max_response_length


def read_runs(paths: Sequence[str], device: Device) -> list[ReadRun]:
    """Reads run directories. Raises ConfigError for one that says nothing of plans for `device`."""
    runs = [_read(Path(path)) for path in paths]
    for run in runs:
        if run.plan["device"]["name"] != device.name:
            raise ConfigError(
                f"--calibrate {run.path}: the run was planned for {run.plan['device']['name']}, and CONFIG is for "
                f"{device.name}; give runs on the same devices, or --device {run.plan['device']['name']}"
            )
    return runs


def _read(path: Path) -> ReadRun:
    folder = RunDir(path)
    what = f"--calibrate {path}"
    if not folder.config.is_file():
        raise ConfigError(f"{what}: holds no run (no {folder.config.name}); give run directories, such as runs/first")
    if not folder.plan.is_file():
        raise ConfigError(f"{what}: has no plan.json, which says what was planned; give a run of this version")
    rows = usable(read_metrics(folder.metrics))
    if len(rows) < LEAST_STEPS:
        raise ConfigError(
            f"{what}: {len(rows)} steps have seconds, and {LEAST_STEPS} are needed beside the first one, which loads "
            "kernels; let it run on, or give another run"
        )
    return ReadRun(path, load_config(folder.config).config, load_plan(folder.plan), rows)


def calibration_of(runs: Sequence[ReadRun]) -> tuple[Calibration, list[RunOfCalibration]]:
    """Fits the assumptions to runs, whose lengths are those of the newest steps of the last one."""
    observations = [seen for run in runs for seen in _observations(run)]
    named = [
        RunOfCalibration(str(run.path), len(run.rows), run.plan["hash"], shape_of_actor(run.config, run.model))
        for run in runs
    ]
    return calibrate(observations, lengths_in(runs[-1])), named


def _observations(run: ReadRun) -> list[MeasuredRun]:
    """Returns what parts of a run say, each of some steps one after the other. What a plan computes wrongly, it does in
    all of them, so together they are no more certain of it than one.
    """
    inputs = PlanInputs.of(run.config, run.model, find_device(run.plan["device"]["name"]), USUAL)
    samples = batch_plan(run.config, inputs.train).samples
    parts = max(1, min(_PARTS, len(run.rows) // _STEPS_OF_A_PART))
    found = []
    for places in np.array_split(np.arange(len(run.rows)), parts):
        rows = [run.rows[place] for place in places]
        seen = seconds_of(rows, samples)
        errors = {phase: (parts * MODEL_ERROR**2 + seen.error[phase] ** 2) ** 0.5 for phase in seen.median}
        lengths = lengths_of(rows, run.limit, run.config.rollout.drafted_by)
        found.append(MeasuredRun(inputs, seen.median, errors, lengths, sync_parts(run.plan)))
    return found


def lengths_in(run: ReadRun) -> MeasuredLengths:
    """Returns the lengths of a run's newest steps: of its samples, or where these are missing, of its metrics."""
    rows = run.rows[-_NEWEST:]
    found = lengths_of(rows, run.limit, run.config.rollout.drafted_by)
    files = [RunDir(run.path).samples / f"step-{row[STEP]}.parquet" for row in rows]
    tables = []
    for row, file in zip(rows, files, strict=True):
        if file.is_file():
            with readable(file.parent, row[STEP]):
                if "sampled" in pq.read_schema(file).names:  # turns: what was sampled is less than what lies there
                    return found
                tables.append(pq.read_table(file, columns=["prompt_ids", "response_ids", "stop_reason"]))
    if not tables:
        return found
    prompts, responses = (
        np.concatenate([pc.list_value_length(table[name]).to_numpy() for table in tables])
        for name in ("prompt_ids", "response_ids")
    )
    cut = float(np.mean([reason == "length" for table in tables for reason in table["stop_reason"].to_pylist()]))
    quantiles = np.quantile(responses, (np.arange(_QUANTILES) + 0.5) / _QUANTILES)
    whole = (prompts + responses).astype(np.float64)
    return replace(
        found,
        prompt=float(prompts.mean()),
        response=tuple(float(max(tokens, 1.0)) for tokens in quantiles),
        cut=cut,
        hazard=(1 - cut) / max(float(responses.mean()), 1.0),
        spread=float((whole**2).mean() / whole.mean() ** 2),
    )
