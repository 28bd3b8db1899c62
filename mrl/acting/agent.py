"""A user's agent in a process of the pool, for one conversation: a function of the user's file, or a command.

It gets the endpoint's address and key, the row, and its time limit. Variables also name address and key, as clients of
OpenAI and Anthropic expect. So an agent that does not know mrl finds the model. The key of the reward is in no
variable: whatever runs for the model in the agent's processes sees those.

Its home is an empty folder of its own. It has no rights to look into other sessions' processes, whose variables have
their keys; where the kernel has Landlock it cannot.
"""

import atexit
import inspect
import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mrl.acting.harnesses import AgentContext, Harness, loop_path
from mrl.acting.lazy_imports import witness
from mrl.acting.tool import Tool, generator_fault
from mrl.reward.confine import without_sight
from mrl.reward.keeper import SCRATCH

AGENT = "agent"  # the tool name of its calls
REWARD_KEY = "reward_key"  # an argument that a function need not take
# of the row that a session in a sandbox begins with
ENDPOINT = "endpoint"  # its address
STOP = "stop"  # a file whose appearance ends the agent
CLOSED = (
    "an agent writes into its own HOME, temporary folders and rollout.turns.folders, and sees few variables beside "
    "those that rollout.turns.environment names"
)
_LONGEST_LINE = 4096  # bytes of a program's first line
_MOST_FILES = 65536
_CHECKED_S = 40.0  # for a harness to look at its configuration
_TOLD = 1000  # characters of what it finds
Run = Callable[..., Any]


def agent_tool(run: Run, own_home: bool = True) -> Tool:
    """Makes the agent a tool of the pool. `run` gets url, key, row, seconds, and the key of the reward if it takes it.

    With `own_home` the agent's home is a folder of its own.
    """

    def agent(url: str, key: str, row: dict, seconds: float, reward_key: str) -> str:
        """Runs an agent until it has ended."""
        without_sight()
        given = variables(url, key)
        if own_home:
            given |= _home()
        more = {REWARD_KEY: reward_key} if _takes(run, REWARD_KEY) else {}
        with _variables(given):
            try:
                _run(run, url, key, row, seconds, **more)
            except OSError as error:
                if "ermission denied" in str(error) or "Read-only" in str(error):
                    raise RuntimeError(f"{type(error).__name__}: {error} ({CLOSED})") from error
                raise
        return ""

    return Tool.of(agent, AGENT)


def _home() -> dict[str, str]:
    """Makes an empty home, which the keeper removes with the process. Returns the variables that name it.

    What is found by the user's home by default, and read alone, stays where it is.
    """
    before = Path.home()
    home = Path(os.environ[SCRATCH]) / "home"
    home.mkdir(mode=0o700, parents=True)
    read = {"HF_HOME": before / ".cache" / "huggingface", "PYTHONUSERBASE": before / ".local"}
    kept = {name: str(path) for name, path in read.items() if name not in os.environ}
    return {"HOME": str(home), "XDG_CACHE_HOME": str(home / ".cache"), **kept}


def _takes(run: Run, name: str) -> bool:
    with suppress(ValueError):  # a callable without a signature
        return name in inspect.signature(run).parameters
    return False


def _run(run: Run, *arguments: Any, **more: Any) -> None:
    """Runs it to its end, including a coroutine. Raises what it raises, except for an exit with status 0."""
    try:
        value = run(*arguments, **more)
        if inspect.iscoroutine(value):
            import asyncio  # here: a fifth of the time in which any process of tools starts

            asyncio.run(value)
    except SystemExit as end:
        if end.code:
            raise


def agent_fault(run: Run) -> str:
    """Says why a function cannot be called as an agent is; empty where it can."""
    if fault := generator_fault(run):
        return fault
    try:
        more = {REWARD_KEY: ""} if _takes(run, REWARD_KEY) else {}
        inspect.signature(run).bind("url", "key", {}, 1.0, **more)
    except TypeError as error:
        return f"is called with url, key, row and seconds, and cannot take them: {error}"
    except ValueError:  # a callable without a signature
        pass
    return ""


def command_of(command: Sequence[str]) -> Run:
    """Returns a function that runs a command. Everything but the key comes as JSON on its standard input.

    A program of this interpreter's is not started but forked, with what it imports loaded already: loading is what
    takes time. That is done here.
    """
    script = script_of(command)
    if script is not None:
        _import_ahead(script[0])

    def run(url: str, key: str, row: Mapping[str, Any], seconds: float, reward_key: str) -> None:
        context = {"url": url, "row": row, "seconds": seconds, REWARD_KEY: reward_key}
        _run_process(command, script, json.dumps(context).encode())

    return run


def harness_of(harness: Harness, program: str, more: Sequence[str], config: Mapping[str, Any]) -> Run:
    """Returns a function that runs a harness, in a folder `work` of its home. Its configuration is written there.

    `program` is that of the harness, and `more` are further arguments. Where this interpreter runs a loop of mrl's own,
    that is forked as a command is.
    """
    loop = () if harness.loop is None else (loop_path(harness),)
    script = script_of((program, *loop))
    if script is not None:
        _import_ahead(script[0])

    def run(url: str, key: str, row: Mapping[str, Any], seconds: float, reward_key: str) -> None:
        home = Path(os.environ["HOME"])
        context = AgentContext(url, key, reward_key, row, seconds, str(home), config)
        for name, text in harness.files(context).items():
            (home / name).parent.mkdir(parents=True, exist_ok=True)
            (home / name).write_text(text)
        os.environ.update(harness.variables(context))  # this process is the agent's alone
        (home / "work").mkdir()
        os.chdir(home / "work")
        arguments = (*harness.arguments(context), *more)
        _run_process((program, *loop, *arguments), script and [*script, *arguments], harness.input(context).encode())

    return run


def tried_config(harness: Harness, program: str, config: Mapping[str, Any]) -> str:
    """Says what the harness's own package finds wrong with its configuration; empty for nothing. Takes seconds."""
    with tempfile.TemporaryDirectory() as home:
        try:
            ended = subprocess.run(
                [program, loop_path(harness), "check"],
                input=json.dumps({"config": dict(config)}),
                env={**os.environ, "HOME": home},
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_CHECKED_S,
            )
        except subprocess.TimeoutExpired:
            return f"its package took more than {_CHECKED_S:g} s to look at it"
    if ended.returncode == 0:
        return ""
    return (ended.stderr.strip().splitlines() or [f"it ended with exit status {ended.returncode}"])[-1][:_TOLD]


def _run_process(command: Sequence[str], script: Sequence[str] | None, content: bytes) -> None:
    """Runs a command to its end, or forks for a `script` of this interpreter's. Ends all that it left in its group.

    `content` is its standard input. Raises RuntimeError for an exit status other than 0.
    """
    asked, pipe = os.pipe()
    if script is None:
        process = subprocess.Popen(list(command), stdin=asked, start_new_session=True).pid
    elif (process := os.fork()) == 0:
        _become(script, asked)
    os.close(asked)
    with suppress(BrokenPipeError), os.fdopen(pipe, "wb") as file:  # the command need not read it
        file.write(content)
    # without reaping, so that the number of its group is not reused
    os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process, signal.SIGKILL)
    if status := os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]):
        raise RuntimeError(f"it ended with exit status {status} ({CLOSED})")


def script_of(command: Sequence[str]) -> list[str] | None:
    """Returns file and arguments of a command that is a Python program of this interpreter: `python FILE ...`, or a
    program that names the interpreter in its first line. None for any other command.
    """
    program = shutil.which(command[0])
    if program is None:
        return None
    if _is_own_interpreter(program):
        if len(command) > 1 and command[1].endswith(".py") and Path(command[1]).is_file():
            return list(command[1:])
        return None
    with suppress(OSError), open(program, "rb") as file:
        line = file.readline(_LONGEST_LINE)
        named = line[2:].split()
        if line.startswith(b"#!") and len(named) == 1 and _is_own_interpreter(os.fsdecode(named[0])):
            return [program, *command[1:]]
    return None


def _is_own_interpreter(program: str) -> bool:
    """Whether a path is of this interpreter: another environment's is a link to the same program elsewhere."""
    own = Path(sys.executable)
    path = Path(program)
    return path.name.startswith("python") and path.parent.resolve() == own.parent.resolve() and path.exists()


def _import_ahead(script: str) -> None:
    """Imports what the program will import at its top. What cannot be imported it will say itself."""
    import ast

    try:
        tree = ast.parse(Path(script).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    with _path_of(script), suppress(SystemExit):
        for node in tree.body:
            with suppress(Exception):
                if isinstance(node, ast.Import):
                    for each in node.names:
                        __import__(each.name)
                elif isinstance(node, ast.ImportFrom) and not node.level and node.module != "__future__":
                    __import__(node.module, fromlist=[each.name for each in node.names])


@contextmanager
def _path_of(script: str):
    """Seeks modules beside the program first, as its interpreter would."""
    sys.path.insert(0, str(Path(script).resolve().parent))
    try:
        yield
    finally:
        sys.path.pop(0)


def _become(script: Sequence[str], asked: int) -> None:
    """Runs the program in this process, which was forked for it, and ends as it ends."""
    status = 1
    try:
        os.setsid()
        os.dup2(asked, 0)
        if (seeing := witness()) is not None:
            seeing.keep_open_as(3)
        os.closerange(3 if seeing is None else 4, _MOST_FILES)
        sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
        sys.argv[:] = script
        with _path_of(script[0]):
            runpy.run_path(script[0], run_name="__main__")
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(BaseException):
            threading._shutdown()  # as an interpreter does at its end
            atexit._run_exitfuncs()
        with suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status & 0xFF)


def variables(url: str, key: str) -> dict[str, str]:
    """Returns the variables in which clients look for the endpoint."""
    return {
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": key,
        # the endpoint's hosts bypass proxies
        **{
            name: ",".join([*filter(None, [os.environ.get(name, "")]), "127.0.0.1", "localhost"])
            for name in ("NO_PROXY", "no_proxy")
        },
    }


@contextmanager
def _variables(given: Mapping[str, str]):
    """Sets these variables during the block. The next agent of the process has others."""
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
