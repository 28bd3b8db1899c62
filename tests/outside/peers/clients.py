"""What OpenAI's and Anthropic's own clients send, and take: bodies of requests, schemas of answers."""

import json
from contextlib import suppress
from typing import Any

import anthropic
import httpx2 as httpx
import openai
from anthropic.types import Message, ModelInfo, RawMessageStreamEvent
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
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
ANTHROPIC["system between"] = {"messages": [ASKED, {"role": "system", "content": "Be brief."}]}
COUNTED = {"tools": {"messages": [ASKED], "system": "Be brief.", "tools": [ANTHROPIC_TOOL]}}
FUNCTION = {"type": "function", "name": "double", "description": "2a", "parameters": PARAMETERS, "strict": False}
CALLED = {"type": "function_call", "call_id": "c1", "name": "double", "arguments": '{"a": 3}'}
REASONING = {"type": "reasoning", "id": "rs_1", "summary": []}
RESPONSES = {
    "plain": {"input": "Double 3.", "instructions": "Be brief."},
    "developer": {"input": [{"role": "developer", "content": "Be brief."}, ASKED], "max_output_tokens": 7},
    "parts": {
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "Double 3."}]}],
        "temperature": 0.5,
    },
    "tools": {"input": "Double 3.", "tools": [FUNCTION, {"type": "web_search"}]},
    "no tool": {"input": "Double 3.", "tools": [FUNCTION], "tool_choice": "none"},
    "answered": {
        "input": [ASKED, REASONING, CALLED, {"type": "function_call_output", "call_id": "c1", "output": "6"}],
        "tools": [FUNCTION],
    },
    "stream": {"input": "Double 3.", "stream": True, "store": False},
    "goes on": {"input": "Double 3.", "previous_response_id": "resp_1"},
}
COMPLETIONS = {"ids": {"prompt": [1, 2, 3], "max_tokens": 4}, "text": {"prompt": "1 2", "stream": True}}


def cases() -> list[dict]:
    schemas = {
        "openai whole": ChatCompletion.model_json_schema(),
        "openai stream": ChatCompletionChunk.model_json_schema(),
        "anthropic whole": Message.model_json_schema(),
        "anthropic stream": TypeAdapter(RawMessageStreamEvent).json_schema(),
        "responses whole": Response.model_json_schema(),
        "responses stream": TypeAdapter(ResponseStreamEvent).json_schema(),
        "completions whole": Completion.model_json_schema(),
        "openai model": Model.model_json_schema(),
        "anthropic model": ModelInfo.model_json_schema(),
    }
    return [
        *({"api": "openai", "name": name} | _sent(_openai, given) for name, given in OPENAI.items()),
        *({"api": "anthropic", "name": name} | _sent(_anthropic, given) for name, given in ANTHROPIC.items()),
        *({"api": "count", "name": name} | _sent(_count, given) for name, given in COUNTED.items()),
        *({"api": "responses", "name": name} | _sent(_responses, given) for name, given in RESPONSES.items()),
        *({"api": "completions", "name": name} | _sent(_completions, given) for name, given in COMPLETIONS.items()),
        *({"api": "schema", "name": name, "schema": schema} for name, schema in schemas.items()),
    ]


def _openai(http: httpx.Client, given: dict[str, Any]) -> None:
    client = openai.OpenAI(api_key="key", base_url="http://here/v1", http_client=http, max_retries=0)
    client.chat.completions.create(model="m", **given)


def _anthropic(http: httpx.Client, given: dict[str, Any]) -> None:
    client = anthropic.Anthropic(api_key="key", base_url="http://here", http_client=http, max_retries=0)
    client.messages.create(model="m", max_tokens=9, **given)


def _count(http: httpx.Client, given: dict[str, Any]) -> None:
    client = anthropic.Anthropic(api_key="key", base_url="http://here", http_client=http, max_retries=0)
    client.messages.count_tokens(model="m", **given)


def _responses(http: httpx.Client, given: dict[str, Any]) -> None:
    client = openai.OpenAI(api_key="key", base_url="http://here/v1", http_client=http, max_retries=0)
    client.responses.create(model="m", **given)


def _completions(http: httpx.Client, given: dict[str, Any]) -> None:
    client = openai.OpenAI(api_key="key", base_url="http://here/v1", http_client=http, max_retries=0)
    client.completions.create(model="m", **given)


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
