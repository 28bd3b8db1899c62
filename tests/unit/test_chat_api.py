"""Both forms of chat requests as one, answers in both, and what cannot be read."""

import json
import random
from base64 import b64encode
from dataclasses import replace

import pytest

from mrl.acting.chat_api import CHAT_APIS as APIS
from mrl.acting.chat_api import (
    SAID,
    BadRequest,
    ChatAnswer,
    ChatCall,
    ChatMessage,
    parse_anthropic,
    parse_openai,
    text_of,
)
from mrl.acting.responses_api import parse_responses

TOOL = {"name": "search", "description": "Finds.", "parameters": {"type": "object", "properties": {"q": {}}}}
ARGUMENTS = {"q": "näh", "n": 2}


def openai(**more):
    call = {"id": "c1", "type": "function", "function": {"name": "search", "arguments": json.dumps(ARGUMENTS)}}
    return {
        "model": "m",
        "messages": [
            {"role": "system", "content": "Be short."},
            {"role": "user", "content": [{"type": "text", "text": "Who "}, {"type": "text", "text": "is it?"}]},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "Nobody."},
        ],
        "tools": [{"type": "function", "function": TOOL}],
    } | more


def anthropic(**more):
    return {
        "model": "m",
        "system": [{"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": "Who is it?"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm"},
                    {"type": "tool_use", "id": "c1", "name": "search", "input": ARGUMENTS},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "Nobody."}]},
        ],
        "tools": [{"name": "search", "description": "Finds.", "input_schema": TOOL["parameters"]}],
        "max_tokens": 9,
    } | more


def test_both_forms_of_one_conversation_say_the_same():
    one, other = parse_openai(openai(max_completion_tokens=9, max_tokens=8)), parse_anthropic(anthropic())
    assert one == other
    assert [message.role for message in one.messages] == ["system", "user", "assistant", "tool"]
    assert one.messages[1].content == "Who is it?" and one.max_tokens == 9
    assert one.messages[2].calls == (ChatCall("c1", "search", ARGUMENTS),)
    assert one.tools == ({"type": "function", "function": TOOL},)


@pytest.mark.parametrize(
    ("part", "text"),
    [
        ({"type": "refusal", "refusal": "No."}, "No."),
        ({"type": "tool_reference", "tool_name": "grep"}, "grep"),
        (
            {"type": "search_result", "source": "u", "title": "t", "content": [{"type": "text", "text": "found"}]},
            "found",
        ),
        ({"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "read"}}, "read"),
        ({"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "read"}]}}, "read"),
        ({"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "QQ=="}}, None),
        ({"type": "document", "source": "read"}, None),
        ({"type": "image", "source": {"type": "text", "data": "x"}}, None),
        ({"type": "refusal"}, None),
        ({"type": ["text"], "text": "x"}, None),
    ],
)
def test_what_is_text_is_read_by_whatever_name_and_nothing_else_is(part, text):
    """Blocks of Anthropic's and parts of OpenAI's reference that hold text."""
    if text is not None:
        assert text_of([part, {"type": "text", "text": "!"}]) == f"{text}!"
        return
    with pytest.raises(BadRequest, match="only text is supported"):
        text_of([part])


def test_a_message_is_the_same_if_its_words_and_images_are():
    def key(picture: bytes, text: str = "look"):
        url = "data:image/png;base64," + b64encode(picture).decode()
        parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]
        return parse_openai({"messages": [{"role": "user", "content": parts}]}).messages[0].key

    assert key(b"one") == key(b"one", " look") != key(b"another")
    assert key(b"one") != key(b"one", "listen")
    assert key(b"one") != parse_openai({"messages": [{"role": "user", "content": "look"}]}).messages[0].key


def test_the_older_form_of_calls_in_a_history_is_read():
    older = {"name": "double", "arguments": '{"a": 3}'}
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, "function_call": older},
        {"role": "function", "name": "double", "content": "6"},
    ]
    _, said, told = parse_openai({"messages": messages}).messages
    assert [(call.name, call.arguments) for call in said.calls] == [("double", {"a": 3})]
    assert (told.role, told.content) == ("tool", "6")


def test_results_stand_in_the_order_of_the_calls_that_they_answer():
    calls = [ChatCall(name, "search", {}) for name in ("a", "b", "c")]
    for order in ("abc", "cab", "bca"):
        told = [{"role": "tool", "tool_call_id": name, "content": name} for name in order]
        said = [
            {"id": call.id, "type": "function", "function": {"name": "search", "arguments": "{}"}} for call in calls
        ]
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": said}, *told]
        assert [message.content for message in parse_openai({"messages": messages}).messages[2:]] == ["a", "b", "c"]
    strange = [{"role": "user", "content": "?"}, *({"role": "tool", "content": text} for text in "zx")]
    assert [message.content for message in parse_openai({"messages": strange}).messages[1:]] == ["z", "x"]


def test_text_beside_results_is_a_message_of_its_own_behind_them():
    blocks = [
        {"type": "text", "text": "And?"},
        {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "Nobody."}]},
    ]
    asked = parse_anthropic({"messages": [{"role": "user", "content": blocks}]})
    assert [(message.role, message.content) for message in asked.messages] == [("tool", "Nobody."), ("user", "And?")]


def test_sampling_that_is_asked_for_is_named_where_it_is_another_than_the_runs():
    own = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}
    asked = parse_openai(
        openai(temperature=0, top_p=1, best_of=3, stop=["x"], logit_bias={"5": 1}, seed=7, tool_choice="required")
    )
    assert sorted(asked.overridden(own)) == ["best_of", "logit_bias", "seed", "stop", "temperature", "tool_choice"]
    nothing = {
        "temperature": 1.0,
        "n": 1,
        "stop": None,
        "presence_penalty": 0,
        "tool_choice": "auto",
        "logprobs": False,
    }
    assert parse_openai(openai(**nothing)).overridden(own) == ()
    assert parse_anthropic(anthropic(top_k=5, stop_sequences=["x"], tool_choice={"type": "auto"})).overridden(own) == (
        "top_k",
        "stop_sequences",
    )


IGNORED = {
    "guided_json": {"type": "object"}, "structured_outputs": {"regex": "a"}, "min_tokens": 5, "stop_token_ids": [7],
    "chat_template_kwargs": {"enable_thinking": False}, "continue_final_message": True, "ignore_eos": True,
    "bad_words": ["no"], "allowed_token_ids": [1], "reasoning": {"effort": "low"}, "length_penalty": 0.5,
    "parallel_tool_calls": False, "verbosity": "low", "web_search_options": {"a": 1}, "truncate_prompt_tokens": 5,
    "output_format": {"type": "json_schema"}, "output_config": {"effort": "low"}, "context_management": {"edits": [1]},
    "mcp_servers": [{"name": "x"}], "thinking": {"type": "disabled"}, "temperature": 0, "seed": 0,
    "anything_of_tomorrow": 1,
}  # fmt: skip
NOTHING = {
    "guided_json": None, "best_of": 1, "min_tokens": 0, "ignore_eos": False, "continue_final_message": False,
    "length_penalty": 1.0, "skip_special_tokens": True, "logprobs": False, "top_logprobs": 0, "n": 1, "user": "me",
    "metadata": {"user_id": "a"}, "store": True, "service_tier": "auto", "stream": True, "bad_words": [],
    "prompt_cache_key": "k", "parallel_tool_calls": True, "response_format": {"type": "text"}, "top_k": -1,
}  # fmt: skip


@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", openai()), ("/v1/messages", anthropic())])
def test_every_setting_that_is_not_followed_is_named_and_none_that_asks_for_nothing(path, body):
    for name, value in IGNORED.items():
        assert APIS[path].parse(body | {name: value}).overridden({}) == (name,)
    for name, value in NOTHING.items():
        assert APIS[path].parse(body | {name: value}).overridden({}) == ()
    one = {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}
    assert APIS[path].parse(body | one).overridden({}) == ("disable_parallel_tool_use",)
    assert APIS[path].parse(body | {"ä" * 40: 1, "x" * 65: 2}).overridden({}) == ("other",)
    assert len(APIS[path].parse(body | {f"a{i}": 1 for i in range(9999)}).overridden({})) == 64


def test_log_probs_that_responses_include_are_refused():
    with pytest.raises(BadRequest, match="log-probs"):
        parse_responses({"input": "q", "include": ["message.output_text.logprobs"]})
    assert parse_responses({"input": "q", "include": ["reasoning.encrypted_content"]}).overridden({}) == ("include",)


@pytest.mark.parametrize("path", APIS)
@pytest.mark.parametrize("asked", [{"n": 2}, {"logprobs": True}, {"logprobs": True, "top_logprobs": 5}])
def test_what_would_be_answered_by_half_is_refused_by_name(path, asked):
    with pytest.raises(BadRequest, match=f"^`{next(iter(asked))}` is "):
        APIS[path].parse({"messages": [USER], **asked})


def test_tools_that_a_client_runs_by_their_type_have_schemas_and_those_of_servers_are_left_out_by_name():
    """Types and names as anthropic 2.14.0 has them (ToolUnionParam)."""
    own = {"name": "f", "input_schema": {"type": "object", "properties": {"a": {"type": "string"}}}}
    clients = {
        "bash_20250124": ("bash", {"command", "restart"}),
        "text_editor_20250124": ("str_replace_editor", EDITS),
        "text_editor_20250429": ("str_replace_based_edit_tool", EDITS),
        "text_editor_20250728": ("str_replace_based_edit_tool", EDITS | {"insert_text"}),
        "memory_20250818": ("memory", EDITS | {"insert_text", "old_path", "new_path"}),
    }
    servers = ["web_search_20250305", "web_fetch_20260318", "code_execution_20260521", "tool_search_tool_bm25_20251119",
        "browser_toolset_20260801", "computer_toolset_20260801", "computer_20250124", "mcp_toolset"]  # fmt: skip
    tools = [own, own | {"name": "g", "type": "custom"}]
    tools += [{"type": kind, "name": name} for kind, (name, _) in clients.items()]
    tools += [{"type": kind, "name": kind} for kind in servers]
    asked = parse_anthropic({"messages": [USER], "tools": tools})
    told = {tool["function"]["name"]: tool["function"] for tool in asked.tools}
    assert set(told) == {"f", "g", *(name for name, _ in clients.values())} and len(asked.tools) == 7
    assert [set(tool["function"]["parameters"]["properties"]) for tool in asked.tools[2:]] == [
        properties for _, properties in clients.values()
    ]
    commands = [tool["function"]["parameters"]["properties"]["command"].get("enum", []) for tool in asked.tools[2:]]
    assert ["undo_edit" in each for each in commands] == [False, True, False, False, False]
    assert asked.overridden({}) == tuple(servers)
    only = parse_anthropic({"messages": [USER], "tools": [{"type": "web_search_20250305", "name": "web_search"}]})
    assert only.tools == () and not only.wants_calls
    for tool in ({"type": "custom", "name": "h"}, {"name": "h"}):
        with pytest.raises(BadRequest, match="`input_schema` of tool 'h' is missing or null, expected an object"):
            parse_anthropic({"messages": [USER], "tools": [tool]})


EDITS = {"command", "path", "view_range", "file_text", "old_str", "new_str", "insert_line"}


@pytest.mark.parametrize("arguments", ["{", "12*34", "[1]", "7", '"text"', "[" * 100_000, {"a": 1}, None, "null", ""])
def test_arguments_that_are_no_object_stand_as_they_are_and_the_next_request_is_read(arguments):
    calls = [{"id": "c", "type": "function", "function": {"name": "search", "arguments": arguments}}]
    messages = [USER, {"role": "assistant", "tool_calls": calls}, {"role": "tool", "tool_call_id": "c", "content": "!"}]
    asked = parse_openai({"messages": messages})
    (call,) = asked.messages[1].calls
    if arguments in ({"a": 1}, None, "null", ""):
        assert call.arguments == (arguments if isinstance(arguments, dict) else {}) and asked.overridden({}) == ()
        return
    read = {"[1]": [1], "7": 7, '"text"': "text"}
    assert call.arguments == {"arguments": read.get(arguments, arguments)}
    assert asked.overridden({}) == ("arguments",)


def test_messages_say_the_same_whatever_a_client_writes_anew():
    said = ChatMessage("assistant", "Well. ", (ChatCall("c1", "search", {"a": 1, "b": [True]}),))
    again = ChatMessage("assistant", "Well.", (ChatCall("other", "search", {"b": [True], "a": 1}),))
    assert said.key == again.key
    for other in (
        ChatMessage("user", "Well.", said.calls),
        ChatMessage("assistant", "Well", said.calls),
        ChatMessage("assistant", "Well."),
        ChatMessage("assistant", "Well.", (ChatCall("c1", "search", {"a": 1, "b": [1]}),)),
    ):
        assert other.key != said.key


USER = {"role": "user", "content": "?"}
BAD = {
    "no object": [],
    "no message": {"messages": []},
    "messages that are none": {"messages": {"role": "user"}},
    "an unknown role": {"messages": [{"role": "judge", "content": "?"}]},
    "an image": {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
    "the model's own words begun": {
        "messages": [USER, {"role": "assistant", "content": "It is"}],
        "continue_final_message": True,
    },
    "arguments of a call without a function": {
        "messages": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{}"}]}, USER]
    },
    "a tool without a name": {"messages": [USER], "tools": [{"function": {}}]},
    "functions of before tools": {"messages": [USER], "functions": [TOOL]},
    "a limit of nothing": {"messages": [USER], "max_tokens": 0},
    "a limit that is none": {"messages": [USER], "max_tokens": "many"},
}


@pytest.mark.parametrize("body", BAD.values(), ids=BAD)
def test_what_cannot_be_answered_is_refused(body):
    with pytest.raises(BadRequest):
        parse_openai(body)


def test_no_body_of_json_raises_anything_else():
    rng = random.Random(0)
    words = ["messages", "role", "user", "content", "tools", "tool_calls", "function", "arguments", "system", "type"]

    def value(depth: int):
        kind = rng.randint(0, 6 if depth else 4)
        if kind == 5:
            return [value(depth - 1) for _ in range(rng.randint(0, 3))]
        if kind == 6:
            return {rng.choice(words): value(depth - 1) for _ in range(rng.randint(0, 4))}
        return [None, True, rng.random(), rng.choice(words), rng.randint(-2, 9)][kind]

    read = 0
    for _ in range(3000):
        body = value(4) if rng.random() < 0.1 else {"messages": [USER]} | {rng.choice(words): value(3)}
        for parse in (parse_openai, parse_anthropic):
            try:
                parse(body)
                read += 1
            except BadRequest:
                pass
    assert read > 300


def answer(**more) -> ChatAnswer:
    given = {"content": "Here.", "calls": (ChatCall("call_1_0", "search", ARGUMENTS),), "is_cut": False} | more
    is_cut = given.pop("is_cut")
    return ChatAnswer(1, ChatMessage("assistant", **given), is_cut, prompt_tokens=7, tokens=5)


@pytest.mark.parametrize("content", ["Here.", ""])
@pytest.mark.parametrize("calls", [(), (ChatCall("call_1_0", "search", ARGUMENTS), ChatCall("call_1_1", "go", {}))])
@pytest.mark.parametrize("path", APIS)
def test_an_answer_that_a_client_sends_back_is_the_message_that_was_said(path, content, calls):
    """Whole, and put together of a stream as clients do it: haystack's StreamingChunk holds text or calls, and
    llama-index's update_tool_calls reads one call of a chunk.
    """
    api = APIS[path]
    said = answer(content=content, calls=calls)
    asked = api.parse({"messages": [USER], "max_tokens": 5, "model": "m"})
    whole = json.loads(json.dumps(api.whole(said, asked)))
    events = json.loads(json.dumps(list(api.events(said, asked))))
    for message in (message_of(path, whole), streamed(path, events)):
        again = api.parse({"messages": [USER, message, USER]})
        assert again.messages[1].key == said.message.key


def message_of(path: str, whole: dict) -> dict:
    if path == "/v1/messages":
        return {"role": whole["role"], "content": whole["content"]}
    return whole["choices"][0]["message"]


def streamed(path: str, events: list) -> dict:
    if path != "/v1/messages":
        assert events[-1] == ["", "[DONE]"]
        deltas = [data["choices"][0]["delta"] for _, data in events[:-1]]
        message = {"role": "assistant", "content": "".join(delta.get("content", "") for delta in deltas)}
        calls = {}
        for delta in deltas:  # clients read one part of a chunk, and of its calls the first
            assert len(delta.keys() - {"role", "reasoning"}) <= 1
            for call in delta.get("tool_calls", [])[:1]:
                kept = calls.setdefault(call.pop("index"), call)
                if kept is not call:
                    assert list(call) == ["function"] and list(call["function"]) == ["arguments"]
                    kept["function"]["arguments"] += call["function"]["arguments"]
        assert list(calls) == list(range(len(calls)))
        return message | ({"tool_calls": list(calls.values())} if calls else {})
    blocks = []
    for name, data in events:
        assert name == data["type"]
        if name == "content_block_start":
            blocks.append(data["content_block"])
        if name == "content_block_delta" and data["delta"]["type"] == "text_delta":
            blocks[data["index"]]["text"] += data["delta"]["text"]
        if name == "content_block_delta" and data["delta"]["type"] == "input_json_delta":
            blocks[data["index"]]["input"] = json.loads(data["delta"]["partial_json"])
    assert [name for name, _ in events[-2:]] == ["message_delta", "message_stop"]
    return {"role": "assistant", "content": blocks}


@pytest.mark.parametrize(
    ("said", "finish", "stop"),
    [
        (answer(), "tool_calls", "tool_use"),
        (answer(calls=()), "stop", "end_turn"),
        (answer(is_cut=True), "length", "max_tokens"),
    ],
)
def test_why_an_answer_ended_is_said_in_each_forms_words(said, finish, stop):
    one, other = APIS.values()
    asked = one.parse({"messages": [USER]})
    whole = one.whole(said, asked)
    assert whole["choices"][0]["finish_reason"] == finish
    assert whole["usage"] == {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}
    whole = other.whole(said, asked)
    assert whole["stop_reason"] == stop and whole["usage"] == {"input_tokens": 7, "output_tokens": 5}


def test_what_is_no_object_is_named_by_its_place():
    user = {"role": "user", "content": "x"}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "null"}}
    asked = {"messages": [user, {"role": "assistant", "tool_calls": [call]}, user]}
    assert parse_openai(asked).messages[1].calls[0].arguments == {}  # a call without arguments
    for body, words in (
        ({"messages": [user], "tools": [{"type": "custom", "custom": {"name": "f"}}]}, "has the type 'custom'"),
        ({"messages": [user], "tools": [None]}, "a tool is missing or null, expected an object"),
        ({"messages": [None]}, "a message is missing or null, expected an object"),
        ({"messages": [user, {"role": "assistant", "tool_calls": [{"id": "c"}]}, user]}, "`function` of a call is"),
        ({"messages": [user], "tools": [{"function": {"name": "f", "parameters": "x"}}]}, "schema of tool 'f' is str"),
        ({"messages": [user], "stream_options": [1]}, "`stream_options` is list"),
        (7, "the body is int"),
    ):
        with pytest.raises(BadRequest, match=words):
            parse_openai(body)


USER = {"role": "user", "content": "u"}
CALL_OF_2 = {"type": "function_call", "name": "f", "call_id": "call_2_0", "arguments": "{}"}
NOTE = {"type": "message", "role": "assistant", "content": "note"}


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ([{"id": "msg_1"}, NOTE], [(SAID, "", "1"), ("assistant", "note", "")]),  # the client's own
        ([NOTE, {"id": "msg_1"}], [("assistant", "note", ""), (SAID, "", "1")]),
        ([NOTE, {"id": "rs_1"}], [("assistant", "note", ""), (SAID, "", "1")]),
        ([{"id": "rs_1"}, NOTE], [(SAID, "note", "1")]),  # its text, whole
        ([NOTE, {"id": "fc_call_1_0"}], [(SAID, "note", "1")]),
        ([{"id": "msg_1"}, {"id": "fc_call_1_0"}], [(SAID, "", "1")]),
        ([{"id": "msg_1"}, {"id": "msg_2"}], [(SAID, "", "1"), (SAID, "", "2")]),
    ],
)  # fmt: skip
def test_what_a_client_says_itself_is_no_part_of_an_answer_that_it_names(items, expected):
    messages = parse_responses({"input": [USER, *items]}).messages[1:]
    assert [(message.role, message.content, message.call_id) for message in messages] == expected
    (call,) = parse_responses({"input": [USER, {"id": "msg_1"}, CALL_OF_2]}).messages[2:]
    assert call.role == "assistant" and call.calls[0].id == "call_2_0"


def test_a_thread_chooses_among_the_tools_that_it_holds():
    going_on = anthropic(thread={"previous_message_id": "msg_1"}, tool_choice={"type": "tool", "name": "f"})
    asked = parse_anthropic({name: value for name, value in going_on.items() if name != "tools"})
    assert asked.is_thread and asked.chosen is None
    assert replace(asked, tools=({"type": "function", "function": {"name": "f"}},)).chosen == "f"
    assert replace(asked, tools=({"type": "function", "function": {"name": "g"}},)).chosen is None
