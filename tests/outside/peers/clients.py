"""What OpenAI's and Anthropic's own clients send, and take: bodies of requests, schemas of answers."""

import json
from contextlib import suppress
from typing import Any

import anthropic
import httpx2 as httpx
import openai
from anthropic.types import Message, RawMessageStreamEvent
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import TypeAdapter

PEERS = ("openai", "anthropic")
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
OPENAI_TOOL = {"type": "function", "function": {"name": "double", "description": "2a", "parameters": PARAMETERS}}
ANTHROPIC_TOOL = {"name": "double", "description": "2a", "input_schema": PARAMETERS}
CALL = {"id": "c1", "type": "function", "function": {"name": "double", "arguments": '{"a": 3}'}}
USED = {"type": "tool_use", "id": "c1", "name": "double", "input": {"a": 3}}
ASKED = {"role": "user", "content": "Double 3."}
OPENAI = {
    "plain": {"messages": [{"role": "system", "content": "Be brief."}, ASKED]},
    "developer": {"messages": [{"role": "developer", "content": "Be brief."}, ASKED], "max_completion_tokens": 7},
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "Double 3."}]}], "temperature": 0.5},
    "tools": {"messages": [ASKED], "tools": [OPENAI_TOOL], "parallel_tool_calls": False},
    "no tool": {"messages": [ASKED], "tools": [OPENAI_TOOL], "tool_choice": "none"},
    "answered": {
        "messages": [
            ASKED,
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": "6"},
        ],
        "tools": [OPENAI_TOOL],
    },
    "stream": {"messages": [ASKED], "stream": True, "stream_options": {"include_usage": True}, "seed": 5},
}
ANTHROPIC = {
    "plain": {"messages": [ASKED], "system": "Be brief."},
    "blocks": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Double 3."}]}],
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
    },
    "tools": {"messages": [ASKED], "tools": [ANTHROPIC_TOOL]},
    "no tool": {"messages": [ASKED], "tools": [ANTHROPIC_TOOL], "tool_choice": {"type": "none"}},
    "answered": {
        "messages": [
            ASKED,
            {"role": "assistant", "content": [{"type": "text", "text": "So:"}, USED]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "6"}]},
        ],
        "tools": [ANTHROPIC_TOOL],
    },
    "stream": {"messages": [ASKED], "stream": True, "metadata": {"user_id": "u"}},
}


def cases() -> list[dict]:
    schemas = {
        "openai whole": ChatCompletion.model_json_schema(),
        "openai stream": ChatCompletionChunk.model_json_schema(),
        "anthropic whole": Message.model_json_schema(),
        "anthropic stream": TypeAdapter(RawMessageStreamEvent).json_schema(),
    }
    return [
        *({"api": "openai", "name": name} | _sent(_openai, given) for name, given in OPENAI.items()),
        *({"api": "anthropic", "name": name} | _sent(_anthropic, given) for name, given in ANTHROPIC.items()),
        *({"api": "schema", "name": name, "schema": schema} for name, schema in schemas.items()),
    ]


def _openai(http: httpx.Client, given: dict[str, Any]) -> None:
    client = openai.OpenAI(api_key="key", base_url="http://here/v1", http_client=http, max_retries=0)
    client.chat.completions.create(model="m", **given)


def _anthropic(http: httpx.Client, given: dict[str, Any]) -> None:
    client = anthropic.Anthropic(api_key="key", base_url="http://here", http_client=http, max_retries=0)
    client.messages.create(model="m", max_tokens=9, **given)


def _sent(call: Any, given: dict[str, Any]) -> dict[str, Any]:
    """The path and the body of what the client sends."""
    seen: list[httpx.Request] = []

    def refuse(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(400, json={"error": {"message": "enough"}})

    with suppress(openai.APIStatusError, anthropic.APIStatusError):
        call(httpx.Client(transport=httpx.MockTransport(refuse)), given)
    (request,) = seen
    return {"path": request.url.path, "body": json.loads(request.content)}
