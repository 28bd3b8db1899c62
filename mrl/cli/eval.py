"""Implements `mrl eval`."""

import argparse

from mrl.cli.config_arguments import add_config, resolved_config


def add(commands) -> None:
    """Registers the command."""
    evaluate = commands.add_parser(
        "eval", help="answer and score the validation sets (data.val_files) with rollout.val_kwargs"
    )
    add_config(evaluate)
    which = evaluate.add_mutually_exclusive_group()
    which.add_argument(
        "--checkpoint", help="a step-N folder of a run, or a run directory for its newest; default: model.path"
    )
    which.add_argument("--model", help="folder of a Hugging Face checkpoint (model.path)")
    evaluate.add_argument("-o", "--output", help="folder to write; default: evals/<experiment_name>[-step-N]")
    evaluate.add_argument("--json", action="store_true", help="print the results as one JSON object")
    evaluate.set_defaults(run=_eval)


def _eval(options: argparse.Namespace) -> None:
    import contextlib
    import json
    import sys
    from pathlib import Path

    from mrl.cluster.prerequisites import ask_for_token_authentication, ray_address, refuse_open_ray
    from mrl.config.yaml_tree import dump_value
    from mrl.driver.preflight import preflight_evaluation, with_models_at_hand
    from mrl.driver.resume import with_template_date
    from mrl.record.console import PlainConsole

    if options.model is not None:
        options.overrides = [*options.overrides, f"model.path={dump_value(options.model)}"]
    refuse_open_ray()
    resolved = resolved_config(options)
    if options.checkpoint is None or resolved.config.model.vision is not None:  # a checkpoint has no vision tower
        resolved = with_models_at_hand(resolved, check_paths=False, devices=True)
    resolved = with_template_date(resolved, options.checkpoint)
    checkpoint = preflight_evaluation(resolved, options.checkpoint)
    if ray_address(resolved.config.cluster) is None:
        ask_for_token_authentication()

    from mrl.driver.evaluation import evaluate, table  # imports Ray, which takes seconds

    output = Path(options.output or Path("evals") / _name(resolved.config.trainer.experiment_name, checkpoint))
    with contextlib.redirect_stdout(sys.stderr) if options.json else contextlib.nullcontext():
        results = evaluate(resolved, checkpoint, output, PlainConsole(0, sys.stderr))
    print(json.dumps(results) if options.json else f"{table(results)}\nresults and generations: {output}")


def _name(experiment: str, checkpoint) -> str:
    if checkpoint is None:
        return experiment
    return f"{experiment}-{checkpoint.name}"
