"""A supervised run whose driver, or Ray below it, is killed once: for faults.py."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from random_kills import ROOT, finished, title

from mrl.record.attempts import ATTEMPTS

VICTIMS = {"driver": "mrl.cli.main", "raylet": "raylet/raylet", "gcs": "gcs/gcs_server"}
KILLED_AFTER = 2  # steps
LOOK_S = 0.05
RUN_S = 400.0  # deadline of one start


def supervised(victim: str, preset: Path, settings: list[str], run_dir: Path) -> dict[str, Any]:
    """Seconds since its start: of the kill, of the supervisor's word, of the next loop, of each step's first line.

    Raises RuntimeError where the run does not end well.
    """
    log = run_dir.with_suffix(".log")
    words = ["train", str(preset), "--run-dir", str(run_dir), "--restarts", "2"]
    words += [word for text in settings for word in ("--set", text)]
    command = [sys.executable, "-c", "from mrl.cli.main import main; main()", *words]
    began = time.monotonic()
    found: dict[str, Any] = {"lines": []}
    with log.open("w") as file:
        process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file, start_new_session=True)
    while process.poll() is None:
        now = time.monotonic() - began
        take(found, run_dir, log, now)
        if "sent" not in found and finished(run_dir) >= KILLED_AFTER:
            os.kill(_pid(victim, process.pid), signal.SIGKILL)
            found["sent"] = time.monotonic() - began
        if now > RUN_S:
            _end(process)
        time.sleep(LOOK_S)
    take(found, run_dir, log, time.monotonic() - began)
    if process.returncode or "noticed" not in found:
        raise RuntimeError(f"exit code {process.returncode}: {log}")
    return found


def take(found: dict[str, Any], run_dir: Path, log: Path, now: float) -> None:
    """Notes what there is for the first time."""
    ready = 0
    with suppress(OSError):
        ready = (run_dir / ATTEMPTS).read_text().count('"event": "ready"')
    if ready:
        found.setdefault("loop", now)
    found["lines"] += [now] * (finished(run_dir) - len(found["lines"]))
    if "sent" in found and "; start 2 of 3" in log.read_text():
        found.setdefault("noticed", now)
    if ready > 1:
        found.setdefault("back", now)


def _pid(victim: str, supervisor: int) -> int:
    """The driver is the supervisor's own child; Ray's processes are below that."""
    (driver,) = psutil.Process(supervisor).children()
    if victim == "driver":
        return driver.pid
    return next(each.pid for each in driver.children(recursive=True) if VICTIMS[victim] in title(each))


def _end(process: subprocess.Popen) -> None:
    for each in [*psutil.Process(process.pid).children(recursive=True), process]:
        with suppress(psutil.Error):
            each.kill()
