"""Agents of a user's file that show images to the model, by the packages of OpenAI and Anthropic."""

import base64
import io
import json
import os
from pathlib import Path

from PIL import Image


def png(colour: str, side: int) -> str:
    """A picture of one colour in base64."""
    out = io.BytesIO()
    Image.new("RGB", (side, side + 32), colour).save(out, "PNG")
    return base64.b64encode(out.getvalue()).decode()


def part(colour: str, side: int = 64) -> dict:
    """The same as a part of a message in OpenAI's form."""
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{png(colour, side)}", "detail": "high"}}


def shows(url, key, row, seconds):
    """Asks with a picture, goes on with a tool's and another one, and begins that turn anew with a third."""
    from openai import OpenAI

    client = OpenAI()

    def said(messages: list) -> dict:
        answer = client.chat.completions.create(model="m", messages=messages, tools=[TOOL])
        return answer.choices[0].message.model_dump(exclude_none=True)

    messages: list = [{"role": "user", "content": [part("red"), {"type": "text", "text": "the answer?"}]}]
    messages.append(said(messages))
    call = messages[-1]["tool_calls"][0]["id"]
    for colour in ("blue", "green"):
        told = {"role": "tool", "tool_call_id": call, "content": [{"type": "text", "text": "is"}, part(colour, 96)]}
        branch = [*messages, told]
        branch.append(said(branch))
        branch.append({"role": "user", "content": [{"type": "text", "text": "and "}, part("red")]})
        said(branch)


TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


def other_forms(url, key, row, seconds):
    """Anthropic's blocks, and items in the form of Responses; the row's own picture from its file."""
    from anthropic import Anthropic
    from openai import OpenAI

    own = base64.b64encode(Path(row["images"][0]).read_bytes()).decode()
    source = {"type": "base64", "media_type": "image/png", "data": own}
    tools = [{"name": "look", "input_schema": {"type": "object", "properties": {}}}]
    client = Anthropic()
    messages: list = [
        {"role": "user", "content": [{"type": "image", "source": source}, {"type": "text", "text": "the?"}]}
    ]
    tokens = client.messages.count_tokens(model="m", messages=messages, tools=tools).input_tokens
    first = client.messages.create(model="m", max_tokens=100, messages=messages, tools=tools)
    assert first.usage.input_tokens == tokens
    shown = {"type": "image", "source": {**source, "data": png("blue", 96)}}
    result = {"type": "tool_result", "tool_use_id": first.content[0].id, "content": [shown]}
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    client.messages.create(model="m", max_tokens=100, messages=messages, tools=tools)
    items: list = [
        {"type": "input_text", "text": "or"},
        {"type": "input_image", "image_url": part("green")["image_url"]["url"]},
    ]
    responses = OpenAI().responses
    one = responses.create(model="m", input=[{"role": "user", "content": items}])
    items = [{"type": "input_image", "image_url": part("red")["image_url"]["url"]}]
    responses.create(model="m", input=[{"role": "user", "content": items}], previous_response_id=one.id)


def asks_once(url, key, row, seconds):
    """Shows a picture, or has its tokens counted, and tries no more once that is refused."""
    from anthropic import Anthropic

    source = {"type": "base64", "media_type": "image/png", "data": png("red", 64)}
    messages: list = [{"role": "user", "content": [{"type": "image", "source": source}]}]
    client = Anthropic(max_retries=0).messages
    if row["extra_info"]["counts"]:
        client.count_tokens(model="m", messages=messages)
    else:
        client.create(model="m", max_tokens=100, messages=messages)


def wrong(url, key, row, seconds):
    """Notes what is said of images that are not read, and goes on."""
    from openai import BadRequestError, OpenAI

    client = OpenAI(max_retries=0)
    frames = io.BytesIO()
    Image.new("RGB", (32, 32)).save(frames, "GIF", save_all=True, append_images=[Image.new("RGB", (32, 32), "red")])
    urls = [
        "https://a.b/c.png", "file:///etc/hostname", "data:image/png;base64,??", "data:image/png,abc",
        "data:image/png;base64,\u00e9",
        "data:image/gif;base64," + base64.b64encode(frames.getvalue()).decode(),
        "data:image/png;base64," + base64.b64encode(b"no picture").decode(),
        part("red", 2000)["image_url"]["url"],
    ]  # fmt: skip
    told = []
    contents = [[part("red"), {"type": "image_url", "image_url": {"url": one}}] for one in urls]
    for content in (*contents, [part("red", 256)] * 10):
        try:
            client.chat.completions.create(model="m", messages=[{"role": "user", "content": content}])
        except BadRequestError as error:
            told.append(error.body["message"])
    system = {"role": "system", "content": [part("red")]}
    for body in ([system, {"role": "user", "content": "a"}], [{"role": "user", "content": [{"type": "video_url"}]}]):
        try:
            client.chat.completions.create(model="m", messages=body)
        except BadRequestError as error:
            told.append(error.body["message"])
    try:
        client.completions.create(model="m", prompt=row["extra_info"]["ids"])
    except BadRequestError as error:
        told.append(error.body["message"])
    Path(row["extra_info"]["told"]).write_text(json.dumps(told))
    client.chat.completions.create(model="m", messages=[{"role": "user", "content": "the answer?"}])
    assert os.environ["OPENAI_API_KEY"] == key
