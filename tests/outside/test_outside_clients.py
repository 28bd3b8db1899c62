"""OpenAI's and Anthropic's own clients: what they send is read, and what is answered is of their own types."""

import json

import pytest
from golden import golden
from jsonschema import Draft202012Validator

from mrl.acting.chat_api import (
    ChatAnswer,
    ChatCall,
    ChatMessage,
    ChatRequest,
    anthropic_events,
    anthropic_whole,
    openai_events,
    openai_whole,
    parse_anthropic,
    parse_openai,
)
from mrl.acting.responses_api import (
    RESPONSES,
    completion_whole,
    parse_completion,
    parse_responses,
    responses_events,
    responses_whole,
)
from mrl.engine.endpoint import COUNT_PATH, described

PARSE = {
    "openai": parse_openai, "anthropic": parse_anthropic, "responses": parse_responses, "count": parse_anthropic,
}  # fmt: skip
PATHS = {"openai": "/v1/chat/completions", "anthropic": "/v1/messages", "responses": RESPONSES, "count": COUNT_PATH}
SENT = [case for case in golden("clients") if case["api"] in PARSE]
WITH_SYSTEM = {
    "openai": ("plain", "developer"), "anthropic": ("plain", "blocks"), "responses": ("plain", "developer"),
    "count": ("tools",),
}  # fmt: skip
SCHEMAS = {case["name"]: case["schema"] for case in golden("clients") if case["api"] == "schema"}
DOUBLE = ChatCall("c1", "double", {"a": 3})
ANSWERS = {
    "text": ChatAnswer(0, ChatMessage("assistant", "Six."), False, 5, 2),
    "call": ChatAnswer(1, ChatMessage("assistant", "", (DOUBLE,)), False, 5, 9),
    "both, cut": ChatAnswer(2, ChatMessage("assistant", "So:", (DOUBLE,)), True, 5, 9),
    "thought": ChatAnswer(4, ChatMessage("assistant", "Six.", thought="Hm."), False, 5, 9),
    "text's call": ChatAnswer(5, ChatMessage("assistant", "", (ChatCall("c1", "say", {"input": "a"}),)), False, 5, 9),
    "nothing": ChatAnswer(3, ChatMessage("assistant", ""), False, 5, 1),
}


@pytest.mark.parametrize("case", SENT, ids=lambda case: f"{case['api']} {case['name']}")
def test_what_a_client_sends_is_read(case):
    read = PARSE[case["api"]](case["body"])
    assert case["path"] == PATHS[case["api"]]
    turns = [("user", "Double 3.")]
    if case["name"] in WITH_SYSTEM[case["api"]]:
        turns.insert(0, ("system", "Be brief."))
    if case["name"] == "answered":
        turns += [("assistant", "So:" if case["api"] == "anthropic" else ""), ("tool", "6")]
    if case["name"] == "system between":
        turns.append(("system", "Be brief."))
    if case["name"] in ("answered",):
        assert read.messages[1].calls == (DOUBLE,) and read.messages[2].call_id == "c1"
    assert [(message.role, message.content) for message in read.messages] == turns
    has_tools = case["name"] in ("tools", "no tool", "answered")
    assert [tool["function"]["name"] for tool in read.tools] == ["double"] * has_tools
    assert read.wants_calls == (has_tools and case["name"] != "no tool")
    assert (read.stream, read.model) == (case["name"] == "stream", "m")


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_is_of_the_clients_own_types(name):
    request = ChatRequest((), model="m", wants_usage=True, forms={"say": ("", "custom_tool_call")})
    answer = ANSWERS[name]
    whole = {
        "openai": openai_whole(answer, request),
        "anthropic": anthropic_whole(answer, request),
        "responses": responses_whole(answer, request),
        "completions": completion_whole(answer, request),
    }
    events = {
        "openai": openai_events(answer, request),
        "anthropic": anthropic_events(answer, request),
        "responses": responses_events(answer, request),
    }
    for api, body in whole.items():
        check(f"{api} whole", body)
    for api, each in events.items():
        for kind, data in each:
            if data != "[DONE]":
                check(f"{api} stream", data, kind)


def check(name: str, data: object, kind: str = "") -> None:
    """By the schema of that name; of events of several types by that of the own type alone."""
    schema = SCHEMAS[name]
    named = schema.get("discriminator", {}).get("mapping", {})
    if named:
        schema = {"$defs": schema["$defs"], "$ref": named[kind]}
    # without a check of the schema itself, which takes seconds
    Draft202012Validator(schema).validate(json.loads(json.dumps(data)))


def test_a_stream_of_a_response_ends_with_the_response_and_has_each_item_whole():
    """As the client's own accumulation has it: an item is added, its texts are added up, and it is done."""
    request = ChatRequest((), model="m", forms={"say": ("", "custom_tool_call")})
    for answer in ANSWERS.values():
        events = [data for _, data in responses_events(answer, request)]
        assert [data["sequence_number"] for data in events] == list(range(len(events)))
        whole = events[-1]["response"]
        assert whole == responses_whole(answer, request)
        assert [data["item"] for data in events if data["type"] == "response.output_item.done"] == whole["output"]
        texts = "".join(data["delta"] for data in events if data["type"].endswith("text.delta"))
        assert texts == answer.message.thought + answer.message.content


def test_prompts_of_completions_are_read_and_models_are_of_both_clients_types():
    ids, text = (parse_completion(case["body"]) for case in golden("clients") if case["api"] == "completions")
    assert (ids.ids, ids.raw, ids.max_tokens, ids.stream) == ((1, 2, 3), None, 4, False)
    assert (text.ids, text.raw, text.stream) == (None, "1 2", True)
    for name in ("openai model", "anthropic model"):
        check(name, described("policy"))
