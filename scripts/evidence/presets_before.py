"""Steps of the presets as they were before anything held them against the planner, under today's predictions.

    python scripts/evidence/presets_before.py

Presets that came later have none.
"""

import io
import json
import subprocess
import tarfile
import tempfile
from pathlib import Path

from presets import names

from mrl.config.load import load_config
from mrl.model import planning_model_spec
from mrl.plan.plan_inputs import device_for
from mrl.tools.run_search import step_of

ROOT = Path(__file__).resolve().parents[2]
BEFORE = "84802440a215"  # the last commit whose presets nobody had held against the planner


def main() -> None:
    """Prints seconds by preset."""
    packed = subprocess.run(
        ["git", "archive", BEFORE, "parallel_configs"], cwd=ROOT, check=True, capture_output=True
    ).stdout
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            archive.extractall(folder, filter="data")
        files = {name: Path(folder, "parallel_configs", f"{name}.yaml") for name in names()}
        seconds = {name: seconds_of(file) for name, file in files.items() if file.is_file()}
    print(json.dumps({"presets_of": BEFORE, "seconds": seconds}))


def seconds_of(file: Path) -> float:
    """A step without its sync, as `seconds` in docs/results/presets.json."""
    config = load_config(file).config
    phases = step_of(config, planning_model_spec(config.model.path)[0], device_for(config))
    return round(sum(phases.values()), 1)


if __name__ == "__main__":
    main()
