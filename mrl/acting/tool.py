"""A typed Python function with a docstring as a tool: its schema for the model, and checks of arguments.

    def lookup(word: str, most: int = 3) -> str:
        \"\"\"Finds a word in the dictionary.

        Args:
            word: in lower case
            most: how many meanings
        \"\"\"

A parameter is a str, int, float, bool, list, dict, a list of one of them, or a Literal. It may also allow None.
"""

import inspect
import re
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from mrl.errors import ConfigError
from mrl.reward.items import ANSWER_BYTES
from mrl.units import MIB

LONGEST_AGENT_S = 1e6  # longer than any conversation
LONGEST_NAME = 64  # bytes of the name of a tool or a part, which become columns
_KINDS = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}
IMAGES_BYTES = 64 * MIB  # of all encoded images of one answer
TYPES = {"string": str, "integer": int, "number": int | float, "boolean": bool, "array": list, "object": dict}


@dataclass(frozen=True)
class ToolsSpec:
    """Tools and environments to use: names of built-in ones, or of functions and classes in the user's file `path`."""

    names: tuple[str, ...]
    path: str | None = None
    max_memory_gib: float | None = None  # limit of a process's address space; None: unlimited
    environment: tuple[str, ...] = ()  # variables that a process gets in addition to the usual ones
    network: bool = False  # whether it may use the network
    folders: tuple[str, ...] = ()  # that it may write into, in addition to temporary ones
    environments: tuple[str, ...] = ()
    index: str | None = None  # for the built-in tool `search`
    python: Mapping[str, Any] = field(default_factory=dict)  # limits of the built-in tool `python`, by name
    tool_config: str | None = None  # verl's file of tools, for the environment `verl_tools`
    sandbox: Mapping[str, Any] | None = None  # of commands, by names of SandboxSpec
    mcp_servers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # by names of ServerSpec
    listed: Mapping[str, Any] | None = None  # schemas of their tools, which the first process of a pool has read
    # an agent instead of both: a command, or a function of that name in the file at `path`
    command: tuple[str, ...] = ()
    agent: str | None = None
    harness: str | None = None  # or one of mrl.acting.harnesses, with
    program: str | None = None  # its program,
    arguments: tuple[str, ...] = ()  # further arguments of it, and
    harness_config: Mapping[str, Any] = field(default_factory=dict)
    in_sandbox: bool = False  # the command or the harness runs in a sandbox of the row's
    sees: bool = False  # the model reads images

    @property
    def answer_bytes(self) -> int:
        """Limit of one answer as JSON, which has images in base64."""
        return ANSWER_BYTES + (2 * IMAGES_BYTES if self.sees else 0)

    @property
    def has_agent(self) -> bool:
        """Tells whether an agent talks to the model. Then the model gets the agent's tools."""
        return bool(self.command) or self.agent is not None or self.harness is not None

    @property
    def judge_s(self) -> float:
        """Seconds that tests of a response may take, and their sandbox to start."""
        return 3 * (self.sandbox or {}).get("max_test_seconds", 0.0)

    @property
    def is_here(self) -> bool:
        """Tells whether the named files exist on this host."""
        return all(
            Path(path).expanduser().exists() for path in (self.path, self.index, self.tool_config) if path is not None
        )


@dataclass(frozen=True)
class TurnsSpec:
    """Limits and settings of a conversation. Names are those of `rollout.turns`."""

    tools: ToolsSpec
    max_turns: int
    max_calls: int
    max_seconds: float
    max_answer_characters: int
    timeout_s: float
    num_workers: int
    # for the chat template, in addition to the tools
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    max_prompt_length: int = 0  # tokens of an agent's first request
    needs_reward: bool = False  # an agent must give a reward
    # names of these three are those of `rollout.agent`
    max_requests: int = 8  # of one agent that are answered at once
    keeps_all_answers: bool = False
    enforces_tool_choice: bool = False

    @property
    def step_s(self) -> float:
        """Deadline of a call in a process. An agent is one call that lasts for the whole conversation."""
        if self.tools.has_agent:
            return LONGEST_AGENT_S
        return self.timeout_s


@dataclass(frozen=True)
class Tool:
    """One function. `schema` is given to a chat template, in OpenAI's form."""

    function: Callable[..., Any]
    schema: Mapping[str, Any] = field(compare=False)

    @classmethod
    def of(cls, function: Callable[..., Any], name: str) -> "Tool":
        """Makes a tool with that name. Raises ConfigError for a function with an incomplete description."""
        if len(name.encode()) > LONGEST_NAME:
            raise ConfigError(f"a tool is named {name!r}; a name is at most {LONGEST_NAME} bytes, as UTF-8")
        if fault := generator_fault(function):
            raise ConfigError(f"tool {name!r} {fault}")
        docstring = inspect.getdoc(function)
        if not docstring:
            raise ConfigError(f"tool {name!r} has no docstring; the model needs one as its description")
        described = _described(docstring)
        properties = {}
        required = []
        hints = _hints(function, name)
        for parameter in inspect.signature(function).parameters.values():
            properties[parameter.name] = _schema_of(parameter, hints, name) | described.get(parameter.name, {})
            if parameter.default is parameter.empty:
                required.append(parameter.name)
        parameters = {"type": "object", "properties": properties, "required": required}
        own = {"name": name, "description": docstring.split("\n\n")[0].replace("\n", " "), "parameters": parameters}
        return cls(function, {"type": "function", "function": own})

    @cached_property
    def _parameters(self) -> Mapping[str, Any]:
        return self.schema["function"]["parameters"]

    def problem(self, arguments: Mapping[str, Any]) -> str | None:
        """Returns what is wrong with the arguments of a call; None for nothing."""
        properties = self._parameters["properties"]
        missing = [name for name in self._parameters["required"] if name not in arguments]
        unknown = [name for name in arguments if name not in properties]
        if missing or unknown:
            takes = ", ".join(properties) or "nothing"
            return f"{(missing or unknown)[0]!r} is {'missing' if missing else 'unknown'}; it takes {takes}"
        for name, value in arguments.items():
            if not _fits(value, properties[name]):
                return f"{name!r} is not of the kind {_describe(properties[name])}: {str(value)[:80]}"
        return None


def generator_fault(function: Callable[..., Any]) -> str:
    """Says that a function is a generator; empty where it is none."""
    for each in (function, inspect.unwrap(function)):
        if inspect.isgeneratorfunction(each) or inspect.isasyncgenfunction(each):
            return "is a generator, whose call runs nothing: return instead of yield"
    return ""


def _described(docstring: str) -> dict[str, dict[str, str]]:
    """Reads the descriptions of parameters from the lines below `Args:`."""
    _, _, below = docstring.partition("\nArgs:\n")
    lines = below.split("\n\n")[0]
    return {name: {"description": text.strip()} for name, text in re.findall(r"^ +(\w+)[^:\n]*: (.+)$", lines, re.M)}


def _hints(function: Callable[..., Any], name: str) -> dict[str, Any]:
    try:
        return get_type_hints(function)
    except Exception as error:  # a user's annotations may raise anything
        raise ConfigError(f"tool {name!r}: its annotations cannot be read: {error}") from error


def _schema_of(parameter: inspect.Parameter, hints: Mapping[str, Any], tool: str) -> dict[str, Any]:
    if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
        raise ConfigError(f"tool {tool!r}: {parameter} cannot be called by name; give every parameter one")
    if parameter.name not in hints:
        raise ConfigError(f"tool {tool!r}: parameter {parameter.name!r} has no type; annotate it")
    schema = _schema(hints[parameter.name])
    if schema is None:
        kinds = ", ".join(kind.__name__ for kind in _KINDS)
        raise ConfigError(
            f"tool {tool!r}: no schema for the type of {parameter.name!r}; allowed: {kinds}, a list of one of them, "
            "a Literal, and any of these or None"
        )
    return schema


def _schema(kind: Any) -> dict[str, Any] | None:
    """Returns the JSON schema of a type; None if it has none."""
    origin = get_origin(kind)
    arguments = get_args(kind)
    if isinstance(kind, type) and kind in _KINDS:
        return {"type": _KINDS[kind]}
    if origin is Literal and all(isinstance(each, str) for each in arguments):
        return {"type": "string", "enum": list(arguments)}
    if origin is list and not arguments:
        return {"type": "array"}
    if origin is list:
        of_each = _schema(arguments[0])
        return of_each and {"type": "array", "items": of_each}
    if origin is dict:
        return {"type": "object"}
    if origin in (Union, types.UnionType) and type(None) in arguments and len(arguments) == 2:
        of_value = _schema(next(each for each in arguments if each is not type(None)))
        return of_value and of_value | {"nullable": True}
    return None


def _fits(value: Any, schema: Mapping[str, Any]) -> bool:
    if value is None:
        return bool(schema.get("nullable"))
    kind = schema["type"]
    if not isinstance(value, TYPES[kind]) or (isinstance(value, bool) and kind != "boolean"):
        return False
    if kind == "array" and "items" in schema:
        return all(_fits(each, schema["items"]) for each in value)
    return value in schema.get("enum", [value])


def _describe(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return " or ".join(map(repr, schema["enum"]))
    return schema["type"]
