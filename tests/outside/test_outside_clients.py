"""OpenAI's and Anthropic's own clients: what they send is read, and what is answered is of their own types."""

import json

import jsonschema
import pytest
from golden import golden

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

PARSE = {"openai": parse_openai, "anthropic": parse_anthropic}
PATHS = {"openai": "/v1/chat/completions", "anthropic": "/v1/messages"}
SENT = [case for case in golden("clients") if case["api"] in PARSE]
WITH_SYSTEM = {"openai": ("plain", "developer"), "anthropic": ("plain", "blocks")}
SCHEMAS = {case["name"]: case["schema"] for case in golden("clients") if case["api"] == "schema"}
DOUBLE = ChatCall("c1", "double", {"a": 3})
ANSWERS = {
    "text": ChatAnswer(0, ChatMessage("assistant", "Six."), False, 5, 2),
    "call": ChatAnswer(1, ChatMessage("assistant", "", (DOUBLE,)), False, 5, 9),
    "both, cut": ChatAnswer(2, ChatMessage("assistant", "So:", (DOUBLE,)), True, 5, 9),
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
        assert read.messages[1].calls == (DOUBLE,) and read.messages[2].call_id == "c1"
    assert [(message.role, message.content) for message in read.messages] == turns
    has_tools = case["name"] in ("tools", "no tool", "answered")
    assert [tool["function"]["name"] for tool in read.tools] == ["double"] * has_tools
    assert read.wants_calls == (has_tools and case["name"] != "no tool")
    assert (read.stream, read.model) == (case["name"] == "stream", "m")


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_is_of_the_clients_own_types(name):
    request = ChatRequest((), model="m", wants_usage=True)
    answer = ANSWERS[name]
    whole = {"openai": openai_whole(answer, request), "anthropic": anthropic_whole(answer, request)}
    events = {"openai": openai_events(answer, request), "anthropic": anthropic_events(answer, request)}
    for api, body in whole.items():
        jsonschema.validate(json.loads(json.dumps(body)), SCHEMAS[f"{api} whole"])
    for api, each in events.items():
        for _, data in each:
            if data != "[DONE]":
                jsonschema.validate(json.loads(json.dumps(data)), SCHEMAS[f"{api} stream"])
