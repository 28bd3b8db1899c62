"""Checks what agents and their tools need: the client of MCP, harnesses by name, and those that a configuration has.

A run that has neither needs none of it, so what is not installed is no failure without a configuration.
"""

import importlib.metadata
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from mrl.acting.environment_pool import check_tools
from mrl.acting.harnesses import HARNESSES, VERIFIERS, Harness
from mrl.acting.tool import ToolsSpec
from mrl.config.schema import RunConfig
from mrl.engine.requests import turns_spec
from mrl.errors import MrlError
from mrl.tools.doctor.host_facts import Finding, failure, ok

_VERSION_S = 5.0  # for a program to say its version
_SHOWN = 60  # characters of a version
_AT_ONCE = 8


def agent_checks() -> Iterator[Finding]:
    """Yields whether the package mcp and the programs of harnesses are here, with their versions."""
    try:
        yield ok("mcp", f"the package is installed, version {importlib.metadata.version('mcp')}")
    except importlib.metadata.PackageNotFoundError:
        yield ok("mcp", "the package is not installed, and few runs need it: pip install 'mrl[mcp]'")
    named = {name: harness for name, harness in HARNESSES.items() if harness.loop is None}
    with ThreadPoolExecutor(len(named)) as threads:
        for name, found in zip(named, threads.map(_program, named.values()), strict=True):
            yield ok(f"harness:{name}", found)


def _program(harness: Harness) -> str:
    path = shutil.which(harness.program)
    if path is None:
        return f"{harness.program} is not on PATH, and few runs need it: {harness.install}"
    try:
        said = subprocess.run(
            [path, "--version"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_VERSION_S,
            text=True,
            errors="replace",
        ).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{path} does not say its version ({type(error).__name__}); tried: {harness.install}"
    version = (said.strip().splitlines() or ["unknown"])[-1][:_SHOWN]
    return f"{path}, version {version}; tried: {harness.install}"


def checks_of(config: RunConfig) -> Iterator[Finding]:
    """Yields whether each MCP server of a configuration lists tools, and whether its agent can be started here.

    Each is tried in a process that is confined as those of the run are.
    """
    turns = turns_spec(config.rollout.turns, config.data, config.rollout.agent)
    if turns is None:
        return
    bare = replace(turns.tools, names=(), environments=(), mcp_servers={}, sandbox=None)
    tried = {f"mcp:{name}": replace(bare, mcp_servers={name: each}) for name, each in turns.tools.mcp_servers.items()}
    if turns.tools.has_agent and not turns.tools.in_sandbox:
        tried["agent"] = bare
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        yield from threads.map(_tried, tried, tried.values())


def _tried(name: str, spec: ToolsSpec) -> Finding:
    try:
        offer = check_tools(spec)
    except MrlError as error:
        return failure(name, str(error), "the message says what to change")
    if offer.agent:
        what = spec.harness or spec.path or " ".join(spec.command)
        of_config = ", with its configuration" if spec.harness == VERIFIERS else ""
        return ok(name, f"{what} can be started{of_config}")
    tools = [tool["function"]["name"] for tool in offer.tools]
    return ok(name, f"the server starts and lists {len(tools)}: {', '.join(tools)}")
