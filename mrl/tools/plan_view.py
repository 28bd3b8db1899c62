"""Compares a run's plan with the run after steps 2, 5 and 20, while it goes on: printed, and kept for the report."""

from collections.abc import Callable
from pathlib import Path

from mrl.config.schema import RunConfig
from mrl.model import planning_model_spec
from mrl.plan.calibration_file import assumptions_of
from mrl.plan.compared import AFTER_STEPS, compare, lines, to_json
from mrl.plan.devices import find_device
from mrl.plan.plan_inputs import PlanInputs
from mrl.plan.run_plan import load_plan
from mrl.record.run_dir import RunDir, append_lines, json_line, read_metrics
from mrl.record.views import Metrics, View


class PlanView(View):
    """Works in its own thread, as all views: training waits neither for it nor for its errors."""

    def __init__(self, folder: Path, config: RunConfig, tell: Callable[[str], None] = print) -> None:
        self._folder = RunDir(folder)
        self._config = config
        self._tell = tell

    def write(self, step: int, metrics: Metrics) -> None:
        """Compares, after some steps."""
        if step not in AFTER_STEPS:
            return
        planned = load_plan(self._folder.plan)
        model, _ = planning_model_spec(self._config.model.path)
        device = find_device(planned["device"]["name"])
        assumed = assumptions_of(self._config.cluster.calibration, device)
        inputs = PlanInputs.of(self._config, model, device, assumed)
        found = compare(inputs, planned, read_metrics(self._folder.metrics))
        if found:
            self._tell("\n".join(lines(step, found)))
            try:
                append_lines(self._folder.compared, json_line(to_json(step, found)))
            except OSError as error:
                self._tell(f"note: the comparison with the plan after step {step} is not kept: {error.strerror}")
