"""Implements `mrl explain`."""

import argparse
import json
from contextlib import suppress
from pathlib import Path

from mrl.cli.config_arguments import positive
from mrl.whole_file import appears_whole


def add(commands) -> None:
    """Registers the command."""
    explain = commands.add_parser(
        "explain",
        help="say why a run broke: finds the step, computes it again from what is stored, changing one thing at a time",
    )
    explain.add_argument("run_dir", metavar="RUN", help="run directory of a run that is not going on")
    explain.add_argument(
        "--step", type=positive, metavar="N", help="step to explain; default: the first that leaves the run's own band"
    )
    explain.add_argument(
        "--replay",
        action="store_true",
        help="only compute the step again (default: the newest one), and compare every number with the run's",
    )
    explain.add_argument(
        "--minutes",
        type=positive,
        metavar="M",
        default=30,
        help="for all of it (default: 30); what does not fit into them is named",
    )
    explain.add_argument(
        "--repeat-calls",
        action="store_true",
        help="also make calls again of tools that may act on the world: with network, folders, MCP servers",
    )
    explain.add_argument("--json", action="store_true", help="print one JSON object")
    explain.set_defaults(run=_explain)


def _explain(options: argparse.Namespace) -> None:
    if options.replay:
        _replay(options)
        return
    from mrl.record.run_dir import RunDir, json_line
    from mrl.tools.explain.explain import explain, lines

    found = explain(Path(options.run_dir), options.step, 60.0 * options.minutes, options.repeat_calls)
    answer = json_line(found.to_json())
    with suppress(OSError), appears_whole(RunDir(Path(options.run_dir)).explained) as work:  # for the report's page
        work.write_text(answer, encoding="utf-8")
    if options.json:
        print(answer, end="")
    else:
        print("\n".join(lines(found)))


def _replay(options: argparse.Namespace) -> None:
    """Computes one step again. Raises SystemExit(1) if it does not repeat."""
    from mrl.tools.explain.replay import StoredRun, replay

    run = StoredRun.read(Path(options.run_dir))
    found = replay(run, options.step or run.steps[-1], seconds=60.0 * options.minutes)
    answer = {
        "step": found.step,
        "from": found.first,
        "repeats": found.repeats,
        "compared": found.compared,
        "weights": found.weights,
        "differences": {step: [list(each) for each in unlike] for step, unlike in found.differences.items()},
        "seconds": found.seconds,
    }
    if options.json:
        print(json.dumps(answer))
    else:
        word = "equal bits" if found.repeats else "NOT EQUAL"
        print(f"steps {found.first + 1} to {found.step}: {word}, {found.compared} metrics compared")
        for step, unlike in found.differences.items():
            for name, was, now in unlike:
                print(f"  step {step}: {name} was {was!r}, and is {now!r}")
        if found.weights is not None:
            print(f"weights and optimizer after step {found.step}: {'equal' if found.weights else 'NOT EQUAL'}")
    if not found.repeats:
        raise SystemExit(1)
