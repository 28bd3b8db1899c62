"""Implements `mrl submit`."""

import argparse
import os
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mrl.cli import train
from mrl.cli.config_arguments import refuse_leftovers, resolved_config

DASHBOARD = "http://127.0.0.1:8265"


def add(commands) -> None:
    """Registers the command."""
    submit = commands.add_parser(
        "submit", help="run `mrl train` as a job of a Ray cluster and wait for it; exits with the run's exit code"
    )
    _add_own(submit)
    submit.add_argument(
        "train",
        nargs=argparse.REMAINDER,
        metavar="CONFIG ...",
        help="arguments of `mrl train`; the options above may be given among them",
    )
    submit.set_defaults(run=_submit)


def _add_own(parser: argparse.ArgumentParser) -> None:
    address = os.environ.get("RAY_API_SERVER_ADDRESS", DASHBOARD)
    parser.add_argument(
        "--address", default=address, help="the cluster's dashboard; default: $RAY_API_SERVER_ADDRESS, else %(default)s"
    )
    parser.add_argument(
        "--runtime-env",
        type=Path,
        help="YAML of the job's environment; default: launch/runtime_env.<cluster.device>.yaml",
    )
    parser.add_argument(
        "--grace-s",
        type=int,
        help="seconds that a stopped job has to save before it is killed; default: the YAML's, else 120",
    )
    parser.add_argument(
        "--agent-timeout-s", type=float, default=120.0, help="seconds to try while the head cannot start jobs yet"
    )
    parser.add_argument("--no-wait", action="store_true", help="return once the job is handed over")


def _submit(options: argparse.Namespace) -> None:
    from mrl.cluster.job import follow, read_runtime_env, submit, train_job
    from mrl.cluster.prerequisites import ask_for_token_authentication, check_token, refuse_open_ray
    from mrl.config.run_rules import run_dir

    # Unreadable inputs, and files that the job would not find, are refused before anything is sent. Options of this
    # command that stand among the arguments of `mrl train` are set in `options`.
    parser = argparse.ArgumentParser(prog="mrl submit", add_help=False, allow_abbrev=False)
    _add_own(parser)
    arguments = parser.parse_known_args(options.train, options)[1]
    given = _train_options(arguments)
    config = resolved_config(given).config
    environment = read_runtime_env(options.runtime_env or _usual_environment(config.cluster.device), options.grace_s)
    _check_found(config, given.config, environment, options.address)
    job = train_job(arguments, run_dir(config.trainer), environment)
    refuse_open_ray()
    ask_for_token_authentication(own_cluster=False)
    check_token(options.address)
    client = _client(options.address)
    submit(client, job, options.agent_timeout_s)
    print(f"job {job.name} at {options.address}: {job.entrypoint}", flush=True)
    if options.no_wait:
        print(f"follow it with: RAY_AUTH_MODE=token ray job logs --follow --address {options.address} {job.name}")
        return
    raise SystemExit(follow(client, job, _say))


def _usual_environment(device: str) -> Path:
    """Returns the environment file of the checkout. Raises ConfigError outside a checkout."""
    from mrl.errors import ConfigError

    path = Path(f"launch/runtime_env.{device}.yaml")
    if not path.is_file():
        raise ConfigError(f"{path} is not here ({Path.cwd()}): go to the checkout, or give --runtime-env")
    return path


def _check_found(config, preset: str, environment: dict[str, Any], address: str) -> None:
    """Raises ConfigError for what the job's processes would not find.

    These are files that its copy of the working directory lacks, and a run directory on this host only.
    """
    from mrl.cluster.job import not_sent
    from mrl.config.run_rules import named_paths, run_dir
    from mrl.errors import ConfigError

    files = [("CONFIG", preset), ("model.path", config.model.path), *named_paths(config)]
    lost = [
        f"{key}: {file} {why}" for key, file in files if Path(file).exists() and (why := not_sent(file, environment))
    ]
    folder = run_dir(config.trainer)
    if not folder.is_absolute() and (config.cluster.nnodes > 1 or not _is_here(address)):
        lost.append(
            f"trainer.run_dir: {folder} is relative to this host, and the job runs on others; give an absolute path on "
            "a file system that all of them see"
        )
    if lost:
        raise ConfigError("the job would not find what it needs:\n  " + "\n  ".join(lost))


def _is_here(address: str) -> bool:
    """Whether a dashboard's address is this host's loopback."""
    return urlsplit(address).hostname in ("127.0.0.1", "localhost", "::1")


def _train_options(arguments: list[str]) -> argparse.Namespace:
    """Returns the options of `mrl train` in its arguments. Raises ConfigError for settings in hydra's form."""
    parser = argparse.ArgumentParser(prog="mrl submit", usage="mrl submit [options] CONFIG [arguments of mrl train]")
    train.add_arguments(parser)
    options, leftovers = parser.parse_known_args(arguments)
    if leftovers:
        refuse_leftovers(options, leftovers)
        parser.error(f"unrecognized arguments: {' '.join(leftovers)}")
    return options


def _client(address: str):
    from mrl.cluster.prerequisites import check_dashboard, no_dashboard
    from mrl.errors import EnvironmentFault

    check_dashboard(address)
    from ray.exceptions import RayError
    from ray.job_submission import JobSubmissionClient

    try:
        return JobSubmissionClient(address)
    except (RuntimeError, OSError, ValueError, RayError) as error:
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise EnvironmentFault(no_dashboard(address, first_line)) from error


def _say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
