"""An agent of the user's in the process of the pool, for one conversation: a function of the user's file, or a command.

It is told the endpoint's address and key, the row, and how long it may take. Variables name address and key too, under
the names that clients of OpenAI and Anthropic look for, so that an agent which knows nothing of mrl finds the model.
"""

import inspect
import json
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from mrl.environments.tool import Tool

AGENT = "agent"  # the name of its calls
Run = Callable[[str, str, Mapping[str, Any], float], Any]


def agent_tool(run: Run) -> Tool:
    """The agent as what a process of the pool calls; `run`: with url, key, row and seconds."""

    def agent(url: str, key: str, row: dict, seconds: float) -> str:
        """Runs an agent until it has ended."""
        with _variables(variables(url, key)):
            _run(run, url, key, row, seconds)
        return ""

    return Tool.of(agent, AGENT)


def _run(run: Run, *told: Any) -> None:
    """Runs it to its end, a coroutine too. Raises what it raises, but for an exit that says that all is well."""
    try:
        value = run(*told)
        if inspect.iscoroutine(value):
            import asyncio  # here: a fifth of the time in which any process of tools starts

            asyncio.run(value)
    except SystemExit as end:
        if end.code:
            raise


def command_of(words: Sequence[str]) -> Run:
    """Runs a command: the row and all but the key come as JSON on its standard input."""

    def run(url: str, key: str, row: Mapping[str, Any], seconds: float) -> None:
        told = json.dumps({"url": url, "row": row, "seconds": seconds}).encode()
        process = subprocess.Popen(list(words), stdin=subprocess.PIPE, start_new_session=True)
        with suppress(BrokenPipeError), process.stdin as given:  # it need not read it
            given.write(told)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # its group has its number until it is reaped
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        if status := process.wait():
            raise RuntimeError(f"it ended with exit status {status}")

    return run


def variables(url: str, key: str) -> dict[str, str]:
    """Variables by which clients find the endpoint."""
    return {
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": key,
        **{name: _beside_ours(os.environ.get(name, "")) for name in ("NO_PROXY", "no_proxy")},
    }


def _beside_ours(hosts: str) -> str:
    """Hosts that no proxy is asked for: those given, and the endpoint's."""
    return ",".join([*filter(None, [hosts]), "127.0.0.1", "localhost"])


@contextmanager
def _variables(given: Mapping[str, str]):
    """These variables for the time of the block; the next agent of the process has others."""
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
