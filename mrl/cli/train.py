"""`mrl train`."""

import argparse

from mrl.cli.config_arguments import add_config, resolved_config


def add(commands) -> None:
    """Registers the command."""
    train = commands.add_parser("train", help="train a policy")
    add_config(train)
    train.add_argument("--run-dir", help="where the run writes (trainer.run_dir); default: runs/<experiment_name>")
    train.add_argument(
        "--resume",
        action="store_true",
        help="continue the run in the run directory from its newest complete checkpoint; a run that has all its "
        "steps stays as it is (trainer.resume_mode: auto does so where there is a run, and begins one where "
        "there is none)",
    )
    train.set_defaults(run=_train)


def _train(options: argparse.Namespace) -> None:
    from mrl.cluster.prerequisites import ask_for_token_authentication, ray_address
    from mrl.train.preflight import preflight, start_lines, with_models_at_hand
    from mrl.train.resume import goes_on, resume_note

    resolved = with_models_at_hand(resolved_config(options, check_paths=True))
    resume = goes_on(resolved.config, options.resume)
    model = preflight(resolved, resume)
    for line in [*resume_note(resolved.config, resume), *start_lines(resolved, model)]:
        print(line, flush=True)
    if ray_address(resolved.config) is None:
        ask_for_token_authentication()

    from mrl.extras.report.at_checkpoints import ReportView, report_at_the_end
    from mrl.train.loop import due, train  # brings Ray, which takes seconds
    from mrl.train.preflight import run_dir_path
    from mrl.train.run import open_run

    trainer, folder = resolved.config.trainer, run_dir_path(resolved.config, resume)
    report = ReportView(folder, lambda step: due(trainer.save_freq, step, trainer.total_training_steps or 0))
    try:
        with open_run(resolved, resume, {"report": report}) as run:
            train(run)
            print(f"finished {run.state.step} steps in {run.run_dir.path}")
    finally:
        if said := report_at_the_end(folder):
            print(said, flush=True)
