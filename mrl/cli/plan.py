"""`mrl plan`."""

import argparse
import json
import time
from pathlib import Path
from typing import Any

from mrl.cli.config_arguments import add_config, positive, resolved_config
from mrl.errors import ConfigError

_ACTOR_ALONE = "counted for the actor alone; mrl plan CONFIG with a layout counts a reference model, engines and the host too"
_SAVES = "host memory is counted without the copy that checkpoints are written from: each rank's weights, float32 weights and moments"


def add(commands) -> None:
    """Registers the command."""
    plan = commands.add_parser("plan", help="memory, times and weight sync of a configuration, or layouts that would fit; no device needed")
    add_config(plan, optional=True)
    plan.add_argument("--device", metavar="NAME", help="e.g. h100-80g; default: the smallest that cluster.device can mean")
    plan.add_argument("--megatron", metavar="VERSION", help="of megatron-core; older ones refuse some layouts (default: the tested one)")
    plan.add_argument("--run-dir", help="also write plan.json there; mrl train compares its own plan with it")
    plan.add_argument("--json", action="store_true", help="print one JSON object")
    plan.add_argument("--search", action="store_true", help="list the layouts of the actor that fit on --devices, best first")
    plan.add_argument("--devices", type=positive, metavar="N", help="with --search: devices of the actor; default: its world_size")
    plan.add_argument("--model", metavar="PATH", help="with --search: a checkpoint folder or a known name, instead of CONFIG")
    plan.add_argument("--top", type=positive, default=10, metavar="N", help="with --search: how many to list (default 10)")
    plan.set_defaults(run=_plan)


def _plan(options: argparse.Namespace) -> None:
    from mrl.plan.render import plan_lines, search_lines

    start = time.perf_counter()
    if (options.config is None) != (options.search and options.model is not None):
        raise ConfigError("give CONFIG, or with --search a --model in its place")
    answer, lines = (_search(options), search_lines) if options.search else (_plan_of_run(options), plan_lines)
    answer["seconds"] = time.perf_counter() - start
    if options.json:
        print(json.dumps(answer))
    else:
        for line in [*lines(answer), *(f"note: {note}" for note in answer["notes"])]:
            print(line)


def _plan_of_run(options: argparse.Namespace) -> dict[str, Any]:
    from mrl.config.rules import check
    from mrl.plan.plan_inputs import device_for
    from mrl.plan.run_plan import plan_of, plan_text
    from mrl.record.run_dir import RunDir, write_text

    resolved = _resolved(options)
    config = resolved.config
    model, stand_in = _model(config.model.path)
    check(resolved, model)
    plan = plan_of(config, model, device_for(config, options.device))
    if options.run_dir is not None:
        file = RunDir(Path(options.run_dir)).plan
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, plan_text(plan))
    return plan | {"notes": [*_notes(config, options.device, plan["device"]["name"], stand_in), _SAVES]}


def _search(options: argparse.Namespace) -> dict[str, Any]:
    from mrl.plan.devices import find_device
    from mrl.plan.plan_inputs import device_for
    from mrl.plan.search_report import config_for_model, search_problem, search_report
    from mrl.platforms.versions import MEGATRON

    if options.config is not None:
        config = _resolved(options).config
        device = device_for(config, options.device)
        devices, per_node = options.devices or config.actor.layout.world_size, config.cluster.n_gpus_per_node
    else:
        if options.devices is None or options.device is None:
            raise ConfigError("--search with --model needs --devices N and --device NAME")
        device, devices = find_device(options.device), options.devices
        config, per_node = config_for_model(options.model, devices, device.platform), device.devices_per_node
    model, stand_in = _model(config.model.path)
    megatron = config.cluster.versions.get("megatron-core", options.megatron or MEGATRON)
    problem = search_problem(config, model, device, devices, per_node, megatron)
    planned = options.config is not None and devices == config.actor.layout.world_size
    notes = _notes(config, options.device, device.name, stand_in) + ([] if planned else [_ACTOR_ALONE])
    return search_report(config, problem, options.top, planned) | {"notes": notes}


def _model(path: str):
    from mrl.model import planning_model_spec

    return planning_model_spec(path)


def _resolved(options: argparse.Namespace):
    """The configuration; --megatron is a shorter way to set its version."""
    if options.megatron is not None:
        options.overrides = [*options.overrides, f"cluster.versions.megatron-core={json.dumps(options.megatron)}"]
    return resolved_config(options)


def _notes(config, named: str | None, device: str, stand_in: str) -> list[str]:
    assumed = "" if named or config.cluster.accelerator else f"planned for {device}; --device or cluster.accelerator names another"
    return [note for note in (assumed, stand_in) if note]
