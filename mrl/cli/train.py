"""Implements `mrl train`."""

import argparse
import shlex

from mrl.cli.config_arguments import add_config, positive, resolved_config
from mrl.errors import Interrupted


def add(commands) -> None:
    """Registers the command."""
    train = commands.add_parser("train", help="train a policy")
    add_arguments(train)
    train.set_defaults(run=_train)


def add_arguments(train: argparse.ArgumentParser) -> None:
    """Adds CONFIG and the options of `mrl train`, which `mrl submit` passes on."""
    add_config(train)
    train.add_argument("--run-dir", help="folder of the run (trainer.run_dir); default: runs/<experiment_name>")
    train.add_argument(
        "--resume",
        action="store_true",
        help="continue the run in the run directory from its newest complete checkpoint; a run that has all its "
        "steps stays unchanged (trainer.resume_mode: auto resumes where there is a run, and begins one where "
        "there is none)",
    )
    train.add_argument(
        "--restarts",
        type=positive,
        metavar="N",
        help="restart the run, at most N times, after exit code 5, a kill by a signal, or a crash of Ray below Python; "
        "never after another end, or after SIGTERM or Ctrl-C to this command; three ends without a finished step "
        "between them stop it",
    )


def _train(options: argparse.Namespace) -> None:
    if options.restarts is None:
        _train_once(options)
        return
    from mrl.config.run_rules import run_dir
    from mrl.tools.supervisor import supervise

    folder = run_dir(resolved_config(options, check_paths=True).config.trainer).resolve()
    given = [f"{name}={value}" for name, value in _given(options)]
    if code := supervise([options.config, *given, *(["--resume"] if options.resume else [])], folder, options.restarts):
        raise SystemExit(code)


def _given(options: argparse.Namespace) -> list[tuple[str, str]]:
    """Returns options with a value, from those that every start gets."""
    named = [("--recipe", options.recipe), ("--run-dir", options.run_dir)]
    return [(name, value) for name, value in named if value is not None] + [("--set", one) for one in options.overrides]


def _train_once(options: argparse.Namespace) -> None:
    from mrl.cluster.prerequisites import ask_for_token_authentication, ray_address, refuse_open_ray
    from mrl.driver.preflight import check_inputs, plug_in_lines, plug_ins, preflight, start_lines, with_models_at_hand
    from mrl.driver.resume import begun_in, goes_on, resume_note, what_is_left, with_template_date

    refuse_open_ray()
    given = resolved_config(options, check_paths=True)
    resume = goes_on(given.config.trainer, options.resume)
    resolved = with_models_at_hand(given, resume=resume, devices=True)
    resolved = with_template_date(resolved, begun_in(resolved.config.trainer, resume))
    inputs = preflight(resolved, resume)
    for line in plug_in_lines(plug_ins(resolved.config)):
        print(line, flush=True)
    check_inputs(resolved.config, resume)
    for line in [*resume_note(resolved.config.trainer, resume), *start_lines(inputs)]:
        print(line, flush=True)
    if ray_address(resolved.config.cluster) is None:
        ask_for_token_authentication()

    from mrl.driver.assemble import open_run  # imports Ray, which takes seconds
    from mrl.driver.loop import due, train_on
    from mrl.driver.preflight import run_dir_path
    from mrl.tools.plan_view import PlanView
    from mrl.tools.report.write import ReportView, report_at_the_end

    trainer = resolved.config.trainer
    folder = run_dir_path(trainer, resume)
    report = ReportView(folder, lambda step: due(trainer.save_freq, step, trainer.total_training_steps or 0))
    try:
        with open_run(inputs, resume, {"report": report, "plan": PlanView(folder, resolved.config)}) as run:
            run = train_on(run)
            print(f"finished {run.state.step} steps in {run.run_dir.path}")
    except Interrupted as error:
        error.add_note(what_is_left(folder, _command(options)))
        raise
    finally:
        if said := report_at_the_end(folder):
            print(said, flush=True)


def _command(options: argparse.Namespace) -> str:
    """Returns the command as it was given."""
    given = [word for pair in _given(options) for word in pair]
    return shlex.join(["mrl", "train", options.config, *given, *(["--resume"] if options.resume else [])])
