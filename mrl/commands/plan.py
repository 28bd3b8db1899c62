"""`mrl plan`."""

import argparse
import json
import time
from pathlib import Path
from typing import Any

from mrl.commands.config_arguments import add_config, resolved_config
from mrl.errors import ConfigError


def add(commands) -> None:
    """Registers the command."""
    plan = commands.add_parser("plan", help="memory, times and weight sync of a configuration, or layouts that would fit; no device needed")
    add_config(plan, optional=True)
    plan.add_argument("--device", metavar="NAME", help="e.g. h100-80g; default: the smallest that cluster.device can mean")
    plan.add_argument("--megatron", metavar="VERSION", help="of megatron-core; older ones refuse some layouts (default: the tested one)")
    plan.add_argument("--run-dir", help="also write plan.json there; mrl train compares its own plan with it")
    plan.add_argument("--json", action="store_true", help="print one JSON object")
    plan.add_argument("--search", action="store_true", help="list the layouts of the actor that fit on --devices, best first")
    plan.add_argument("--devices", type=_positive, metavar="N", help="with --search: devices of the actor; default: its world_size")
    plan.add_argument("--model", metavar="PATH", help="with --search: a checkpoint folder or a known name, instead of CONFIG")
    plan.add_argument("--top", type=_positive, default=10, metavar="N", help="with --search: how many to list (default 10)")
    plan.set_defaults(run=_plan)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _plan(options: argparse.Namespace) -> None:
    from mrl.planning.render import plan_lines, search_lines

    start = time.perf_counter()
    if (options.config is None) != (options.search and options.model is not None):
        raise ConfigError("give CONFIG, or with --search a --model in its place")
    found, lines = (_search(options), search_lines) if options.search else (_one(options), plan_lines)
    found["seconds"] = time.perf_counter() - start
    if options.json:
        print(json.dumps(found))
    else:
        for line in [*lines(found), *(f"note: {note}" for note in found["notes"])]:
            print(line)


def _one(options: argparse.Namespace) -> dict[str, Any]:
    from mrl.config.rules import check
    from mrl.planning.plan import plan_of
    from mrl.planning.versions import MEGATRON, check_version
    from mrl.record.run_dir import RunDir, write_text

    resolved = resolved_config(options)
    config = resolved.config
    model, stand_in = _model(config.model.path)
    check(resolved, model)
    check_version(options.megatron or MEGATRON, model, config.actor.layout.model_dump())
    plan = plan_of(config, model, _device(options, config.cluster.device))
    if options.run_dir is not None:
        file = RunDir(Path(options.run_dir)).plan
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, json.dumps(plan))
    return plan | {"notes": _notes(options, plan["device"]["name"], stand_in)}


def _search(options: argparse.Namespace) -> dict[str, Any]:
    from mrl.memory.devices import find_device
    from mrl.planning.search_report import config_for_model, search_problem, search_report
    from mrl.planning.versions import MEGATRON

    if options.config is not None:
        config = resolved_config(options).config
        device = _device(options, config.cluster.device)
        devices, per_node = options.devices or config.actor.layout.world_size, config.cluster.n_gpus_per_node
    else:
        if options.devices is None or options.device is None:
            raise ConfigError("--search with --model needs --devices N and --device NAME")
        device, devices = find_device(options.device), options.devices
        config, per_node = config_for_model(options.model, devices, device.platform), device.devices_per_node
    model, stand_in = _model(config.model.path)
    problem = search_problem(config, model, device, devices, per_node, options.megatron or MEGATRON)
    return search_report(config, problem, options.top) | {"notes": _notes(options, device.name, stand_in)}


def _model(path: str):
    from mrl.models import planning_model_spec

    return planning_model_spec(path)


def _device(options: argparse.Namespace, platform: str):
    from mrl.memory.devices import default_device, devices, find_device

    if options.device is None:
        return default_device(platform)
    device = find_device(options.device)
    if device.platform != platform:
        fitting = ", ".join(d.name for d in devices().values() if d.platform == platform)
        raise ConfigError(f"--device {device.name}: cluster.device is {platform}; allowed: {fitting} (or set cluster.device)")
    return device


def _notes(options: argparse.Namespace, device: str, stand_in: str) -> list[str]:
    assumed = "" if options.device else f"planned for {device}; --device names another"
    return [note for note in (assumed, stand_in) if note]
