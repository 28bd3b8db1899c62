"""Implements `mrl validate`."""

import argparse
import json
import sys
from typing import Any

from mrl.cli.config_arguments import add_config, resolved_config
from mrl.errors import ConfigError, MrlError, shortened


def add(commands) -> None:
    """Registers the command."""
    validate = commands.add_parser(
        "validate", help="check a configuration against every rule, and the files that it names"
    )
    add_config(validate)
    validate.add_argument(
        "--check-paths",
        action="store_true",
        help="also refuse files whose folders are not on this host, and loggers that are not installed, as mrl train "
        "does; otherwise they are only listed",
    )
    validate.add_argument(
        "--json", action="store_true", help="print one JSON object, also when the configuration cannot be read at all"
    )
    validate.add_argument(
        "--resolved",
        action="store_true",
        help="print the whole configuration instead, every default written out and where each value comes from, "
        "without secrets; what is checked goes to standard error",
    )
    validate.set_defaults(run=_validate)


def _validate(options: argparse.Namespace) -> None:
    if options.resolved and options.json:
        raise ConfigError("--resolved prints YAML, and --json one JSON object: give one of them")
    try:
        if options.resolved:
            print(resolved_config(options, options.check_paths).to_record(), end="", flush=True)
        broken, remarks = _check(options)
    except MrlError as error:
        if not options.json:
            raise
        row = {"field": "", "where": options.config, "value": None, "rule": str(error), "why": "", "allowed": []}
        _print_verdict([row], [])
        raise SystemExit(error.exit_code) from None
    if options.json:
        _print_verdict([violation.to_json() for violation in broken], remarks)
    else:
        for line in [*map(str, broken), *remarks, *([] if broken else ["ok"])]:
            print(line, file=sys.stderr if options.resolved else sys.stdout)
    if broken:
        raise SystemExit(ConfigError.exit_code)


def _check(options: argparse.Namespace) -> tuple[list, list[str]]:
    """Returns violations, those of the schema too, and remarks. Raises errors that keep the rules from being judged."""
    from mrl.config.load import SchemaRefusal

    try:
        resolved = resolved_config(options, options.check_paths)
    except SchemaRefusal as refusal:
        from mrl.plan.plan_rules import accelerator_violations

        return [*refusal.violations, *accelerator_violations(refusal.rest)], []
    broken, remarks = check_config(resolved, options.check_paths)
    if broken:
        return (broken, remarks)
    return look_at_files(resolved, remarks, options.check_paths)


def look_at_files(resolved, remarks: list[str], check_paths: bool) -> tuple[list, list[str]]:
    """Checks the files that the configuration names, as `mrl train` does before it starts anything.

    It checks those on this host. With `check_paths` all have been found here. Returns violations and remarks. Raises
    DataError and ConfigError.
    """
    from mrl.config.rules import seen_violations
    from mrl.config.run_rules import unseen_files
    from mrl.model import planning_model_spec

    model, _ = planning_model_spec(resolved.config.model.path)
    if not check_paths and (broken := seen_violations(resolved, model)):
        return broken, []
    bare = _look_at_weights(resolved.config, model, check_paths)
    from mrl.driver.first_look import look
    from mrl.plan.run_plan import memory_lines_of
    from mrl.record.sinks import check_packages

    if check_paths:
        check_packages(resolved.config.trainer.logger)
    looked = look(resolved.config)
    warnings = [f"{row}; it is left out, as data.max_bad_row_share allows" for row in looked.bad_rows]
    if looked.reward is not None:
        warnings.append(looked.reward)
    warned = [f"warning: {shortened(warning)}" for warning in warnings]
    return [], [*remarks, *memory_lines_of(resolved.config, model), *bare, *unseen_files(resolved.config), *warned]


def _look_at_weights(config, model, check_paths: bool) -> list[str]:
    """Returns lines about model folders on this host without weights, which are enough for a plan.

    Raises EnvironmentFault for weights that differ from their configuration. With `check_paths` also for missing
    weights.
    """
    from mrl.config.model_folders import folders_of_weights, model_in
    from mrl.model.hf_files import check_checkpoint, has_weights

    bare = []
    for key, folder in folders_of_weights(config).items():
        if check_paths or has_weights(folder):
            check_checkpoint(folder, model_in(key, folder, model, config.rollout), key)
        elif folder.is_dir():
            bare.append(f"{key}: {folder} has no weights, and mrl train wants them")
    return bare


def check_config(resolved, check_paths: bool = False) -> tuple[list, list[str]]:
    """Returns violations of a resolved configuration, and remarks: its batch in one line, and notes."""
    from mrl.config.describe import describe_batch
    from mrl.config.rules import notes, violations
    from mrl.model import planning_model_spec
    from mrl.plan.plan_rules import accelerator_violations, share_violations

    model, substitute = planning_model_spec(resolved.config.model.path)
    broken = [*violations(resolved, model, check_paths), *accelerator_violations(resolved)]
    broken = broken or share_violations(resolved, model)
    batch = []
    if not broken:
        batch = [f"batch: {describe_batch(resolved.config)}"]
    return broken, [*batch, *([substitute] if substitute else []), *notes(resolved, model)]


def _print_verdict(rows: list[dict[str, Any]], remarks: list[str]) -> None:
    print(json.dumps({"ok": not rows, "violations": rows, "notes": remarks}))
