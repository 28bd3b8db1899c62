"""A user's file that was written for verl: classes of its BaseTool."""

import asyncio
from typing import Any

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.utils.rollout_trace import rollout_trace_op

RELEASED = "released.txt"


class Counter(BaseTool):
    """Counts from what the row gives, and says what it has released."""

    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)
        self._at: dict[str, int] = {}

    async def create(self, instance_id: str | None = None, start: int = 0, **kwargs) -> tuple[str, ToolResponse]:
        assert kwargs["create_kwargs"]["start"] == start, "newer classes find it there"
        self._at[instance_id] = start
        return instance_id, ToolResponse()

    @rollout_trace_op
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs) -> tuple[ToolResponse, float, dict]:
        await asyncio.sleep(0)
        self._at[instance_id] += parameters["by"] * kwargs.get("factor", 1)
        if self._at[instance_id] > self.config["most"]:
            raise ValueError("too far")
        return ToolResponse(text=f"at {self._at[instance_id]}"), 0.25, {"steps": 1}

    async def calc_reward(self, instance_id: str, **kwargs) -> float:
        return float(self._at[instance_id])

    async def release(self, instance_id: str, **kwargs) -> None:
        with open(self.config["log"], "a") as file:
            file.write(f"{self._at.pop(instance_id)}\n")


class Old(BaseTool):
    """Of the days when create gave the number alone, and execute a text; it brings its own schema."""

    def get_openai_tool_schema(self):
        parameters = {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]}
        function = {"name": "shout", "description": "Shouts.", "parameters": parameters}
        return OpenAIFunctionToolSchema.model_validate({"type": "function", "function": function})

    async def create(self, instance_id=None, loud=False):
        self.loud = loud
        return instance_id

    async def execute(self, instance_id, parameters):
        return parameters["word"].upper() + "!" * self.loud, None, {}


class Pictures(Old):
    """Answers by what is no text."""

    async def execute(self, instance_id, parameters):
        return ToolResponse(text="see", image=[b"a"]), 0.0, {}


class Strict(Old):
    """Takes what it knows, and nothing else."""

    async def create(self, instance_id=None, start=0, create_kwargs=None):
        if set(create_kwargs) - {"start"}:
            raise TypeError(f"it was given {sorted(create_kwargs)}")
        return await super().create(instance_id), None


class Named(Old):
    """Takes a picture by its name."""

    async def create(self, instance_id=None, image=None):
        self.size = image if isinstance(image, str) else image.size
        return await super().create(instance_id)

    async def execute(self, instance_id, parameters, **_):
        return str(self.size), 0.0, {}


class Crops(Old):
    """As public tools for images do: it keeps the row's image, and answers with a part of it."""

    async def create(self, instance_id=None, **kwargs):
        self.image = kwargs.get("create_kwargs", {})["image"]
        assert kwargs["image"] is self.image
        return instance_id, ToolResponse()

    async def execute(self, instance_id, parameters, **kwargs):
        if parameters["word"] == "film":
            return ToolResponse(video=[self.image]), 0.0, {}
        return ToolResponse(text="a part", image=[None, self.image.crop((0, 0, 8, 16))]), 0.5, {}
