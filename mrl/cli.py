"""The command line: parse, call, print. Exit codes are those of mrl.errors; anything unforeseen keeps its traceback and ends with 1."""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from mrl.errors import ConfigError, Interrupted, MrlError


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of `mrl`."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.run is None:
        options.parser.print_help(sys.stderr)
        raise SystemExit(ConfigError.exit_code)
    try:
        options.run(options)
    except MrlError as error:
        print(f"mrl {options.command}: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    except KeyboardInterrupt:
        print(f"mrl {options.command}: interrupted", file=sys.stderr)
        raise SystemExit(Interrupted.exit_code) from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mrl", description="Reinforcement learning of large mixture-of-experts models on Megatron.")
    parser.set_defaults(run=None, parser=parser)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    train = commands.add_parser("train", help="train a policy")
    _add_config(train)
    train.add_argument("--run-dir", help="where the run writes (trainer.run_dir); default: runs/<experiment_name>")
    train.add_argument(
        "--resume",
        action="store_true",
        help="continue the run in the run directory from its newest complete checkpoint; a run that has all its steps stays as it is",
    )
    train.set_defaults(run=_train)

    validate = commands.add_parser("validate", help="check a configuration against every rule, in under a second")
    _add_config(validate)
    validate.add_argument("--check-paths", action="store_true", help="also look at the files that it names")
    validate.add_argument("--json", action="store_true", help="print one JSON object, also when the configuration cannot be read at all")
    validate.set_defaults(run=_validate)

    convert = commands.add_parser("convert", help="convert checkpoints")
    convert.set_defaults(parser=convert)
    conversions = convert.add_subparsers(dest="conversion", metavar="WHICH")
    to_hf = conversions.add_parser("megatron-to-hf", help="write a saved step as a Hugging Face checkpoint")
    to_hf.add_argument("checkpoint", help="a step-N folder, or a run directory for its newest one")
    to_hf.add_argument("-o", "--output", required=True, help="folder to write; must not exist or be empty")
    to_hf.set_defaults(run=_megatron_to_hf)
    return parser


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", help="a YAML file, such as parallel_configs/tiny-moe/cpu.yaml")
    parser.add_argument("--recipe", help="algorithm settings that come with mrl, by name: gspo, grpo, ...")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides", help="override one value; repeatable")


def _resolved(options: argparse.Namespace):
    from mrl.config.load import load_config
    from mrl.config.yaml_tree import dump_value

    run_dir = getattr(options, "run_dir", None)
    own = [] if run_dir is None else [f"trainer.run_dir={dump_value(run_dir)}"]
    return load_config(options.config, options.recipe, [*options.overrides, *own])


def _train(options: argparse.Namespace) -> None:
    from mrl.cluster.address import ask_for_token_authentication, ray_address
    from mrl.trainer.preflight import preflight, start_lines

    resolved = _resolved(options)
    model = preflight(resolved, options.resume)
    for line in start_lines(resolved, model):
        print(line, flush=True)
    if ray_address(resolved.config) is None:
        ask_for_token_authentication()

    from mrl.trainer.loop import train  # brings Ray, which takes seconds
    from mrl.trainer.run import open_run

    with open_run(resolved, options.resume) as run:
        train(run)
        print(f"finished {run.state.step} steps in {run.run_dir.path}")


def _validate(options: argparse.Namespace) -> None:
    try:
        found, remarks = _check(options)
    except MrlError as error:
        if not options.json:
            raise
        _print_verdict([_as_row(error, options.config)])
        raise SystemExit(error.exit_code) from None
    if options.json:
        _print_verdict([violation.to_json() for violation in found])
    else:
        for line in [*map(str, found), *remarks] or ["ok"]:
            print(line)
    if found:
        raise SystemExit(ConfigError.exit_code)


def _check(options: argparse.Namespace) -> tuple[list, list[str]]:
    """Violations, those of the schema too, and remarks. Raises what keeps the rules from being looked at."""
    from mrl.config.rules import notes, violations
    from mrl.config.violation import InvalidConfig
    from mrl.megatron.hf_files import check_checkpoint
    from mrl.models import load_model_spec

    try:
        resolved = _resolved(options)
    except InvalidConfig as error:
        return list(error.violations), []
    path = resolved.config.model.path
    model = load_model_spec(path)
    found = violations(resolved, model, options.check_paths)
    if options.check_paths and not found:
        check_checkpoint(path, model)
    return found, notes(resolved, model)


def _as_row(error: MrlError, config: str) -> dict[str, Any]:
    """An error that concerns no single key, as a violation."""
    return {"field": "", "where": config, "value": None, "rule": str(error), "why": "", "allowed": []}


def _print_verdict(rows: list[dict[str, Any]]) -> None:
    print(json.dumps({"ok": not rows, "violations": rows}))


def _megatron_to_hf(options: argparse.Namespace) -> None:
    from mrl.convert import megatron_to_hf

    written = megatron_to_hf(options.checkpoint, options.output)
    print(f"wrote {written} tensors to {options.output}")
