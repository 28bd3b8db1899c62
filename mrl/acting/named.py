"""Turns a ToolsSpec into tools and environments. Runs in the workers; a user's file is imported nowhere else."""

import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

from mrl.acting.agent import AGENT, Run, agent_fault, agent_tool, command_of, harness_of, tried_config
from mrl.acting.builtin import BUILTIN_ENVIRONMENTS, BUILTIN_TOOLS
from mrl.acting.environment import Environment
from mrl.acting.harnesses import HARNESSES
from mrl.acting.python_tool import PYTHON, python_tool
from mrl.acting.sandbox import PythonLimits
from mrl.acting.search_tool import SEARCH, search_tool
from mrl.acting.text_arena import TEXTARENA, load_textarena
from mrl.acting.tool import Tool, ToolsSpec
from mrl.acting.verl_environment import verl_environment
from mrl.acting.verl_tool_config import VERL_TOOLS
from mrl.acting.verl_tools import FUNCTIONS, mock_verl
from mrl.errors import ConfigError
from mrl.reward.resolve import load_function, load_module

PATH_KEY = "rollout.turns.path"
REPOSITORY = "repository"
AGENT_KEY = "rollout.agent.path"
SHIPPED = (*BUILTIN_TOOLS, SEARCH, PYTHON)  # tools
SHIPPED_ENVIRONMENTS = (*BUILTIN_ENVIRONMENTS, VERL_TOOLS, REPOSITORY)


def resolve_tools(spec: ToolsSpec) -> dict[str, Tool]:
    """Returns the tools by name. A function of the user's file overrides a built-in one with its name.

    Raises ConfigError for an unknown name, a file that is missing or fails, and an invalid tool.
    """
    module = _module(spec)
    found = {}
    for name in spec.names:
        if name in FUNCTIONS:
            found[name] = Tool.of(FUNCTIONS[name], name)
        elif name in BUILTIN_TOOLS and not hasattr(module, name):
            found[name] = BUILTIN_TOOLS[name]
        elif name == SEARCH and spec.index is not None and not hasattr(module, name):
            found[name] = search_tool(spec.index)
        elif name == PYTHON and not hasattr(module, name):
            found[name] = python_tool(PythonLimits(**spec.python))
        elif module is not None:
            found[name] = Tool.of(load_function(module, name, f"{PATH_KEY}: {spec.path}"), name)
        else:
            raise ConfigError(
                f"rollout.turns.tools: {name!r} is not shipped; shipped: {', '.join(SHIPPED)}. Name the file "
                f"with a function of your own in {PATH_KEY}"
            )
    return found


def resolve_agent(spec: ToolsSpec) -> dict[str, Tool]:
    """Returns the agent under its name.

    Raises ConfigError for a missing program, and for a file that is missing, fails, lacks the function, or has one that
    cannot be called as an agent.
    """
    if spec.in_sandbox:
        return {}
    own_home = "HOME" not in spec.environment  # whoever names it wants the user's
    if spec.harness is not None:
        return {AGENT: agent_tool(_harness(spec))}
    if spec.command and shutil.which(spec.command[0]) is None:
        raise ConfigError(f"rollout.agent.command: no executable program {spec.command[0]!r} was found")
    if spec.command:
        return {AGENT: agent_tool(command_of(spec.command), own_home)}
    module = load_module(Path(spec.path), AGENT_KEY)
    run = load_function(module, spec.agent, f"{AGENT_KEY}: {spec.path}")
    if fault := agent_fault(run):
        raise ConfigError(f"{AGENT_KEY}: {spec.path}: {spec.agent} {fault}")
    return {AGENT: agent_tool(run, own_home)}


def _harness(spec: ToolsSpec) -> Run:
    harness = HARNESSES[spec.harness]
    program = shutil.which(spec.program or harness.program)
    if program is None:
        raise ConfigError(
            f"rollout.agent.harness: {spec.harness} needs the program {spec.program or harness.program!r}, which was "
            f"not found: {harness.install}, or name it in rollout.agent.program"
        )
    is_first = spec.listed is None  # the process that a pool starts first looks at what stays as it is
    if is_first and harness.tries_config and (fault := tried_config(harness, program, spec.harness_config)):
        raise ConfigError(f"rollout.agent.harness_config: {spec.harness} does not take it: {fault}")
    return harness_of(harness, program, spec.arguments, spec.harness_config)


def resolve_environments(spec: ToolsSpec, broker: Any = None) -> dict[str, type[Environment]]:
    """Returns the environments by name. A class of the user's file overrides a built-in one with its name.

    `broker` starts sandboxes.

    Raises ConfigError for an unknown name and for an invalid environment.
    """
    module = None
    if spec.environments:
        module = _module(spec)
    found = {}
    if spec.in_sandbox:
        from mrl.acting.sandboxes.sandboxed_agent import sandboxed_agent

        found[AGENT] = sandboxed_agent(broker, spec)
    for name in spec.environments:
        if name in BUILTIN_ENVIRONMENTS and not hasattr(module, name):
            if name == TEXTARENA:
                load_textarena()
            found[name] = BUILTIN_ENVIRONMENTS[name]
        elif name == VERL_TOOLS and spec.tool_config is not None and not hasattr(module, name):
            found[name] = verl_environment(spec.tool_config, PythonLimits(**spec.python), spec.network)
        elif name == REPOSITORY and not hasattr(module, name):
            from mrl.acting.sandboxes.repository import repository

            found[name] = repository(broker)
        elif module is not None:
            found[name] = _environment(module, name, f"{PATH_KEY}: {spec.path}")
        else:
            raise ConfigError(
                f"rollout.turns.environments: {name!r} is not shipped; shipped: {', '.join(SHIPPED_ENVIRONMENTS)}. "
                f"Name the file with a class of your own in {PATH_KEY}"
            )
    return found


def _environment(module: ModuleType, name: str, where: str) -> type[Environment]:
    kind = load_function(module, name, where)
    if not isinstance(kind, type) or not issubclass(kind, Environment):
        raise ConfigError(f"{where}: {name} is not a subclass of mrl.acting.environment.Environment")
    return kind


_modules: dict[str, ModuleType] = {}  # loaded by this process, by path


def _module(spec: ToolsSpec) -> ModuleType | None:
    if spec.path is None:
        return None
    if spec.path not in _modules:
        mock_verl()
        _modules[spec.path] = load_module(Path(spec.path), PATH_KEY)
    return _modules[spec.path]
