"""Requests of chat clients in OpenAI's or Anthropic's form, read into one kind of request, and answers in both forms.

    POST /v1/chat/completions   {"model", "messages", "tools", "max_tokens", "stream", ...}      OpenAI
    POST /v1/messages           {"model", "system", "messages", "tools", "max_tokens", ...}      Anthropic

Messages hold text, and those of users and tools images as well, by their bytes: nothing is fetched. Anything else is
refused. Settings of a client are counted by name, but not followed. Those
that would be answered by half, as for more than one answer, are refused. JSON in, JSON out: no
socket and no clock.
"""

import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from mrl.acting.client_tools import client_tool
from mrl.data.images import base64_in_url, from_base64
from mrl.data.samples import KnownImage

ROLES = ("system", "user", "assistant", "tool")
SAID = "said"  # role of a message that stands for one of the session's answers, until that is put in its place
# options of clients whose value asks for nothing; of any other, null, false and what is empty do
SAMPLING = {
    "top_k": -1, "n": 1, "best_of": 1, "presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1,
    "length_penalty": 1, "min_p": 0, "min_tokens": 0, "top_logprobs": 0, "response_format": {"type": "text"},
    "tool_choice": "auto", "parallel_tool_calls": True, "modalities": ["text"], "skip_special_tokens": True,
    "spaces_between_special_tokens": True, "add_generation_prompt": True, "truncation": "disabled",
    "text": {"format": {"type": "text"}},
}  # fmt: skip
# parts of a body that are read, and those that say nothing of the answer
_READ = {"model", "messages", "tools", "max_tokens", "stream"}
_READ_OPENAI = _READ | {"max_completion_tokens", "stream_options"}
_READ_ANTHROPIC = _READ | {"system", "thread"}
_LABELS = {
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "cache_control", "betas", "client_metadata",
}  # fmt: skip
_CALL_ID = re.compile(r"call_(\d{1,9})_\d+", re.ASCII)
RESPONSE_ID = "resp_"  # and the number of the answer
_ANSWER_ID = re.compile(r"(?:chatcmpl-|msg_|resp_|cmpl-)(\d{1,9})", re.ASCII)
_OTHER_ROLES = {"developer": "system", "function": "tool"}  # a newer and an older name of OpenAI's
_TEXTS = ("text", "input_text", "output_text")  # types of a text in a content
_MOST_SETTINGS = 64  # that are counted of one request
_SETTING = re.compile(r"[\w.-]{1,64}", re.ASCII)  # a name that a column holds
_NOTHING = (None, [], {}, "")


class BadRequest(ValueError):
    """A request that cannot be answered; the message says why."""


@dataclass(frozen=True)
class ChatCall:
    """One tool call in a message of the assistant."""

    id: str
    name: str
    arguments: Mapping[str, Any]
    is_read: bool = field(default=True, compare=False)  # False: a client's own text stands for them


@dataclass(frozen=True)
class ChatImage:
    """An image in a message. It is the same as another one with equal bytes."""

    digest: str
    data: bytes = field(default=b"", compare=False, repr=False)  # encoded; empty once it is known
    known: KnownImage | None = field(default=None, compare=False)  # once the run has stored it


@dataclass(frozen=True)
class ChatMessage:
    """One message, from either form."""

    role: str  # of ROLES, or SAID
    content: str  # all of its text
    calls: tuple[ChatCall, ...] = ()  # in a message of the assistant
    call_id: str = ""  # in a message of a tool: the call that it answers; in one of SAID: the number of the answer
    thought: str = ""  # reasoning of the assistant before the message; a client may drop it
    parts: tuple[str | ChatImage, ...] = ()  # texts and images in their order, if there is an image

    @property
    def images(self) -> tuple[ChatImage, ...]:
        """Its images, in order."""
        return tuple(part for part in self.parts if isinstance(part, ChatImage))

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """Equal for two messages that say the same. Clients rewrite arguments, ids and white space."""
        calls = tuple((call.name, json.dumps(plain(call.arguments), sort_keys=True)) for call in self.calls)
        shown = tuple(part.strip() if isinstance(part, str) else part for part in self.parts)
        return self.role, self.content.strip(), calls, shown

    @property
    def for_template(self) -> dict[str, Any]:
        """The message as chat templates take it."""
        message: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.parts:
            message["content"] = [
                {"type": "text", "text": part} if isinstance(part, str) else {"type": "image"} for part in self.parts
            ]
        if self.calls:
            functions = [{"name": call.name, "arguments": dict(call.arguments)} for call in self.calls]
            message["tool_calls"] = [{"type": "function", "function": each} for each in functions]
        return message


def plain(value: Any) -> Any:
    """Writes whole numbers as integers that a double holds. A client in JavaScript writes 1.0 as 1, and
    1234567890123456789 as 1234567890123456800.
    """
    if isinstance(value, int) and abs(value) > 2**53:
        with suppress(OverflowError):
            return int(float(value))
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {name: plain(each) for name, each in value.items()}
    if isinstance(value, list):
        return [plain(each) for each in value]
    return value


@dataclass(frozen=True)
class ChatRequest:
    """A client's request: the conversation as the client sees it, up to the message to be answered."""

    messages: tuple[ChatMessage, ...]
    tools: tuple[Mapping[str, Any], ...] = ()  # in OpenAI's form, as chat templates take them
    max_tokens: int | None = None
    stream: bool = False
    wants_usage: bool = False  # token counts at the end of a stream
    model: str = ""
    sampling: Mapping[str, Any] = field(default_factory=dict)  # settings that ask for something, by name
    chooses_no_tool: bool = False  # tool_choice: none
    choice: str | None = None  # name of the tool that the client wants called; "": any one
    previous: str = ""  # id of the answer whose conversation goes on
    is_thread: bool = False  # in the form of Anthropic: it goes on with the same tools and system
    # the first message is instructions: of Responses, which the next one does not inherit, or of a thread
    is_instructed: bool = False
    # of the form of Responses
    forms: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # tool -> namespace, type of its calls
    # of completions: the whole prompt, as token ids or as a text of them
    ids: tuple[int, ...] | None = None
    raw: str | None = None
    wants_ids: bool = False  # the answer has its token ids

    @property
    def wants_calls(self) -> bool:
        """Whether calls are taken out of the text. Without tools, and with the choice of none, a client reads the text,
        as OpenAI's API has it.
        """
        return bool(self.tools) and not self.chooses_no_tool

    @property
    def chosen(self) -> str | None:
        """The choice, where the tools have it; None where the client wants none that it offers."""
        names = [tool["function"]["name"] for tool in self.tools]
        return self.choice if self.choice in (["", *names] if names else ()) else None

    def overridden(self, own: Mapping[str, Any]) -> tuple[str, ...]:
        """Returns the names of settings that are not followed. `own`: the values by which the run samples."""
        return tuple(name for name, value in self.sampling.items() if name not in own or own[name] != value)


@dataclass(frozen=True)
class ChatAnswer:
    """The model's answer to a client."""

    number: int  # number of the answer in its session
    message: ChatMessage  # the client is expected to send it back
    is_cut: bool  # the limit of tokens ended it
    prompt_tokens: int
    tokens: int
    prompt_ids: tuple[int, ...] = ()
    ids: tuple[int, ...] = ()


def number_of(answer: str) -> int | None:
    """Returns the number of the answer that has this id in one of the forms; None for another text."""
    found = _ANSWER_ID.fullmatch(answer)
    return int(found[1]) if found else None


def answer_of_call(call: str) -> int | None:
    """Returns the number of the answer that has the call of this id; None for an id that a client made."""
    found = _CALL_ID.fullmatch(call)
    return int(found[1]) if found else None


class Api(NamedTuple):
    """One form: how requests are read, and how answers and errors are written."""

    parse: Callable[[Any], ChatRequest]
    whole: Callable[[ChatAnswer, ChatRequest], dict[str, Any]]
    events: Callable[[ChatAnswer, ChatRequest], Iterator[tuple[str, Any]]]  # a stream: (name or "", data)
    error: Callable[[int, str], dict[str, Any]]


# --- reading ----------------------------------------------------------------------------------------------------------


def parse_openai(body: Any) -> ChatRequest:
    """Reads a request for a chat completion. Raises BadRequest."""
    check_mapping(body, "the body")
    if body.get("functions") is not None or body.get("function_call") is not None:
        raise BadRequest("`functions` is OpenAI's older form; send `tools`")
    messages = [_openai_message(message) for message in list_of(body, "messages")]
    tools = [_openai_tool(tool) for tool in list_of(body, "tools")]
    limit = limit_of(body, "max_completion_tokens") or limit_of(body, "max_tokens")
    if messages and messages[-1].role == "assistant" and body.get("continue_final_message"):
        raise BadRequest("`continue_final_message` is true, and an answer is a message of its own: leave it out")
    options = body.get("stream_options") or {}
    check_mapping(options, "`stream_options`")
    return checked(body, _READ_OPENAI, messages, tools, limit, wants_usage=bool(options.get("include_usage")))


def _openai_message(message: Any) -> ChatMessage:
    check_mapping(message, "a message")
    role = message.get("role")
    if isinstance(role, str):
        role = _OTHER_ROLES.get(role, role)
    if not isinstance(role, str) or role not in ROLES:
        raise BadRequest(f"a message has the role {str(role)[:40]!r}; known: {', '.join(ROLES)}")
    calls = [_openaicall_of(call) for call in list_of(message, "tool_calls")]
    if message.get("function_call") is not None:  # the older form, which has one call without an id
        calls.append(_openaicall_of({"function": message["function_call"]}))
    call_id = string_of(message.get("tool_call_id"))
    return message_with(role, message.get("content"), tuple(calls), call_id)


def _openaicall_of(call: Any) -> ChatCall:
    check_mapping(call, "a call")
    function = call.get("function")
    check_mapping(function, _only_functions("a call", call))
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    return call_of(call.get("id"), function.get("name"), arguments)


def call_of(number: Any, name: Any, arguments: Any) -> ChatCall:
    """Makes a call of a client's history. Arguments that are no object stand there as they are: a client would send
    them again with every request to come.
    """
    if arguments is None:  # a call without arguments
        arguments = {}
    if isinstance(arguments, Mapping):
        return ChatCall(string_of(number), string_of(name), arguments)
    return ChatCall(string_of(number), string_of(name), {"arguments": arguments}, is_read=False)


def _openai_tool(tool: Any) -> dict[str, Any]:
    check_mapping(tool, "a tool")
    function = tool.get("function")
    check_mapping(function, _only_functions("a tool", tool))
    return tool_of(function, function.get("parameters"))


def _only_functions(what: str, given: Mapping[str, Any]) -> str:
    """Names the part that is missing, and the type of a tool or call that is no function."""
    kind = given.get("type")
    if kind in (None, "function"):
        return f"`function` of {what}"
    return f"{what} has the type {str(kind)[:40]!r}, and only functions with a schema are supported: `function`"


def parse_anthropic(body: Any) -> ChatRequest:
    """Reads a request for a message. Raises BadRequest."""
    check_mapping(body, "the body")
    thread = body.get("thread") or {}  # of a conversation that the server holds, under the id of its last answer
    check_mapping(thread, "`thread`")
    previous = string_of(thread.get("previous_message_id"))
    messages = []
    if body.get("system") not in _NOTHING:
        messages.append(ChatMessage("system", text_of(body["system"])))
    is_instructed = bool(messages and previous)
    for message in list_of(body, "messages"):
        messages += _anthropic_messages(message)
    tools = []
    left_out = []
    for tool in list_of(body, "tools"):
        check_mapping(tool, "a tool")
        kind = tool.get("type") or "custom"
        if kind == "custom" or tool.get("input_schema") is not None:
            check_mapping(tool.get("input_schema"), f"`input_schema` of tool {str(tool.get('name'))[:64]!r}")
            tools.append(tool_of(tool, tool["input_schema"]))
        elif (known := client_tool(str(kind))) is not None:
            tools.append(tool_of({"name": tool.get("name"), "description": known[0]}, known[1]))
        else:
            left_out.append(str(kind))
    if messages and messages[-1].role == "assistant":  # the vendor's older models go on inside of it
        raise BadRequest("the last message has the role assistant; it has to be user, tool or system")
    asked = checked(body, _READ_ANTHROPIC, messages, tools, limit_of(body, "max_tokens"), left_out)
    return replace(asked, previous=previous, is_thread=bool(previous), is_instructed=is_instructed)


def _anthropic_messages(message: Any) -> list[ChatMessage]:
    """Splits one message: the results of tools become messages of their own, before its text."""
    check_mapping(message, "a message")
    role = message.get("role")
    if role not in ("user", "assistant", "system"):
        raise BadRequest(f"a message has the role {str(role)[:40]!r}; known: user, assistant, system")
    content = message.get("content")
    if isinstance(content, str) or content is None:
        return [ChatMessage(role, content or "")]
    blocks = list_of(message, "content")
    for block in blocks:
        check_mapping(block, "a block of a message")
    results = [
        message_with("tool", block.get("content"), call_id=string_of(block.get("tool_use_id")))
        for block in blocks
        if block.get("type") == "tool_result"
    ]
    calls = [_anthropic_call(block) for block in blocks if block.get("type") == "tool_use"]
    known = ("tool_result", "tool_use", "thinking", "redacted_thinking")
    texts = [block for block in blocks if block.get("type") not in known]
    if results and not texts:
        return results
    return [*results, message_with(role, texts, tuple(calls))]


def _anthropic_call(block: Mapping[str, Any]) -> ChatCall:
    return call_of(block.get("id"), block.get("name"), block.get("input"))


def checked(
    body: Mapping[str, Any],
    read: Set[str],
    messages: Sequence[ChatMessage],
    tools: Sequence[Mapping[str, Any]],
    limit: int | None,
    left_out: Sequence[str] = (),
    wants_usage: bool = False,
) -> ChatRequest:
    """Makes a request of the parts of a body. `left_out`: types of tools that the model is not told of."""
    if not messages:
        raise BadRequest("there is no message")
    sampling = {name: value for name, value in body.items() if name not in read | _LABELS and _asks(name, value)}
    for name, why in _NOT_BY_HALF.items():
        if name in sampling:
            raise BadRequest(f"`{name}` is {str(sampling[name])[:40]}, and {why}")
    choice = body.get("tool_choice")
    asks_more = isinstance(choice, Mapping) and choice.get("disable_parallel_tool_use")
    chosen = _chosen(choice)
    if isinstance(choice, Mapping):
        choice = choice.get("type")
    if choice in ("auto", "none"):
        sampling.pop("tool_choice", None)
    if asks_more:
        sampling["disable_parallel_tool_use"] = True
    sampling |= dict.fromkeys(left_out, True)
    if not all(call.is_read for message in messages for call in message.calls):
        sampling["arguments"] = "no object"
    named = {name if _SETTING.fullmatch(name) else "other": value for name, value in sampling.items()}
    sampling = dict(itertools.islice(named.items(), _MOST_SETTINGS))
    model = body.get("model")
    model = model if isinstance(model, str) else ""
    stream = bool(body.get("stream"))
    messages = in_order_of_calls(messages)
    return ChatRequest(messages, tuple(tools), limit, stream, wants_usage, model, sampling, choice == "none", chosen)


def _chosen(choice: Any) -> str | None:
    """Returns the name of the tool that a client demands, "" for any tool; None where it demands none.

    Each form writes it in its own way: required, any; {"type": "function", "function": {"name"}}, {"type": "tool",
    "name"}.
    """
    kind = choice.get("type") if isinstance(choice, Mapping) else choice
    if kind in ("required", "any"):
        return ""
    if kind not in ("function", "tool", "custom") or not isinstance(choice, Mapping):
        return None
    inner = choice.get(kind)
    return string_of(inner.get("name") if isinstance(inner, Mapping) else choice.get("name")) or None


_NOT_BY_HALF = {
    "n": "one request has one answer: ask again for another",
    "logprobs": "log-probs are not given out: leave it out",
    "top_logprobs": "log-probs are not given out: leave it out",
}


def _asks(name: str, value: Any) -> bool:
    """Tells whether a setting asks for anything."""
    if name in SAMPLING:
        return value not in _NOTHING and value != SAMPLING[name]
    return value not in _NOTHING and value is not False


def in_order_of_calls(messages: Sequence[ChatMessage]) -> tuple[ChatMessage, ...]:
    """Orders the results of tools as their calls stand in the message before."""
    ordered: list[ChatMessage] = []
    order: dict[str, int] = {}
    results: list[ChatMessage] = []
    for message in messages:
        if message.role == "tool":
            results.append(message)
            continue
        ordered += _sorted(results, order)
        ordered.append(message)
        results = []
        order = {call.id: number for number, call in enumerate(message.calls)}
    return (*ordered, *_sorted(results, order))


def _sorted(results: list[ChatMessage], order: Mapping[str, int]) -> list[ChatMessage]:
    if all(message.call_id in order for message in results):
        return sorted(results, key=lambda message: order[message.call_id])
    return results


def check_mapping(value: Any, what: str) -> None:
    """Raises BadRequest for what is no object."""
    if not isinstance(value, Mapping):
        kind = "missing or null" if value is None else f"{type(value).__name__} ({str(value)[:60]!r})"
        raise BadRequest(f"{what} is {kind}, expected an object")


def list_of(body: Mapping[str, Any], name: str) -> list[Any]:
    """Returns a list of a body; empty where it is missing. Raises BadRequest."""
    value = body.get(name)
    if value is None:
        return []
    if not isinstance(value, list):
        raise BadRequest(f"`{name}` is {type(value).__name__}, expected a list")
    return value


def limit_of(body: Mapping[str, Any], name: str) -> int | None:
    """Returns a limit of tokens; None where it is missing. Raises BadRequest."""
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise BadRequest(f"`{name}` is {str(value)[:40]}, expected a whole number of at least 1")
    return value


def string_of(value: Any) -> str:
    """Returns a name or id; empty where it is missing. Raises BadRequest."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise BadRequest(f"a name or id is {type(value).__name__} ({str(value)[:60]!r}), expected a text")
    return value


def message_with(role: str, content: Any, calls: tuple[ChatCall, ...] = (), call_id: str = "") -> ChatMessage:
    """Makes a message with a client's content: a text, or a list of parts, among which a user's and a tool's may be
    images. Raises BadRequest.
    """
    parts: tuple[str | ChatImage, ...] = ()
    if isinstance(content, list) and role in ("user", "tool"):
        parts = tuple(_part(part) for part in content)
    if not any(isinstance(part, ChatImage) for part in parts):
        return ChatMessage(role, text_of(content), calls, call_id)
    text = "".join(part for part in parts if isinstance(part, str))
    return ChatMessage(role, text, calls, call_id, parts=tuple(part for part in parts if part))


def _part(part: Any) -> str | ChatImage:
    check_mapping(part, "a part of a message")
    match part.get("type"):
        case "image_url" | "input_image":  # of OpenAI's two forms
            url = part.get("image_url")
            return _of_url(url.get("url") if isinstance(url, Mapping) else url)
        case "image" if isinstance(source := part.get("source"), Mapping):  # of Anthropic's
            if source.get("type") == "base64":
                return _of_base64(source.get("data"))
            return _of_url(source.get("url"))
    return text_of([part])


def _of_url(url: Any) -> ChatImage:
    data = base64_in_url(url) if isinstance(url, str) else None
    if data is None:
        raise BadRequest(
            f"an image is at {str(url)[:60]!r}: nothing is fetched; send its bytes as data:image/png;base64,..."
        )
    return _of_base64(data)


def _of_base64(text: Any) -> ChatImage:
    try:
        data = from_base64(text if isinstance(text, str) else "?")
    except ValueError as error:
        raise BadRequest(f"an image is {str(text)[:40]!r}, which is no base64: {error}") from error
    return ChatImage(hashlib.blake2b(data, digest_size=16).hexdigest(), data)


def text_of(content: Any) -> str:
    """Returns the text of a content, which is a text or a list of parts. Raises BadRequest for a part without text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest(f"`content` is {type(content).__name__}, expected a text or a list of texts")
    texts = []
    for part in content:
        check_mapping(part, "a part of a message")
        text = _text_of_part(part)
        if not isinstance(text, str):
            raise BadRequest(f"a part of a message has the type {str(part.get('type'))[:40]!r}; only text is supported")
        texts.append(text)
    return "".join(texts)


def _text_of_part(part: Mapping[str, Any]) -> Any:
    """Returns the text of one part, whatever it is called; no text for pictures, sounds and files."""
    match part.get("type"):
        case kind if kind in _TEXTS:
            return part.get("text")
        case "refusal":  # of OpenAI's assistant
            return part.get("refusal")
        case "tool_reference":  # of Anthropic's search for tools
            return part.get("tool_name")
        case "search_result":
            return text_of(part.get("content"))
        case "document" if isinstance(source := part.get("source"), Mapping):
            if source.get("type") == "content":
                return text_of(source.get("content"))
            return source.get("data") if source.get("type") == "text" else None
    return None


def tool_of(function: Mapping[str, Any], parameters: Any) -> dict[str, Any]:
    """Writes one tool in OpenAI's form, with the three keys that templates read."""
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise BadRequest("a tool has no name")
    schema = {"type": "object"} if parameters is None else parameters
    check_mapping(schema, f"the schema of tool {name!r}")
    properties = schema.get("properties") or {}
    check_mapping(properties, f"`properties` of tool {name!r}")
    schema = {**schema, "properties": properties}
    described = {"name": name, "description": string_of(function.get("description")), "parameters": schema}
    return {"type": "function", "function": described}


# --- writing ----------------------------------------------------------------------------------------------------------


def openai_whole(answer: ChatAnswer, request: ChatRequest) -> dict[str, Any]:
    """Writes an answer as a chat completion."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.message.content or None}
    if answer.message.calls:
        message["tool_calls"] = [_openai_call_out(call) for call in answer.message.calls]
    elif not answer.message.content:
        message["content"] = ""
    if answer.message.thought:
        message |= _openai_thought(answer.message.thought)
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": _openai_finish(answer)}
    return _openai_head(answer, request, "chat.completion") | {"choices": [choice], "usage": openai_usage(answer)}


def openai_events(answer: ChatAnswer, request: ChatRequest) -> Iterator[tuple[str, Any]]:
    """Yields an answer as chunks of a stream, as OpenAI's server cuts it: one chunk has thoughts, text, or a part of
    one call. Some clients read no more of a chunk.
    """
    head = _openai_head(answer, request, "chat.completion.chunk")
    for delta in _openai_deltas(answer.message):
        yield "", head | {"choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}]}
    last = {"index": 0, "delta": {}, "logprobs": None, "finish_reason": _openai_finish(answer)}
    yield "", head | {"choices": [last]}
    if request.wants_usage:
        yield "", head | {"choices": [], "usage": openai_usage(answer)}
    yield "", "[DONE]"


def _openai_deltas(message: ChatMessage) -> Iterator[dict[str, Any]]:
    yield {"role": "assistant", "content": ""}
    if message.thought:
        yield _openai_thought(message.thought)
    if message.content:
        yield {"content": message.content}
    for index, call in enumerate(message.calls):
        whole = _openai_call_out(call)
        function = whole["function"]
        yield {"tool_calls": [{"index": index, **whole, "function": function | {"arguments": ""}}]}
        yield {"tool_calls": [{"index": index, "function": {"arguments": function["arguments"]}}]}


def _openai_thought(thought: str) -> dict[str, str]:
    return {"reasoning_content": thought, "reasoning": thought}  # vLLM has renamed it to the second


def _openai_head(answer: ChatAnswer, request: ChatRequest, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{answer.number}", "object": kind, "created": 0, "model": request.model}


def _openai_call_out(call: ChatCall) -> dict[str, Any]:
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _openai_finish(answer: ChatAnswer) -> str:
    if answer.is_cut:
        return "length"
    if answer.message.calls:
        return "tool_calls"
    return "stop"


def openai_usage(answer: ChatAnswer) -> dict[str, int]:
    both = answer.prompt_tokens + answer.tokens
    return {"prompt_tokens": answer.prompt_tokens, "completion_tokens": answer.tokens, "total_tokens": both}


def openai_error(status: int, why: str) -> dict[str, Any]:
    """Writes an error in OpenAI's form."""
    return {"error": {"message": why, "type": _kind_of(status), "param": None, "code": None}}


def anthropic_whole(answer: ChatAnswer, request: ChatRequest) -> dict[str, Any]:
    """Writes an answer as a message in Anthropic's form."""
    usage = {"input_tokens": answer.prompt_tokens, "output_tokens": answer.tokens}
    return _anthropic_head(answer, request) | {
        "content": _anthropic_blocks(answer),
        "stop_reason": _anthropic_finish(answer),
        "usage": usage,
    }


def anthropic_events(answer: ChatAnswer, request: ChatRequest) -> Iterator[tuple[str, Any]]:
    """Yields an answer as events of a stream, each block in one delta."""
    head = _anthropic_head(answer, request) | {"usage": {"input_tokens": answer.prompt_tokens, "output_tokens": 0}}
    yield _event("message_start", message=head)
    for index, block in enumerate(_anthropic_blocks(answer)):
        if block["type"] == "text":
            empty = {"type": "text", "text": ""}
            delta = {"type": "text_delta", "text": block["text"]}
        else:
            empty = block | {"input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"], ensure_ascii=False)}
        yield _event("content_block_start", index=index, content_block=empty)
        yield _event("content_block_delta", index=index, delta=delta)
        yield _event("content_block_stop", index=index)
    ended = {"stop_reason": _anthropic_finish(answer), "stop_sequence": None}
    yield _event("message_delta", delta=ended, usage={"output_tokens": answer.tokens})
    yield _event("message_stop")


def _event(kind: str, **data: Any) -> tuple[str, dict[str, Any]]:
    return kind, {"type": kind, **data}


def _anthropic_head(answer: ChatAnswer, request: ChatRequest) -> dict[str, Any]:
    named = {"id": f"msg_{answer.number}", "type": "message", "role": "assistant", "model": request.model}
    return named | {"content": [], "stop_reason": None, "stop_sequence": None}


def _anthropic_blocks(answer: ChatAnswer) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if answer.message.content:
        blocks.append({"type": "text", "text": answer.message.content})
    calls = [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": dict(call.arguments)}
        for call in answer.message.calls
    ]
    return blocks + calls


def _anthropic_finish(answer: ChatAnswer) -> str:
    if answer.is_cut:
        return "max_tokens"
    if answer.message.calls:
        return "tool_use"
    return "end_turn"


def anthropic_error(status: int, why: str) -> dict[str, Any]:
    """Writes an error in Anthropic's form."""
    return {"type": "error", "error": {"type": _kind_of(status), "message": why}}


def _kind_of(status: int) -> str:
    return _ERRORS.get(status, "invalid_request_error" if status < 500 else "api_error")


_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
}
CHAT_APIS = {
    "/v1/chat/completions": Api(parse_openai, openai_whole, openai_events, openai_error),
    "/v1/messages": Api(parse_anthropic, anthropic_whole, anthropic_events, anthropic_error),
}
