"""A user's agent in a process of the pool, for one conversation: a function of the user's file, or a command.

It gets the endpoint's address and key, the row, and its time limit. Variables also name address and key, as clients of
OpenAI and Anthropic expect. So an agent that does not know mrl finds the model.
"""

import inspect
import json
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from mrl.acting.tool import Tool, generator_fault

AGENT = "agent"  # the tool name of its calls
Run = Callable[[str, str, Mapping[str, Any], float], Any]


def agent_tool(run: Run) -> Tool:
    """Makes the agent a tool of the pool. `run` gets url, key, row and seconds."""

    def agent(url: str, key: str, row: dict, seconds: float) -> str:
        """Runs an agent until it has ended."""
        with _variables(variables(url, key)):
            _run(run, url, key, row, seconds)
        return ""

    return Tool.of(agent, AGENT)


def _run(run: Run, *arguments: Any) -> None:
    """Runs it to its end, including a coroutine. Raises what it raises, except for an exit with status 0."""
    try:
        value = run(*arguments)
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
        inspect.signature(run).bind("url", "key", {}, 1.0)
    except TypeError as error:
        return f"is called with url, key, row and seconds, and cannot take them: {error}"
    except ValueError:  # a callable without a signature
        pass
    return ""


def command_of(words: Sequence[str]) -> Run:
    """Returns a function that runs a command. The row and everything but the key come as JSON on its standard input."""

    def run(url: str, key: str, row: Mapping[str, Any], seconds: float) -> None:
        content = json.dumps({"url": url, "row": row, "seconds": seconds}).encode()
        process = subprocess.Popen(list(words), stdin=subprocess.PIPE, start_new_session=True)
        with suppress(BrokenPipeError), process.stdin as pipe:  # the command need not read it
            pipe.write(content)
        # without reaping, so that the number of its group is not reused
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        if status := process.wait():
            raise RuntimeError(f"it ended with exit status {status}")

    return run


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
