"""Implements `mrl rehearse`."""

import argparse
import json
import shutil
import sys
import time
from pathlib import Path

from mrl.cli.config_arguments import add_config, resolved_config
from mrl.errors import ConfigError, InvalidConfig, MrlError


def add(commands) -> None:
    """Registers the command."""
    rehearse = commands.add_parser(
        "rehearse",
        help="run a small copy of a configuration on this machine's CPUs, with its switches, before renting a cluster",
        description="Shrinks model, layout, lengths and batches, and runs `mrl train` on the result: one step, a save, "
        "a resume, one step. Then reports which switches were exercised, which could not be and why, and what failed.",
    )
    add_config(rehearse)
    rehearse.add_argument(
        "--work", help="folder for model, data, configuration, run and logs; default: runs/rehearsal-<experiment_name>"
    )
    rehearse.add_argument("--json", action="store_true", help="print one JSON object")
    rehearse.set_defaults(run=_rehearse)


def _rehearse(options: argparse.Namespace) -> None:
    try:
        report = _answer(options)
    except MrlError as error:
        if not options.json:
            raise
        failed = [{"phase": "prepare", "why": str(error), "log": ""}]
        print(json.dumps({"ok": False, "seconds": 0.0, "exercised": [], "not_exercised": [], "failed": failed}))
        raise SystemExit(error.exit_code) from None
    if options.json:
        print(json.dumps(report.to_json(), default=str))
    if not report.ok:
        raise SystemExit(report.exit_code)


def _answer(options: argparse.Namespace):
    """Runs the rehearsal. Raises what `mrl validate` and `mrl train` raise for a configuration and the user's files."""
    from mrl.cli.validate import check_config
    from mrl.process.own import own_cpus
    from mrl.tools.rehearse.prepare import prepare
    from mrl.tools.rehearse.report import answer, first_lines, last_lines
    from mrl.tools.rehearse.stages import run_stages

    began = time.monotonic()
    resolved = resolved_config(options)
    if broken := check_config(resolved)[0]:
        raise InvalidConfig(broken)
    work = _work_folder(options.work or f"runs/rehearsal-{resolved.config.trainer.experiment_name}")
    prepared = prepare(resolved.config, work, own_cpus())
    tell = _silent if options.json else _say
    for line in first_lines(prepared):
        tell(line)
    ended = run_stages(work, lambda text: _say(text, sys.stderr if options.json else sys.stdout))
    found = answer(options.config, work, prepared, ended, time.monotonic() - began)
    for line in last_lines(found):
        tell(line)
    return found


def _work_folder(path: str):
    """Returns an empty folder. It removes the remains of an earlier rehearsal.

    Raises ConfigError for a folder that holds something else.
    """
    from mrl.tools.rehearse.compose import WorkFolder

    work = WorkFolder(Path(path).resolve())
    if work.path.exists() and not work.path.is_dir():
        raise ConfigError(f"--work {path}: is a file")
    if work.path.is_dir() and any(work.path.iterdir()):
        if not work.marker.is_file():
            raise ConfigError(f"--work {path}: holds something other than a rehearsal; give another folder")
        shutil.rmtree(work.path)
    try:
        work.path.mkdir(parents=True, exist_ok=True)
        work.marker.touch()
    except OSError as error:
        raise ConfigError(f"--work {path}: cannot be written: {error.strerror}") from None
    return work


def _say(text: str, stream=None) -> None:
    print(text, file=stream or sys.stdout, flush=True)


def _silent(_: str) -> None:
    pass
