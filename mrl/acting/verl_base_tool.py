"""Replaces verl's base class of tools and its schemas (verl.tools.base_tool, verl.tools.schemas of January 2026).

It has the same names, fields and signatures, and only as much behaviour as a subclass needs.
"""

import uuid
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel


class OpenAIFunctionPropertySchema(BaseModel):
    """A parameter."""

    type: str
    description: str | None = None
    enum: list[str] | None = None


class OpenAIFunctionParametersSchema(BaseModel):
    """All parameters."""

    type: str = "object"
    properties: dict[str, OpenAIFunctionPropertySchema] = {}
    required: list[str] = []


class OpenAIFunctionSchema(BaseModel):
    """A function."""

    name: str
    description: str
    parameters: OpenAIFunctionParametersSchema = OpenAIFunctionParametersSchema()
    strict: bool = False


class OpenAIFunctionToolSchema(BaseModel):
    """A tool."""

    type: str
    function: OpenAIFunctionSchema


class ToolResponse(BaseModel):
    """What a tool answers."""

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None

    def is_empty(self) -> bool:
        """Tells whether it has no content."""
        return not (self.text or self.image or self.video)

    def is_text_only(self) -> bool:
        """Tells whether it consists of text alone."""
        return bool(self.text) and not (self.image or self.video)


class BaseTool:
    """A tool. An instance of it belongs to one response."""

    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema | None):
        self.config = config
        self.tool_schema = tool_schema or self.get_openai_tool_schema()
        if self.tool_schema is None:
            raise ValueError(f"{type(self).__name__} has no tool_schema, neither in its file nor in its class")
        self.name = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema | None:
        """Returns the schema. A class may define one itself."""
        return getattr(self, "tool_schema", None)

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        """Begins an instance."""
        return instance_id or uuid.uuid4().hex, ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict]:
        """Answers a call. Returns the answer, its reward and metrics."""
        return ToolResponse(text=""), 0.0, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """Returns the present reward of an instance."""
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Ends an instance."""


def rollout_trace_op(function: Callable[..., Any]) -> Callable[..., Any]:
    """Replaces the decorator that traces calls. Traces nothing."""
    return function
