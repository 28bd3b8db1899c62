"""Proof that a configuration resumes exactly: k steps and k more, against the same k steps, a fresh start, and the k more."""

import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from mrl.checkpoint.manifest import read_manifest
from mrl.config.load import ResolvedConfig
from mrl.config.run_rules import run_dir as run_dir_of
from mrl.errors import MrlError
from mrl.record.run_dir import RunDir, read_metrics
from mrl.train.compare_runs import checkpoint_difference, metrics_difference

_TAIL = 1500  # characters of a failed run's output that are shown


@dataclass(frozen=True)
class ResumeVerdict:
    """What was compared, and the first difference; None when there is none."""

    difference: str | None
    steps: int  # before the save, and again after it
    bytes: int  # of the checkpoint that was compared
    lines: int  # of metrics
    seconds: float


def verify_resume(resolved: ResolvedConfig, steps: int) -> ResumeVerdict:
    """Trains 2 x `steps` steps with a checkpoint in the middle, goes back to that one in a new process, and compares the ends.

    Everything happens in a folder beside the configured run directory, which is removed in the end. Raises what the runs end with.
    """
    begun = perf_counter()
    place = run_dir_of(resolved.config).resolve()
    place.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f"{place.name}.verify-resume-", dir=place.parent))
    try:
        run, whole = RunDir(work / "run"), work / "whole"
        config = work / "config.yaml"
        config.write_text(resolved.to_yaml())
        _train(config, run, steps, work / "whole.log")
        whole.mkdir()
        last = run.checkpoints / f"step-{2 * steps}"
        last.rename(whole / last.name)  # the resumed run finds the one in the middle
        run.metrics.rename(whole / run.metrics.name)
        shutil.copy(whole / run.metrics.name, run.metrics)
        _train(config, run, steps, work / "resumed.log", "--resume")
        lines = read_metrics(whole / run.metrics.name)
        difference = metrics_difference(lines, read_metrics(run.metrics)) or checkpoint_difference(whole / last.name, last)
        size = sum(facts["bytes"] for facts in read_manifest(last).files().values())
        return ResumeVerdict(difference, steps, size, len(lines), perf_counter() - begun)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _train(config: Path, run: RunDir, steps: int, log: Path, *more: str) -> None:
    """`mrl train` in a process of its own: what a process keeps in memory must not help a resume."""
    settings = {
        "trainer.total_training_steps": 2 * steps, "trainer.save_freq": steps, "trainer.max_actor_ckpt_to_keep": 2,
        "trainer.val_before_train": "false", "trainer.test_freq": -1, "trainer.logger": "[console]",
    }  # fmt: skip
    overrides = [text for key, value in settings.items() for text in ("--set", f"{key}={value}")]
    command = [sys.executable, "-c", "from mrl.cli.main import main; main()", "train", str(config), "--run-dir", str(run.path)]
    with log.open("w") as file:
        code = subprocess.run([*command, *overrides, *more], stdout=file, stderr=subprocess.STDOUT).returncode
    if code:
        said = log.read_text(errors="replace")[-_TAIL:]
        kind = next((k for k in MrlError.__subclasses__() if k.exit_code == code), MrlError)
        raise kind(f"the run that was to be {'resumed' if more else 'compared with'} ended with exit code {code}:\n{said}")
