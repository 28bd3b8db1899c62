"""verl's classes of tools (`BaseTool`) as one environment, with an action for each tool.

An instance of a tool begins with its first call in a response. It is released at the response's end, as verl's base
class documents. verl's own agent loop makes one for each call. It gets a row's `extra_info.tools_kwargs` under verl's
names. The reward of a call is the reply's. After each call `calc_reward` gives a part with the tool's name. If a tool
raises, the model reads the error, as with every tool.
"""

import importlib
import inspect
import json
import re
import sys
import traceback
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from mrl.acting.environment import IMAGES, MOST_PARTS, Action, Environment, Reply, encoded, settled
from mrl.acting.python_tool import ProgramEnded, refuse_unconfined, run_program
from mrl.acting.sandbox import PythonLimits
from mrl.acting.verl_tool_config import (
    CONFIG_KEY,
    GSM8K,
    SANDBOX,
    SEARCH_R1,
    ToolEntry,
    problem_of,
    read_tool_config,
    root_of,
)
from mrl.acting.verl_tools import mock_verl
from mrl.errors import ConfigError
from mrl.reward.verl_modules import missing

_TYPES = ("string", "integer", "number", "boolean", "array", "object")


class VerlTools(Environment):
    """All tools of a file."""

    tools: ClassVar[Mapping[str, Any]] = {}  # by name, in this process

    def reset(self, row: Mapping[str, Any], seed: int) -> None:
        """Stores what the row gives each tool."""
        self._given = row["extra_info"].get("tools_kwargs") or {}
        self._files = row.get(IMAGES) or []
        self._instances: dict[str, str] = {}

    def step(self, action: Action) -> Reply:
        """Answers a call."""
        return settled(self._called(action.name, dict(action.arguments)))

    def close(self) -> None:
        """Releases all begun instances."""
        settled(self._released())

    async def _called(self, name: str, arguments: dict[str, Any]) -> Reply:
        tool = self.tools[name]
        try:
            if name not in self._instances:
                given = self._kwargs(name, "create_kwargs")
                if given.get("image") is None and _takes_image(tool):  # parquet gives every row all keys
                    given |= self._shown()
                self._instances[name] = await _begun(tool, given)
            instance = self._instances[name]
            answer, reward, *_ = await tool.execute(instance, arguments, **self._kwargs(name, "execute_kwargs"))
            so_far = await tool.calc_reward(instance, **self._kwargs(name, "calc_reward_kwargs"))
            images = _images(answer)
        except Exception as error:  # any error of a tool is the answer to its call
            traceback.print_exc()
            return Reply(f"Error: {name}: {type(error).__name__}: {error}")
        parts = {}
        if isinstance(so_far, bool | int | float):
            parts[name] = so_far
        return Reply(_text(answer), reward or 0.0, parts, images=images)

    async def _released(self) -> None:
        for name, instance in self._instances.items():
            try:
                await self.tools[name].release(instance, **self._kwargs(name, "release_kwargs"))
            except Exception:  # the other instances must be released, too
                traceback.print_exc()

    def _shown(self) -> dict[str, Any]:
        """Returns what tools are given of the prompt's images: the first one, as public tools for images take it."""
        if not self._files:
            return {}
        from mrl.data.images import open_image  # here: it loads what reads data

        return {"image": open_image(Path(self._files[0]).read_bytes(), 1, sys.maxsize)}

    def _kwargs(self, name: str, of: str) -> dict[str, Any]:
        return dict((self._given.get(name) or {}).get(of) or {})


def _takes_image(tool: Any) -> bool:
    """Tells whether a tool's `create` takes `image`, by that name or as one of any."""
    parameters = inspect.signature(tool.create).parameters
    return "image" in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


async def _begun(tool: Any, given: dict[str, Any]) -> str:
    """Begins an instance. Classes get the row's values under its names, newer ones also as `create_kwargs`."""
    given = {"create_kwargs": dict(given), **given}
    parameters = inspect.signature(tool.create).parameters
    if not any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        given = {name: value for name, value in given.items() if name in parameters}
    begun = await tool.create(uuid.uuid4().hex, **given)
    if isinstance(begun, tuple):
        return begun[0]
    return begun


def _images(answer: Any) -> tuple[bytes, ...]:
    """Returns the images of an answer; as in verl, None among them is none. Raises TypeError for videos."""
    if getattr(answer, "video", None):
        raise TypeError("it answers with a video, and only text and images are read")
    images = getattr(answer, "image", None) or ()
    return encoded([image for image in images if image is not None])


def _text(answer: Any) -> Any:
    """Returns what the model reads."""
    if hasattr(answer, "text"):
        return answer.text or ""
    if isinstance(answer, dict) and set(answer) == {"text"}:
        return answer["text"]
    return answer


def verl_environment(path: str, limits: PythonLimits, network: bool) -> type[Environment]:
    """Makes the environment of the tools in verl's file. Raises ConfigError, naming the class, for what cannot be
    loaded.

    `limits` of programs, and `network` access of tools, apply to the replacements of verl's own classes.
    """
    own = {GSM8K: gsm8k_class, SANDBOX: lambda: sandbox_class(limits), SEARCH_R1: lambda: search_class(network)}
    tools = {}
    schemas = {}
    for entry in read_tool_config(Path(path)):
        where = f"{CONFIG_KEY}: {path}: {entry.class_name}"
        tool = _made(entry, Path(path), own, where)
        name, schema = _schema(tool, where)
        if name in tools:
            raise ConfigError(f"{where}: two tools have the name {name}; rename one")
        tools[name] = tool
        schemas[name] = schema
    if len(tools) > MOST_PARTS:
        raise ConfigError(f"{CONFIG_KEY}: {path} has {len(tools)} tools; at most {MOST_PARTS} are allowed")
    return type("VerlTools", (VerlTools,), {"tools": tools, "schemas": schemas})


def _made(entry: ToolEntry, path: Path, own: Mapping[str, Callable[[], type]], where: str) -> Any:
    """Makes the tool of an entry."""
    mock_verl()
    from verl.tools.schemas import OpenAIFunctionToolSchema

    kind = _class(entry, path, own, where)
    try:
        schema = entry.schema and OpenAIFunctionToolSchema.model_validate(entry.schema)
        return kind(config=dict(entry.config), tool_schema=schema or None)
    except ConfigError:
        raise
    except Exception as error:  # a user's class may raise anything
        raise ConfigError(f"{where}: it cannot be created: {type(error).__name__}: {error}") from error


def _class(entry: ToolEntry, path: Path, own: Mapping[str, Callable[[], type]], where: str) -> Any:
    if not hasattr(sys.modules["verl"], "__version__"):
        if problem := problem_of(entry, path):
            raise ConfigError(f"{where}: {problem}; write it as an environment of your own (docs/tools.md)")
        if entry.class_name in own:
            return _stood_in(own[entry.class_name], where)
    module_name, _, name = entry.class_name.rpartition(".")
    root = root_of(entry, path)
    if root is not None:
        sys.path.append(str(root))
    try:
        return getattr(importlib.import_module(module_name), name)
    except ModuleNotFoundError as error:
        raise ConfigError(f"{where}: {_missing(error)}") from error
    except Exception as error:
        raise ConfigError(f"{where}: importing it failed: {type(error).__name__}: {error}") from error


def _stood_in(make: Callable[[], type], where: str) -> type:
    try:
        return make()
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _missing(error: ModuleNotFoundError) -> str:
    return f"its module needs {error.name}, which is not installed{missing(error)}"


def _schema(tool: Any, where: str) -> tuple[str, dict[str, Any]]:
    """Returns the name of a tool, and its schema for chat templates."""
    function = tool.tool_schema.model_dump(exclude_none=True)["function"]
    properties = {}
    for name, given in function["parameters"]["properties"].items():
        if given["type"] not in _TYPES:
            raise ConfigError(f"{where}: parameter {name!r} is of type {given['type']!r}, which calls do not support")
        properties[name] = given
    required = list(function["parameters"]["required"])
    parameters = {"type": "object", "properties": properties, "required": required}
    own = {"name": function["name"], "description": function["description"], "parameters": parameters}
    return function["name"], {"type": "function", "function": own}


def gsm8k_class() -> type:
    """Replaces verl's tool that checks an answer to a GSM8K problem."""
    from mrl.acting.verl_base_tool import BaseTool, ToolResponse

    class Gsm8kTool(BaseTool):
        def __init__(self, config: dict, tool_schema: Any):
            super().__init__(config, tool_schema)
            self._at: dict[str, list] = {}  # instance -> right answer, best reward so far

        async def create(self, instance_id: str | None = None, ground_truth: str | None = None, **_: Any):
            self._at[instance_id] = [ground_truth, 0.0]
            return instance_id, ToolResponse()

        async def execute(self, instance_id: str, parameters: dict[str, Any], **_: Any):
            given = str(parameters.get("answer", ""))
            answer = given if given.startswith("#### ") else f"#### {given}"
            right, before = self._at[instance_id]
            numbers = [each for each in re.findall(r"-?[0-9.,]+", answer[-300:]) if each != "."]
            reward = float(bool(numbers) and numbers[-1] == right)
            self._at[instance_id][1] = reward
            penalty = 0.0
            if reward <= before:
                penalty = -0.05
            return ToolResponse(text=f"Current parsed answer={given!r} {reward=}"), penalty, {}

        async def calc_reward(self, instance_id: str, **_: Any) -> float:
            return self._at[instance_id][1]

        async def release(self, instance_id: str, **_: Any) -> None:
            del self._at[instance_id]

    return Gsm8kTool


def sandbox_class(limits: PythonLimits) -> type:
    """Replaces verl's tool that runs a program on a server. It runs here, as with the tool python."""
    from mrl.acting.verl_base_tool import BaseTool, ToolResponse

    refuse_unconfined("it", limits)

    class SandboxFusionTool(BaseTool):
        async def execute(self, instance_id: str, parameters: dict[str, Any], **_: Any):
            try:
                return ToolResponse(text=run_program(str(parameters.get("code", "")), limits)), 0.0, {}
            except ProgramEnded as error:
                return ToolResponse(text=f"Error: {error}"), 0.0, {}

    return SandboxFusionTool


def search_class(network: bool) -> type:
    """Replaces verl's tool that asks a service for passages, with Search-R1's protocol.

    `network` says whether it may use the network. Raises ConfigError if not.
    """
    from mrl.acting.verl_base_tool import BaseTool, ToolResponse

    if not network:
        raise ConfigError(
            "it asks a service over the network, which tools do not have: set rollout.turns.network to true"
        )

    class SearchTool(BaseTool):
        async def execute(self, instance_id: str, parameters: dict[str, Any], **_: Any):
            queries = parameters.get("query_list")
            if not queries:
                return ToolResponse(text=_result("Error: 'query_list' is missing or empty.")), 0.0, {}
            asked = {"queries": queries, "topk": self.config.get("topk", 3), "return_scores": True}
            try:
                found = _asked(self.config["retrieval_service_url"], asked, self.config.get("timeout", 30))
                shown = "\n---\n".join(map(_shown, found["result"]))
            except (OSError, ValueError, KeyError, TypeError) as error:
                return ToolResponse(text=_result(f"Search error: {error}")), 0.0, {}
            return ToolResponse(text=_result(shown or "No search results found.")), 0.0, {}

    return SearchTool


def _asked(url: str, asked: dict[str, Any], seconds: float) -> dict[str, Any]:
    import urllib.request  # here: other processes of tools start without it

    headers = {"Content-Type": "application/json", "Accept": "application/json"}
    request = urllib.request.Request(url, json.dumps(asked).encode(), headers)
    with urllib.request.urlopen(request, timeout=seconds) as answer:
        return json.loads(answer.read())


def _shown(found: list[dict[str, Any]]) -> str:
    """Formats passages for the model. The first line of each is its title."""
    shown = []
    for number, each in enumerate(found, 1):
        title, _, text = each["document"]["contents"].partition("\n")
        shown.append(f"Doc {number} (Title: {title})\n{text}")
    return "\n\n".join(shown).strip()


def _result(text: str) -> str:
    return json.dumps({"result": text}, ensure_ascii=False)
