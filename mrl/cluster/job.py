"""`mrl train` as a job of a Ray cluster: its runtime environment, submission, output, and exit status.

The driver runs on the cluster and outlives the terminal. Ray is called through its JobSubmissionClient, on which `ray
job submit` is built. Here it is a protocol, so that Ray need not be imported.
"""

import asyncio
import os
import shlex
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Protocol

from mrl.config.yaml_tree import parse_yaml
from mrl.errors import ConfigError, EnvironmentFault, Interrupted
from mrl.plain_files import CONFIG_BYTES, read_text, reason
from mrl.units import MIB

GRACE = "RAY_JOB_STOP_WAIT_TIME_S"
GRACE_S = 120  # Ray's default kills a stopped job after 3 s; finishing and saving a step takes longer
LOST_AFTER_S = 60.0  # a head that has not answered for this long is lost
# allowed entries of a runtime environment (ray.runtime_env.RuntimeEnv.known_fields, those without underscore)
_PACKAGES = (str, list, dict)
_KNOWN: dict[str, tuple[type, ...]] = {
    "py_modules": (list,), "py_executable": (str,), "java_jars": (list,), "working_dir": (str,), "conda": (str, dict),
    "pip": _PACKAGES, "uv": _PACKAGES, "container": (dict,), "excludes": (list,), "env_vars": (dict,),
    "config": (dict,), "worker_process_setup_hook": (str,), "image_uri": (str,),
}  # fmt: skip
_IN_WORDS = {str: "text", list: "a list", dict: "a mapping"}
_ENDED = ("SUCCEEDED", "FAILED", "STOPPED")
_NOT_YET = "No available agent"  # a new head accepts requests before it has an agent that can run them


class JobClient(Protocol):
    """The used part of ray.job_submission.JobSubmissionClient (Ray 2.60)."""

    def submit_job(self, *, entrypoint: str, submission_id: str, runtime_env: dict[str, Any]) -> str: ...
    def get_job_status(self, job_id: str) -> Any: ...
    def get_job_info(self, job_id: str) -> Any: ...
    def stop_job(self, job_id: str) -> bool: ...
    def tail_job_logs(self, job_id: str) -> AsyncIterator[str]: ...


@dataclass(frozen=True)
class Job:
    """One submission."""

    name: str
    entrypoint: str
    runtime_env: dict[str, Any]


def train_job(arguments: list[str], run_dir: Path, runtime_env: dict[str, Any]) -> Job:
    """Makes the job of `mrl train ARGUMENTS`.

    The run directory is absolute, because the job's working directory is a temporary copy.
    """
    command = ["mrl", "train", *arguments, "--run-dir", str(run_dir.absolute())]
    return Job(f"mrl-{int(time.time())}-{os.getpid()}", shlex.join(command), runtime_env)


def read_runtime_env(path: Path, grace_s: int | None = None) -> dict[str, Any]:
    """Reads a runtime environment from a YAML file and adds the grace period.

    `grace_s` overrides the file's value, which overrides GRACE_S. Raises ConfigError for a missing file, one that is
    not a mapping, or entries that Ray would refuse later.
    """
    try:
        content = parse_yaml(read_text(path, CONFIG_BYTES), str(path)).plain()
    except (OSError, ValueError, ConfigError) as error:
        raise ConfigError(f"--runtime-env {path} cannot be read: {reason(error)}") from error
    if not isinstance(content, dict) or not isinstance(content.get("env_vars", {}), dict):
        raise ConfigError(
            f"--runtime-env {path}: must be a mapping with working_dir, excludes and env_vars (a mapping)"
        )
    variables = content.get("env_vars", {})
    wrong = [name for name, value in variables.items() if not isinstance(value, str)]
    if wrong:
        raise ConfigError(
            f"--runtime-env {path}: env_vars {', '.join(map(str, wrong))}: values must be text; put them in quotes"
        )
    if unknown := [str(name) for name in content if name not in _KNOWN]:
        raise ConfigError(
            f"--runtime-env {path}: {', '.join(unknown)}: Ray does not know it; the file may be for another version "
            f"(known: {', '.join(_KNOWN)})"
        )
    for fault in _faults(content):
        raise ConfigError(f"--runtime-env {path}: {fault}")
    grace = str(grace_s) if grace_s is not None else variables.get(GRACE, str(GRACE_S))
    return content | {"env_vars": variables | {GRACE: grace}}


def _faults(content: dict[str, Any]) -> Iterator[str]:
    """Yields faults in the values of known entries."""
    for name, value in content.items():
        if not isinstance(value, _KNOWN[name]):
            yield f"{name}: must be {_type_names(_KNOWN[name])}"
    excludes = content.get("excludes", [])
    if not all(isinstance(pattern, str) for pattern in excludes):
        yield "excludes: must be a list of strings"
    sent = content.get("working_dir")
    if isinstance(sent, str) and "://" not in sent and not Path(sent).exists():
        yield f"working_dir: {sent} is not here; a relative path starts at the current directory, {Path.cwd()}"


def _type_names(kinds: tuple[type, ...]) -> str:
    *first, last = [_IN_WORDS[kind] for kind in kinds]
    if first:
        return f"{', '.join(first)} or {last}"
    return last


def not_sent(file: str, runtime_env: dict[str, Any]) -> str | None:
    """Returns why the job's copy of the working directory lacks `file`, which exists here; None if it has it.

    An absolute path refers to the job's own host, which cannot be checked here.
    """
    if Path(file).is_absolute():
        return None
    sent = runtime_env.get("working_dir")
    if sent is None:
        return "is relative, and the runtime environment sends no working_dir; give an absolute path"
    if "://" in str(sent):
        return None
    root = Path(sent).resolve()
    path = Path(file).resolve()
    if not path.is_relative_to(root):
        return f"is outside of {root}, the only folder that is sent; give an absolute path that the job's hosts have"
    parts = path.relative_to(root).parts
    ignored = root / ".gitignore"
    rules = [("excludes of the runtime environment", line) for line in runtime_env.get("excludes", [])]
    if ignored.is_file():
        rules += [(".gitignore", line) for line in ignored.read_text(encoding="utf-8", errors="replace").split("\n")]
    for where, pattern in rules:
        if _excludes(pattern, parts):
            return f"is not sent ({pattern} in {where}); give an absolute path that the job's hosts have"
    return None


def _excludes(pattern: str, parts: tuple[str, ...]) -> bool:
    """Tells whether a line of gitignore's syntax matches a part of a path.

    Negated lines, which send what another line excludes, never match.
    """
    pattern = pattern.strip()
    if not pattern or pattern.startswith(("#", "!")):
        return False
    bare = pattern.rstrip("/")
    if "/" not in bare:
        return any(fnmatchcase(part, bare) for part in parts)
    below = bare.lstrip("/")
    return any(fnmatchcase("/".join(parts[:count]), below) for count in range(1, len(parts) + 1))


def submit(client: JobClient, job: Job, agent_timeout_s: float, wait: Callable[[float], None] = time.sleep) -> None:
    """Submits the job. Retries while the head has no agent yet.

    Raises EnvironmentFault, or ConfigError if the package is too large.
    """
    deadline = time.monotonic() + agent_timeout_s
    while True:
        try:
            client.submit_job(entrypoint=job.entrypoint, submission_id=job.name, runtime_env=job.runtime_env)
            return
        except TypeError as error:
            raise ConfigError(f"--runtime-env: Ray refuses it: {error}") from error
        except ValueError as error:  # Ray raises it for a package above its limit
            raise ConfigError(f"the working directory cannot be sent: {error}. {_largest(job.runtime_env)}") from error
        except (RuntimeError, ConnectionError) as error:
            if _NOT_YET not in str(error) or time.monotonic() > deadline:
                raise EnvironmentFault(f"the cluster did not take the job: {error}") from error
        wait(1.0)


def follow(client: JobClient, job: Job, say: Callable[[str], None]) -> int:
    """Prints the job's output until it ends. Returns the exit status: the driver's own, or 5 for a stopped job.

    A first SIGINT or SIGTERM asks the job to stop, which saves the run, and waiting continues. A second one has its
    normal effect, or ends the wait if it would be ignored. Raises Interrupted when the head is lost.
    """
    with _stopping(client, job, say):
        # the connection breaks with the head; the job's state is asked below
        with suppress(RuntimeError, OSError):
            asyncio.run(_print_logs(client, job, say))
        status = _wait_for_end(client, job)
    if status == "SUCCEEDED":
        return 0
    if status == "STOPPED":
        say(f"job {job.name} was stopped\n")
        return Interrupted.exit_code
    info = client.get_job_info(job.name)
    if info.driver_exit_code is None:
        say(f"job {job.name} failed: {info.message}\n")
    return info.driver_exit_code or 1


async def _print_logs(client: JobClient, job: Job, say: Callable[[str], None]) -> None:
    async for text in client.tail_job_logs(job.name):
        say(text)


def _wait_for_end(client: JobClient, job: Job) -> str:
    answered = time.monotonic()
    while True:
        try:
            status = str(getattr(client.get_job_status(job.name), "value", "UNKNOWN"))
            answered = time.monotonic()
            if status in _ENDED:
                return status
        except (RuntimeError, ConnectionError) as error:
            if time.monotonic() - answered > LOST_AFTER_S:
                raise Interrupted(
                    f"the head no longer answers about job {job.name} ({error}); its run can be resumed"
                ) from error
        time.sleep(1.0)


@contextmanager
def _stopping(client: JobClient, job: Job, say: Callable[[str], None]) -> Iterator[None]:
    def ask(number: int, frame: Any) -> None:
        restore()
        # as in a shell's background job, where the second SIGINT must end the wait too
        if before[signal.SIGINT] is signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        say(f"stopping job {job.name}: it finishes what it must and saves; the same again only ends this wait\n")
        with suppress(RuntimeError, ConnectionError):
            client.stop_job(job.name)

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        restore()


def _largest(runtime_env: dict[str, Any]) -> str:
    """Describes the largest entries of the working directory, to help shorten it."""
    root = Path(runtime_env.get("working_dir", "."))
    sizes = []
    if root.is_dir():
        sizes = sorted(((_size(entry), entry.name) for entry in root.iterdir()), reverse=True)
    rows = ", ".join(f"{name} {size / MIB:.0f} MiB" for size, name in sizes[:5])
    return (
        f"Largest in {root.absolute()}: {rows}; add what the job does not need to `excludes` of the runtime environment"
    )


def _size(path: Path) -> int:
    if path.is_symlink() or not path.is_dir():
        return path.lstat().st_size
    return sum(file.lstat().st_size for file in path.rglob("*") if not file.is_dir())
