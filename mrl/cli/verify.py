"""`mrl verify`."""

import argparse
import json
from dataclasses import asdict
from time import perf_counter
from typing import Any

from mrl.cli.config_arguments import add_config, resolved_config


def add(commands) -> None:
    """Registers the command."""
    parser = commands.add_parser(
        "verify",
        help="prove that the weight sync of a configuration puts every element in its place (no device), or that its runs resume exactly",
    )
    add_config(parser)
    parser.add_argument(
        "--resume",
        action="store_true",
        help="train, save, go on; resume the save, go on; compare weights, optimizer and metrics bit by bit",
    )
    parser.add_argument(
        "--steps", type=_positive, default=2, metavar="K", help="with --resume: steps before and after the save (default 2)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=_verify)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no number of steps; give 1 or more")
    return int(text)


def _verify(options: argparse.Namespace) -> None:
    found = _resume_verdict(options) if options.resume else _verdict(options)
    lines = _resume_lines if options.resume else _lines
    print(json.dumps(found) if options.json else "\n".join(lines(found)))
    if not found["ok"]:
        raise SystemExit(1)


def _verdict(options: argparse.Namespace) -> dict[str, Any]:
    """Raises ConfigError for a configuration or a layout that is not legal."""
    from mrl.config.rules import check
    from mrl.model import planning_model_spec
    from mrl.model.layout import TrainLayout
    from mrl.reshard.plan import MIB, Topology, plan_reshard
    from mrl.reshard.verify import verify
    from mrl.vllm.launch import rank_places, rollout_layout

    begun = perf_counter()
    resolved = resolved_config(options)
    config = resolved.config
    model, stand_in = planning_model_spec(config.model.path)
    check(resolved, model)
    plan = plan_reshard(
        model,
        TrainLayout.build(config.actor.layout.model_dump(), model),
        rollout_layout(config),
        dialect=config.cluster.device,
        dtype=config.rollout.dtype or config.model.dtype,
        topology=Topology(*rank_places(config)),
        budget_bytes=config.reshard.budget_mb * MIB,
    )
    planned = perf_counter() - begun
    verdict = verify(plan)
    return {
        "ok": verdict.fault is None,
        "fault": verdict.fault,
        "model": config.model.path,
        "note": stand_in,
        "ranks": plan.train.world_size,
        "workers": plan.rollout.world_size,
        "hash": plan.hash,
        "plan_seconds": planned,
        "proof": asdict(verdict.proof),
        "rehearsal": asdict(verdict.rehearsal),
        "seconds": perf_counter() - begun,
    }


def _resume_verdict(options: argparse.Namespace) -> dict[str, Any]:
    """Raises ConfigError for a configuration that is not legal, and what its runs end with."""
    from mrl.config.rules import check
    from mrl.model import load_model_spec
    from mrl.train.compare_runs import verify_resume

    resolved = resolved_config(options)
    check(resolved, load_model_spec(resolved.config.model.path), check_paths=True)
    verdict = verify_resume(resolved, options.steps)
    return {"ok": verdict.difference is None, "model": resolved.config.model.path} | asdict(verdict)


def _resume_lines(found: dict[str, Any]) -> list[str]:
    k = found["steps"]
    return [
        f"trained    {2 * k} steps, and from the checkpoint of step {k} the last {k} again; {found['seconds']:.0f} s",
        f"compared   {found['bytes']} bytes of weights, optimizer and random states, {found['lines']} lines of metrics",
        "ok: not one bit differs" if found["ok"] else f"FAULT: {found['difference']}",
    ]


def _lines(found: dict[str, Any]) -> list[str]:
    proof, rehearsal = found["proof"], found["rehearsal"]
    note = [f"note: {found['note']}"] if found["note"] else []
    return [
        *note,
        f"plan       {found['ranks']} ranks -> {found['workers']} workers, {found['plan_seconds']:.2f} s, hash {found['hash'][:16]}",
        f"proof      {proof['copies']} copies of {proof['workers']} of {proof['of_workers']} workers at real shapes, "
        f"{proof['seconds']:.2f} s",
        f"rehearsal  {rehearsal['elements']} elements in {rehearsal['rounds']} rounds, {rehearsal['layers']} layers, "
        f"{rehearsal['experts']} experts, {rehearsal['seconds']:.2f} s",
        _ok(proof) if found["ok"] else f"FAULT: {found['fault']}",
    ]


def _ok(proof: dict[str, Any]) -> str:
    """What was proved, and of how many workers in full; of the others it is their templates and the rehearsal."""
    full = f"{proof['workers']} of {proof['of_workers']} workers in full"
    return f"ok: every element arrives exactly once, from a shard that holds it ({full})"
