"""Implements `mrl family`."""

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mrl.errors import ConfigError, EnvironmentFault, MrlError

_SHOWN = 10  # faults of a check that are printed


def add(commands) -> None:
    """Registers the command."""
    family = commands.add_parser("family", help="check that a model family is computed, converted and synced right")
    family.set_defaults(parser=family)
    parts = family.add_subparsers(dest="part", metavar="WHICH")
    check = parts.add_parser(
        "check",
        help="prove a family on this machine's CPUs, in minutes",
        description="Makes tiny random models of the class by transformers, and compares with transformers and vLLM: "
        "keys of config.json, names and shapes, vLLM's loader, conversions, log-probs and gradients in several "
        "layouts, and a training step with an engine.",
    )
    check.add_argument(
        "model", nargs="+", help="a folder with config.json, or a model's name that mrl knows; several share processes"
    )
    check.add_argument("--only", action="append", default=[], metavar="CHECK", help="run this check; repeatable")
    check.add_argument("--work", metavar="FOLDER", help="folder for models and logs, kept afterwards; must be empty")
    check.add_argument("--json", action="store_true", help="print one JSON object")
    check.set_defaults(run=_check)


def _check(options: argparse.Namespace) -> None:
    from mrl.tools.family.check import CHECKS, FamilyChecks
    from mrl.tools.family.missing import config_of

    if wrong := [name for name in options.only if name not in CHECKS]:
        raise ConfigError(f"--only {wrong[0]}: must be one of {', '.join(CHECKS)}")
    if repeated := [name for name in options.model if options.model.count(name) > 1]:
        raise ConfigError(f"{repeated[0]} is given twice: name each model once")
    began = time.monotonic()
    rows = []
    with _work_folder(options.work) as work:
        checks = FamilyChecks({model: config_of(model) for model in options.model}, work)
        for model, check in checks.run(tuple(options.only)):
            family = checks.families[model].family.model_type
            rows.append({"model": model, "family": family, **check.to_json()})
            if not options.json:
                _say(check, f"{family}: " if len(options.model) > 1 else "")
    ok = all(row["status"] == "ok" for row in rows)
    if options.json:
        print(json.dumps({"ok": ok, "seconds": round(time.monotonic() - began, 1), "checks": rows}))
    if not ok:
        raise SystemExit(MrlError.exit_code)


@contextmanager
def _work_folder(path: str | None) -> Iterator[Path]:
    """Gives an empty folder. Raises EnvironmentFault for one that holds something."""
    if path is None:
        with tempfile.TemporaryDirectory(prefix="mrl-family-") as folder:
            yield Path(folder)
        return
    folder = Path(path).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise EnvironmentFault(f"--work {path}: holds files; give an empty folder")
    yield folder


def _say(check, family: str) -> None:
    print(f"{'ok' if check.ok else 'FAILED':8}{check.name:12}{family}{check.found} ({check.seconds:.0f} s)", flush=True)
    for fault in check.faults[:_SHOWN]:
        print(f"        {fault}")
    if len(check.faults) > _SHOWN:
        print(f"        and {len(check.faults) - _SHOWN} more")
    if check.faults and check.cure:
        print(f"        -> {check.cure}", flush=True)
