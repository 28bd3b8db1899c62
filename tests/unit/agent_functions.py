"""Agents of a user's file, which speak to the endpoint by the standard library alone."""

import json
import os
import random
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor


def post(path: str, body: dict, key: str | None = None, **headers: str) -> dict:
    """The answer to a request, or {"status": ..., "said": ...} of a refusal."""
    url = os.environ["ANTHROPIC_BASE_URL"]
    named = {"Content-Type": "application/json", "x-api-key": key or os.environ["OPENAI_API_KEY"], **headers}
    request = urllib.request.Request(url + path, json.dumps(body).encode(), named)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return {"status": error.code, "said": json.loads(error.read() or b"{}")}


def chat(messages: list, **more) -> dict:
    """What the model says, as a message to send back."""
    answer = post("/v1/chat/completions", {"model": "m", "messages": messages, **more})
    if "choices" not in answer:
        return answer
    return answer["choices"][0]["message"]


def counts(url, key, row, seconds):
    """Asks three times, each behind the answers before; tells of what it was told."""
    assert os.environ["OPENAI_BASE_URL"] == f"{url}/v1" and os.environ["OPENAI_API_KEY"] == key and seconds > 0
    messages = [dict(message) for message in row["prompt"]]
    for word in ("one", "two", "three"):
        messages.append(chat(messages))
        messages.append({"role": "user", "content": word})


async def counts_async(url, key, row, seconds):
    """As `counts`, in a coroutine."""
    counts(url, key, row, seconds)


def steps(url, key, row, seconds, reward_key):
    """Does what the row says: a list of [kind, ...]; `messages` are its own. What it saw goes into the row's file."""
    messages = [dict(message) for message in row["prompt"]]
    saw = []
    kept = []
    for kind, *given in row["extra_info"]["steps"]:
        if kind == "ask":
            saw.append(chat(messages, **(given[0] if given else {})))
            messages.append(saw[-1])
        elif kind == "again":
            saw.append(chat(messages[:-1]))
            messages[-1] = saw[-1]
        elif kind == "at_once":
            with ThreadPoolExecutor(len(given[0])) as pool:
                asked = [[*messages, *([{"role": "user", "content": text}] if text else [])] for text in given[0]]
                answers = list(pool.map(chat, asked))
            saw += answers
            messages = [*asked[0], answers[0]]
        elif kind == "say":
            text, times = (*given, 1)[:2]
            messages.append({"role": "user", "content": text * times})
        elif kind == "tell":
            call = messages[-1]["tool_calls"][0]["id"]
            messages.append({"role": "tool", "tool_call_id": call, "content": given[0]})
        elif kind == "cut":
            del messages[given[0] :]
        elif kind == "keep":
            kept = list(messages)
        elif kind == "back":
            messages = list(kept)
        elif kind == "forge":
            messages[-1] = {"role": "assistant", "content": given[0]}
        elif kind == "reward":
            own = {"reward": given[0], "parts": {"steps": len(saw)}}
            saw.append(post("/v1/reward", own | dict(given[1:]), reward_key))
        elif kind == "post":
            saw.append(post(*given))
        elif kind == "note":
            note(row, saw)
        elif kind == "sleep":
            time.sleep(given[0])
        elif kind == "exit":
            note(row, saw)
            sys.exit(given[0])
        elif kind == "raise":
            raise RuntimeError(f"{given[0]} {key}")
    note(row, saw)


def wanders(url, key, row, seconds):
    """Goes on, asks again, cuts its history, forges what the model said; notes the line that it spoke last, and all
    answers but those that it asked again.
    """
    rng = random.Random(row["extra_info"]["seed"])
    messages = [dict(message) for message in row["prompt"]]
    messages.append(chat(messages))
    heard = [messages[-1]["content"]]
    for number in range(8):
        move = rng.choice(["on", "on", "again", "cut", "forge"])
        if move == "again":
            asked_again = messages.pop()["content"]
            if asked_again in heard:
                heard.remove(asked_again)
        else:
            if move == "cut":
                del messages[rng.randrange(2, len(messages) + 1, 2) :]
            if move == "forge":
                messages[-1] = {"role": "assistant", "content": f"Forged {number}."}
            messages.append({"role": "user", "content": f"{number} {rng.choice(['more', 'less'])}?"})
        messages.append(chat(messages))
        heard.append(messages[-1]["content"])
    note(row, [messages, heard])


def note(row, saw):
    """Writes down what was seen."""
    if "saw" in row["extra_info"]:
        with open(row["extra_info"]["saw"], "w") as file:
            json.dump(saw, file)


def anthropic(url, key, row, seconds):
    """One question and a result of a tool, in Anthropic's form."""
    tools = [{"name": "calculator", "description": "Computes.", "input_schema": TOOL["function"]["parameters"]}]
    asked = {"model": "m", "max_tokens": 500, "messages": [row["prompt"][0]], "tools": tools}
    said = post("/v1/messages", asked)
    call = next(block for block in said["content"] if block["type"] == "tool_use")
    told = [{"type": "tool_result", "tool_use_id": call["id"], "content": "408"}]
    both = [{"role": "assistant", "content": said["content"]}, {"role": "user", "content": told}]
    post("/v1/messages", asked | {"messages": [*asked["messages"], *both], "temperature": 0.2})


def responses(url, key, row, seconds):
    """A call and its answer in the form of Responses, by the id of the response or by all items; then a word more."""
    by_id = row["extra_info"]["by_id"]
    path = "/v1/responses"
    tool = {"type": "function", **TOOL["function"]}
    asked = {"model": "m", "instructions": "Be brief.", "tools": [tool]}
    items = [dict(message) for message in row["prompt"]]
    before = None
    saw = []
    for new in ([], None, [{"role": "user", "content": "Sure?"}]):
        if new is None:
            call = next(item for item in saw[-1]["output"] if item["type"] == "function_call")
            new = [{"type": "function_call_output", "call_id": call["call_id"], "output": "408"}]
        items += new
        if by_id and before:
            saw.append(post(path, asked | {"input": new, "previous_response_id": before}))
        else:
            saw.append(post(path, asked | {"input": items}))
        before = saw[-1]["id"]
        items += saw[-1]["output"]
    saw.append(post(path, {"input": "?", "previous_response_id": "resp_99"}))
    note(row, saw)


def completes(url, key, row, seconds):
    """Two turns by token ids alone, and what is cut goes on."""
    path = "/v1/completions"
    told = {"return_token_ids": True}
    first = post(path, told | {"prompt": row["extra_info"]["ids"], "max_tokens": 2})["choices"][0]
    whole = first["prompt_token_ids"] + first["token_ids"]
    rest = post(path, told | {"prompt": whole})["choices"][0]
    more = whole + rest["token_ids"] + row["extra_info"]["more"]
    last = post(path, told | {"prompt": [more]})["choices"][0]
    again = post(path, {"prompt": more + last["token_ids"]})
    unknown = post(path, {"prompt": [10**6]})
    note(row, [first, rest, last, again, unknown])


def openai_package(url, key, row, seconds):
    """The same, with a stranger's client that finds all by its own variables; a stream too."""
    from openai import OpenAI

    client = OpenAI()
    messages = [dict(message) for message in row["prompt"]]
    first = client.chat.completions.create(model="m", messages=messages, tools=[TOOL])
    message = first.choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    messages.append({"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "408"})
    stream = client.chat.completions.create(model="m", messages=messages, tools=[TOOL], stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert text == "It is 408.", text


def anthropic_package(url, key, row, seconds):
    """One question by Anthropic's own client."""
    from anthropic import Anthropic

    said = Anthropic().messages.create(model="m", max_tokens=500, messages=[dict(row["prompt"][0])])
    assert said.content[0].type == "text"


TOOL = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Computes.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}
