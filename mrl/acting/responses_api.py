"""Requests in the form of OpenAI's Responses, and of its older completions, and answers in these forms.

    POST /v1/responses     {"model", "input", "instructions", "tools", "previous_response_id", "stream", ...}
    POST /v1/completions   {"model", "prompt", "max_tokens", ...}: the prompt is token ids, or a text of them

A conversation in the form of Responses is a list of items. Those of one answer (a message, calls, reasoning) are one
message here; reasoning is never read back, because the model's own tokens are kept. With `previous_response_id` the
items are new ones behind that response. A tool of the type `custom` has a text as its argument: the model is told of a
function with the parameter `input`. JSON in, JSON out, as in mrl.acting.chat_api.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from mrl.acting.chat_api import (
    CHAT_APIS,
    RESPONSE_ID,
    SAID,
    Api,
    BadRequest,
    ChatAnswer,
    ChatCall,
    ChatMessage,
    ChatRequest,
    answer_of_call,
    call_of,
    check_mapping,
    checked,
    limit_of,
    list_of,
    message_with,
    openai_error,
    openai_usage,
    string_of,
    text_of,
    tool_of,
)

RESPONSES = "/v1/responses"
COMPLETIONS = "/v1/completions"
_INPUT = "input"  # parameter of a tool whose argument is a text
_READ = {"model", "input", "instructions", "tools", "max_output_tokens", "stream", "stream_options"}
_READ |= {"previous_response_id"}
_READ_COMPLETION = {"model", "prompt", "max_tokens", "stream", "stream_options", "return_token_ids"}
# states of the service that no session has
_REFUSED = {
    "background": "an answer is waited for: leave it out",
    "conversation": "a session is one conversation: send previous_response_id, or all items",
    "prompt": "no prompts are stored: send instructions and input",
}
_CALLS = ("function_call", "custom_tool_call")
_RESULTS = ("function_call_output", "custom_tool_call_output")
_REFERENCE = "item_reference"
_TEXT, _THOUGHT, _CALL = "msg_", "rs_", "fc_call_"  # how ids of the items of an answer begin
_ITEM_ID = re.compile(rf"({_TEXT}|{_THOUGHT}|{_CALL})(\d{{1,9}})(?:_\d+)?", re.ASCII)
_JOINT = "__"  # between the namespace and the name of a tool, as the model is told it


# --- Responses --------------------------------------------------------------------------------------------------------


def parse_responses(body: Any) -> ChatRequest:
    """Reads a request for a response. Raises BadRequest."""
    check_mapping(body, "the body")
    for name, why in _REFUSED.items():
        if body.get(name):
            raise BadRequest(f"`{name}` is {str(body[name])[:40]}, and {why}")
    if "message.output_text.logprobs" in list_of(body, "include"):
        raise BadRequest("`include` asks for log-probs, which are not given out: leave it out")
    messages = []
    if body.get("instructions"):
        messages.append(ChatMessage("system", text_of(body["instructions"])))
    is_instructed = bool(messages)
    given = body.get("input")
    if isinstance(given, str):
        messages.append(ChatMessage("user", given))
    else:
        messages += _messages_of(list_of(body, "input"))
    tools, forms, left_out = _tools_of(list_of(body, "tools"))
    limit = limit_of(body, "max_output_tokens")
    previous = string_of(body.get("previous_response_id"))
    asked = checked(body, _READ, messages, tools, limit, left_out)
    return replace(asked, previous=previous, is_instructed=is_instructed, forms=forms)


def _messages_of(items: Sequence[Any]) -> list[ChatMessage]:
    """Reads items. What an answer consists of becomes one message again."""
    messages: list[ChatMessage] = []
    goes_on = False  # the last message is an answer that further items may belong to
    has_text = False  # and its text is named by its id
    for item in items:
        check_mapping(item, "an item of the input")
        kind = item.get("type") or "message"
        if kind == "reasoning":
            continue
        if kind == _REFERENCE or set(item) == {"id"}:
            named, answer = _item_named(item.get("id"))
            if not goes_on or not _may_belong(messages[-1], named, answer):
                messages.append(ChatMessage("assistant", ""))
            # all items of an answer stand for it together, also with others of it that are whole
            has_text = named == _TEXT or (has_text and messages[-1].role == SAID)
            messages[-1] = replace(messages[-1], role=SAID, call_id=answer)
            goes_on = True
            continue
        if kind in _RESULTS:
            messages.append(message_with("tool", item.get("output"), call_id=string_of(item.get("call_id"))))
        elif kind in _CALLS:
            call = _call_of(item)
            if not goes_on or (messages[-1].role == SAID and messages[-1].call_id != str(answer_of_call(call.id))):
                messages.append(ChatMessage("assistant", ""))
            messages[-1] = replace(messages[-1], calls=(*messages[-1].calls, call))
        elif kind == "message":
            goes_on = goes_on and not (messages[-1].role == SAID and has_text)
            messages += _message_of(item, messages.pop() if goes_on else None)
        else:
            raise BadRequest(f"an item of the input has the type {str(kind)[:40]!r}, which is not supported")
        goes_on = messages[-1].role in ("assistant", SAID)
    return messages


def _item_named(item: Any) -> tuple[str, str]:
    """Returns what an item is, by the beginning of its id, and the number of its answer. Raises BadRequest for an
    unknown id.
    """
    found = _ITEM_ID.fullmatch(string_of(item))
    if found is None:
        raise BadRequest(f"an item of the input is named {str(item)[:60]!r}, which is no item of an answer")
    return found[1], found[2]


def _may_belong(message: ChatMessage, kind: str, answer: str) -> bool:
    """Tells whether a message so far may be of the answer of which an item is named. A text that a client gives whole
    stands before calls of its answer, and is not named as well.
    """
    if message.content and kind != _CALL:
        return False
    if message.role == SAID:
        return message.call_id == answer
    return all(str(answer_of_call(call.id)) == answer for call in message.calls)


def _message_of(item: Mapping[str, Any], before: ChatMessage | None) -> list[ChatMessage]:
    """Reads a message item. Text behind calls of the same answer (`before`) belongs to it."""
    role = item.get("role")
    if role == "developer":
        role = "system"
    if role not in ("system", "user", "assistant"):
        raise BadRequest(f"a message has the role {str(role)[:40]!r}; known: system, developer, user, assistant")
    message = message_with(role, item.get("content"))
    if before is None:
        return [message]
    if role == "assistant" and not before.content:
        return [replace(before, content=message.content)]
    return [before, message]


def _call_of(item: Mapping[str, Any]) -> ChatCall:
    name = _named(string_of(item.get("namespace")), string_of(item.get("name")))
    if item.get("type") == "custom_tool_call":
        return ChatCall(string_of(item.get("call_id")), name, {_INPUT: string_of(item.get("input"))})
    arguments = item.get("arguments") or "{}"
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    return call_of(item.get("call_id"), name, arguments)


def _named(namespace: str, name: str) -> str:
    return f"{namespace}{_JOINT}{name}" if namespace else name


def _tools_of(
    tools: Sequence[Any], namespace: str = ""
) -> tuple[list[Mapping[str, Any]], dict[str, tuple[str, str]], list[str]]:
    """Returns the functions; how each is to be called, as namespace and type of the item; and the types of tools that
    are left out.
    """
    functions: list[Mapping[str, Any]] = []
    forms = {}
    left_out = []
    for tool in tools:
        check_mapping(tool, "a tool")
        kind = tool.get("type")
        named = dict(tool) | {"name": _named(namespace, string_of(tool.get("name")))}
        if kind == "function":
            functions.append(tool_of(named, tool.get("parameters")))
            forms[named["name"]] = (namespace, "function_call")
        elif kind == "custom":
            functions.append(tool_of(named, {"type": "object", "properties": {_INPUT: {"type": "string"}}}))
            forms[named["name"]] = (namespace, "custom_tool_call")
        elif kind == "namespace" and not namespace:
            inner, inner_forms, inner_left = _tools_of(list_of(tool, "tools"), string_of(tool.get("name")))
            functions += inner
            forms |= inner_forms
            left_out += inner_left
        else:
            left_out.append(str(kind))
    return functions, forms, left_out


def responses_whole(answer: ChatAnswer, request: ChatRequest) -> dict[str, Any]:
    """Writes an answer as a response."""
    return _head(answer, request, "incomplete" if answer.is_cut else "completed") | {
        "output": _items(answer, request),
        "usage": _usage(answer),
        "incomplete_details": {"reason": "max_output_tokens"} if answer.is_cut else None,
    }


def responses_events(answer: ChatAnswer, request: ChatRequest) -> Iterator[tuple[str, Any]]:
    """Yields an answer as events of a stream, each text in one delta."""
    for number, (kind, data) in enumerate(_events(answer, request)):
        yield kind, {"type": kind, "sequence_number": number, **data}


def _events(answer: ChatAnswer, request: ChatRequest) -> Iterator[tuple[str, dict[str, Any]]]:
    begun = _head(answer, request, "in_progress")
    yield "response.created", {"response": begun}
    yield "response.in_progress", {"response": begun}
    for index, item in enumerate(_items(answer, request)):
        position = {"output_index": index}
        empty = item | {"status": "in_progress"}
        emptied = {"message": {"content": []}, "reasoning": {"content": []}, "function_call": {"arguments": ""}}
        empty |= emptied.get(item["type"], {_INPUT: ""})
        yield "response.output_item.added", position | {"item": empty}
        for kind, data in _parts(item):
            yield f"response.{kind}", position | {"item_id": item["id"]} | data
        yield "response.output_item.done", position | {"item": item}
    whole = responses_whole(answer, request)
    yield f"response.{whole['status']}", {"response": whole}


def _parts(item: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields what is between the beginning and the end of an item."""
    if item["type"] == "function_call":
        yield "function_call_arguments.delta", {"delta": item["arguments"]}
        yield "function_call_arguments.done", {"arguments": item["arguments"], "name": item["name"]}
        return
    if item["type"] == "custom_tool_call":
        yield "custom_tool_call_input.delta", {"delta": item[_INPUT]}
        yield "custom_tool_call_input.done", {_INPUT: item[_INPUT]}
        return
    (part,) = item["content"]
    position = {"content_index": 0}
    name = part["type"]
    more: dict[str, Any] = {"logprobs": []} if name == "output_text" else {}
    yield "content_part.added", position | {"part": part | {"text": ""}}
    yield f"{name}.delta", position | {"delta": part["text"]} | more
    yield f"{name}.done", position | {"text": part["text"]} | more
    yield "content_part.done", position | {"part": part}


def _head(answer: ChatAnswer, request: ChatRequest, status: str) -> dict[str, Any]:
    return {
        "id": f"{RESPONSE_ID}{answer.number}",
        "object": "response",
        "created_at": 0,
        "status": status,
        "model": request.model,
        "output": [],
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "previous_response_id": request.previous or None,
        "temperature": None,
        "top_p": None,
        "tool_choice": "none" if request.chooses_no_tool else "auto",
        "tools": [],
        "usage": None,
    }


def _items(answer: ChatAnswer, request: ChatRequest) -> list[dict[str, Any]]:
    """Writes an answer as items: reasoning, a message, calls."""
    message = answer.message
    items: list[dict[str, Any]] = []
    if message.thought:
        thought = {"type": "reasoning_text", "text": message.thought}
        items.append({"type": "reasoning", "id": f"rs_{answer.number}", "summary": [], "content": [thought]})
    if message.content or not message.calls:
        text = {"type": "output_text", "text": message.content, "annotations": [], "logprobs": []}
        named = {"type": "message", "id": f"msg_{answer.number}", "role": "assistant", "status": "completed"}
        items.append(named | {"content": [text]})
    for call in message.calls:
        namespace, kind = request.forms.get(call.name, ("", "function_call"))
        named = {"id": f"fc_{call.id}", "call_id": call.id, "status": "completed"}
        named["name"] = call.name.removeprefix(_named(namespace, ""))
        if namespace:
            named["namespace"] = namespace
        if kind == "custom_tool_call" and isinstance(call.arguments.get(_INPUT), str):
            items.append({"type": "custom_tool_call", **named, _INPUT: call.arguments[_INPUT]})
        else:
            arguments = json.dumps(call.arguments, ensure_ascii=False)
            items.append({"type": "function_call", **named, "arguments": arguments})
    return items


def _usage(answer: ChatAnswer) -> dict[str, Any]:
    return {
        "input_tokens": answer.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": answer.tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": answer.prompt_tokens + answer.tokens,
    }


# --- completions ------------------------------------------------------------------------------------------------------


def parse_completion(body: Any) -> ChatRequest:
    """Reads a request for a completion of one prompt. Raises BadRequest."""
    check_mapping(body, "the body")
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], list | str):
        (prompt,) = prompt
    asked = checked(body, _READ_COMPLETION, [ChatMessage("user", "")], [], limit_of(body, "max_tokens"))
    options = body.get("stream_options") or {}
    check_mapping(options, "`stream_options`")
    asked = replace(
        asked,
        messages=(),
        wants_usage=bool(options.get("include_usage")),
        wants_ids=bool(body.get("return_token_ids")),
    )
    if isinstance(prompt, str) and prompt:
        return replace(asked, raw=prompt)
    if isinstance(prompt, list) and prompt and all(type(each) is int for each in prompt):
        return replace(asked, ids=tuple(prompt))
    raise BadRequest("`prompt` is one prompt: a list of token ids, or a text of them; it has to have a token")


def completion_whole(answer: ChatAnswer, request: ChatRequest) -> dict[str, Any]:
    """Writes an answer as a completion."""
    return _completion_head(answer, request) | {
        "choices": [_choice(answer, request, answer.message.content, "length" if answer.is_cut else "stop")],
        "usage": openai_usage(answer),
    }


def completion_events(answer: ChatAnswer, request: ChatRequest) -> Iterator[tuple[str, Any]]:
    """Yields an answer as chunks of a stream: all in one."""
    whole = completion_whole(answer, request)
    usage = whole.pop("usage")
    yield "", whole
    if request.wants_usage:
        yield "", whole | {"choices": [], "usage": usage}
    yield "", "[DONE]"


def _completion_head(answer: ChatAnswer, request: ChatRequest) -> dict[str, Any]:
    return {"id": f"cmpl-{answer.number}", "object": "text_completion", "created": 0, "model": request.model}


def _choice(answer: ChatAnswer, request: ChatRequest, text: str, reason: str) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}
    if request.wants_ids:  # under the names of vLLM's server
        choice |= {"token_ids": list(answer.ids), "prompt_token_ids": list(answer.prompt_ids)}
    return choice


APIS = {
    **CHAT_APIS,
    RESPONSES: Api(parse_responses, responses_whole, responses_events, openai_error),
    COMPLETIONS: Api(parse_completion, completion_whole, completion_events, openai_error),
}
