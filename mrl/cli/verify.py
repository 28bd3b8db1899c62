"""Implements `mrl verify`."""

import argparse
import json
from dataclasses import asdict
from time import perf_counter
from typing import Any

from mrl.cli.config_arguments import add_config, positive, resolved_config


def add(commands) -> None:
    """Registers the command."""
    parser = commands.add_parser(
        "verify",
        help="prove that the weight sync puts every element in its place, or that runs resume exactly",
    )
    add_config(parser)
    parser.add_argument(
        "--resume",
        action="store_true",
        help="train, save and go on; resume from the save and go on; compare weights, optimizer and metrics bit by bit",
    )
    parser.add_argument(
        "--steps",
        type=positive,
        default=2,
        metavar="K",
        help="with --resume: steps before and after the save (default 2)",
    )
    parser.add_argument(
        "--all",
        action="store_true",
        help="without --resume: check every worker in full, not only as many as six seconds allow",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=_verify)


def _verify(options: argparse.Namespace) -> None:
    if options.resume:
        answer = _resume_verdict(options)
        lines = _resume_lines(answer)
    else:
        answer = _sync_verdict(options)
        lines = _sync_lines(answer)
    print(json.dumps(answer) if options.json else "\n".join(lines))
    if not answer["ok"]:
        raise SystemExit(1)


def _sync_verdict(options: argparse.Namespace) -> dict[str, Any]:
    """Proves the weight sync. Raises ConfigError for a configuration or a layout that is not legal."""
    from mrl.config.rules import check
    from mrl.model import planning_model_spec
    from mrl.model.layout import TrainLayout
    from mrl.plan.run_plan import reshard_plan_of
    from mrl.reshard.proof import verify

    begun = perf_counter()
    resolved = resolved_config(options)
    config = resolved.config
    model, substitute = planning_model_spec(config.model.path)
    check(resolved, model)
    plan = reshard_plan_of(config, model, TrainLayout.build(config.actor.layout, model))
    planned = perf_counter() - begun
    verdict = verify(plan, every_worker=options.all)
    return {
        "ok": verdict.fault is None,
        "fault": verdict.fault,
        "model": config.model.path,
        "note": substitute,
        "ranks": plan.train.world_size,
        "workers": plan.rollout.world_size,
        "hash": plan.hash,
        "plan_seconds": planned,
        "proof": asdict(verdict.proof),
        "rehearsal": asdict(verdict.rehearsal),
        "seconds": perf_counter() - begun,
    }


def _resume_verdict(options: argparse.Namespace) -> dict[str, Any]:
    """Compares a resumed run with one that was not interrupted.

    Raises ConfigError for a configuration that is not legal, and the errors of its runs.
    """
    from mrl.config.rules import check
    from mrl.driver.preflight import with_models_at_hand
    from mrl.model import load_model_spec
    from mrl.tools.compare_runs import verify_resume

    resolved = with_models_at_hand(resolved_config(options, check_paths=True))
    check(resolved, load_model_spec(resolved.config.model.path), check_paths=True)
    verdict = verify_resume(resolved, options.steps)
    return {"ok": verdict.difference is None, "model": resolved.config.model.path} | asdict(verdict)


def _resume_lines(answer: dict[str, Any]) -> list[str]:
    k = answer["steps"]
    return [
        f"trained    {2 * k} steps, and from the checkpoint of step {k} the last {k} again; {answer['seconds']:.0f} s",
        f"compared   {answer['bytes']} bytes of weights, optimizer and random states, "
        f"{answer['lines']} lines of metrics",
        "ok: not one bit differs" if answer["ok"] else f"FAULT: {answer['difference']}",
    ]


def _sync_lines(answer: dict[str, Any]) -> list[str]:
    proof = answer["proof"]
    rehearsal = answer["rehearsal"]
    note = []
    if answer["note"]:
        note = [f"note: {answer['note']}"]
    return [
        *note,
        f"plan       {answer['ranks']} ranks -> {answer['workers']} workers, {answer['plan_seconds']:.2f} s, "
        f"hash {answer['hash'][:16]}",
        f"proof      {proof['copies']} copies of {proof['workers']} of {proof['of_workers']} workers at real shapes, "
        f"{proof['seconds']:.2f} s",
        f"rehearsal  {rehearsal['elements']} elements in {rehearsal['rounds']} rounds, {rehearsal['layers']} layers, "
        f"{rehearsal['experts']} experts, {rehearsal['seconds']:.2f} s",
        _ok(proof) if answer["ok"] else f"FAULT: {answer['fault']}",
    ]


def _ok(proof: dict[str, Any]) -> str:
    """Says what was proved, and for how many workers in full. Others are judged by templates and rehearsal."""
    workers = proof["workers"]
    of_workers = proof["of_workers"]
    proved = "every element arrives exactly once, from a shard that holds it"
    if workers == of_workers:
        return f"ok: {proved} ({workers} of {of_workers} workers in full)"
    return (
        f"ok: for {workers} of {of_workers} workers, checked in full, {proved}; the others were judged by their "
        "templates and the rehearsal (--all checks all of them in full)"
    )
