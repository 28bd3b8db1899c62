"""Replaces verl's own classes of tools: same names, texts and rewards, but without Ray."""

import json
import re
import urllib.request
from typing import Any

from mrl.environments.python_tool import ProgramEnded, refuse_unconfined, run_program
from mrl.environments.sandbox import PythonLimits
from mrl.errors import ConfigError


def gsm8k_class() -> type:
    """Replaces verl's tool that checks an answer to a GSM8K problem."""
    from mrl.environments.verl_base_tool import BaseTool, ToolResponse

    class Gsm8kTool(BaseTool):
        def __init__(self, config: dict, tool_schema: Any):
            super().__init__(config, tool_schema)
            self._at: dict[str, list] = {}  # instance -> right answer, best reward so far

        async def create(self, instance_id: str | None = None, ground_truth: str | None = None, **_: Any):
            self._at[instance_id] = [ground_truth, 0.0]
            return instance_id, ToolResponse()

        async def execute(self, instance_id: str, parameters: dict[str, Any], **_: Any):
            answer = str(parameters.get("answer", ""))
            if not answer.startswith("#### "):
                answer = f"#### {answer}"
            right, before = self._at[instance_id]
            numbers = [each for each in re.findall(r"-?[0-9.,]+", answer[-300:]) if each != "."]
            reward = float(bool(numbers) and numbers[-1] == right)
            self._at[instance_id][1] = reward
            penalty = 0.0
            if reward <= before:
                penalty = -0.05
            return ToolResponse(text=f"Current parsed {answer=} {reward=}"), penalty, {}

        async def calc_reward(self, instance_id: str, **_: Any) -> float:
            return self._at[instance_id][1]

        async def release(self, instance_id: str, **_: Any) -> None:
            del self._at[instance_id]

    return Gsm8kTool


def sandbox_class(limits: PythonLimits) -> type:
    """Replaces verl's tool that runs a program on a server. It runs here, as with the tool python."""
    from mrl.environments.verl_base_tool import BaseTool, ToolResponse

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
    from mrl.environments.verl_base_tool import BaseTool, ToolResponse

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
