"""Both forms of chat requests as one, answers in both, and what cannot be read."""

import json
import random

import pytest

from mrl.acting.chat_api import APIS, BadRequest, ChatAnswer, ChatCall, ChatMessage, parse_anthropic, parse_openai

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
        openai(temperature=0, top_p=1, n=3, stop=["x"], logit_bias={"5": 1}, seed=7, tool_choice="required")
    )
    assert sorted(asked.overridden(own)) == ["logit_bias", "n", "seed", "stop", "temperature", "tool_choice"]
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
    "the model's own words begun": {"messages": [USER, {"role": "assistant", "content": "It is"}]},
    "arguments that are no JSON": {
        "messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}, USER]
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
    """Whole, and put together of a stream as clients do it."""
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
        calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
        assert [call.pop("index") for call in calls] == list(range(len(calls)))
        return message | ({"tool_calls": calls} if calls else {})
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
