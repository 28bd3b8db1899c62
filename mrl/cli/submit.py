"""`mrl submit`."""

import argparse
import os
import sys
from pathlib import Path

from mrl.cli import train
from mrl.cli.config_arguments import resolved_config

DASHBOARD = "http://127.0.0.1:8265"


def add(commands) -> None:
    """Registers the command."""
    submit = commands.add_parser(
        "submit", help="run `mrl train` as a job of a Ray cluster and wait for it; exits as the run does"
    )
    address = os.environ.get("RAY_API_SERVER_ADDRESS", DASHBOARD)
    submit.add_argument(
        "--address", default=address, help="the cluster's dashboard; default: $RAY_API_SERVER_ADDRESS, else %(default)s"
    )
    submit.add_argument(
        "--runtime-env",
        type=Path,
        help="YAML of the job's environment; default: launch/runtime_env.<cluster.device>.yaml",
    )
    submit.add_argument(
        "--grace-s",
        type=int,
        help="seconds that a stopped job has to save before it is killed; default: the YAML's, else 120",
    )
    submit.add_argument(
        "--agent-timeout-s", type=float, default=120.0, help="how long to try while the head cannot start jobs yet"
    )
    submit.add_argument("--no-wait", action="store_true", help="return once the job is handed over")
    submit.add_argument(
        "train",
        nargs=argparse.REMAINDER,
        metavar="CONFIG ...",
        help="arguments of `mrl train`, after the options above",
    )
    submit.set_defaults(run=_submit)


def _submit(options: argparse.Namespace) -> None:
    from mrl.cluster.job import follow, read_runtime_env, submit, train_job
    from mrl.cluster.prerequisites import ask_for_token_authentication
    from mrl.config.run_rules import run_dir

    # what cannot be read is told before anything is sent
    config = resolved_config(_train_options(options.train)).config
    path = options.runtime_env or Path(f"launch/runtime_env.{config.cluster.device}.yaml")
    job = train_job(options.train, run_dir(config), read_runtime_env(path, options.grace_s))
    for key, value in local_only(config):
        print(
            f"note: {key}: {value} is relative: the job looks in its copy of the working "
            "directory; give an absolute path"
        )
    ask_for_token_authentication()
    client = _client(options.address)
    submit(client, job, options.agent_timeout_s)
    print(f"job {job.name} at {options.address}: {job.entrypoint}", flush=True)
    if options.no_wait:
        print(f"follow it with: ray job logs --follow --address {options.address} {job.name}")
        return
    raise SystemExit(follow(client, job, _say))


def local_only(config) -> list[tuple[str, str]]:
    """(key, path) of models and data that are here under a relative path;
    the job's copy of the working directory leaves them out.
    """
    named = [("model.path", config.model.path)]
    named += [(f"data.{name}", file) for name in ("train_files", "val_files") for file in getattr(config.data, name)]
    return [(key, path) for key, path in named if not Path(path).is_absolute() and Path(path).exists()]


def _train_options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="mrl submit")
    train.add(parser.add_subparsers())
    return parser.parse_args(["train", *arguments])


def _client(address: str):
    from ray.job_submission import JobSubmissionClient

    from mrl.errors import EnvironmentFault

    try:
        return JobSubmissionClient(address)
    except (RuntimeError, ConnectionError, ValueError) as error:
        raise EnvironmentFault(
            f"no Ray dashboard answers at {address} ({error}); start a head with launch/start_head.sh, or give "
            "--address; a head elsewhere also wants its token in RAY_AUTH_TOKEN or ~/.ray/auth_token"
        ) from error


def _say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
