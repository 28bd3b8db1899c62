"""Images in answers of tools and environments: what the model reads of them, and what engines are asked with.

Tokens are those of the model's own chat template, each image's as many as transformers' processor makes of it.
"""

import asyncio
import json
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import seeing_agents
import seeing_tools
from dialect_templates import CODER, GLM, HERMES, QWEN35, SHOWN, seeing, tokenizer
from PIL import Image
from transformers import AutoImageProcessor

from mrl.acting.dialects import dialect_of
from mrl.acting.environment_pool import EnvironmentPool
from mrl.acting.tool import ToolsSpec, TurnsSpec
from mrl.data import image_reader
from mrl.data.image_reader import ImageReader, path_in
from mrl.data.row_files import BadRow
from mrl.data.samples import CALL_REASONS, STOP_REASONS, Sample, Samples, packed, row_images
from mrl.engine.conversations import Conversations
from mrl.engine.requests import Request, Sampling
from mrl.errors import EnvironmentFault
from mrl.record.metrics import turn_metrics
from mrl.schedule.conversation import Stop

FILE = str(Path(seeing_tools.__file__))
MOST = 1_000_000
SIDE = 64  # pixels of the prompt's picture
TOKENS = tokenizer("hermes", seeing(HERMES))
PAD = TOKENS.convert_tokens_to_ids("<|image_pad|>")
END = TOKENS.convert_tokens_to_ids("<|im_end|>")
CONFIG = {
    "image_token_id": PAD,
    "vision_config": {"patch_size": 16, "temporal_patch_size": 2, "spatial_merge_size": 2},
}
SETTINGS = {
    "image_processor_type": "Qwen2VLImageProcessorFast", "patch_size": 16, "temporal_patch_size": 2, "merge_size": 2,
    "size": {"shortest_edge": 1024, "longest_edge": 65536}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    (folder / "preprocessor_config.json").write_text(json.dumps(SETTINGS))
    return folder


@pytest.fixture(scope="module")
def processor(model):
    return AutoImageProcessor.from_pretrained(model, backend="pil")


@pytest.fixture(scope="module")
def reader(model) -> ImageReader:
    return ImageReader(CONFIG, str(model), model / "store", MOST)


def encoded(image: Image.Image) -> bytes:
    out = BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def called(name: str, **arguments) -> dict:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


class Engine:
    """Says one thing a turn, and keeps what it was asked."""

    def __init__(self, *said: str):
        self.said, self.asked = said, []

    async def generate(self, requests, sampling):
        (request,) = requests
        self.asked.append(request)
        await asyncio.sleep(0)
        ids = TOKENS.encode(self.said[len(self.asked) - 1] + "<|im_end|>", add_special_tokens=False)
        ids = ids[: request.max_tokens]
        given = (request.prompt_id, request.group_id, request.sample_id, request.seed, request.prompt_ids)
        yield packed([Sample(*given, ids, [-1.0] * len(ids), "stop", 4, images=request.images)])


def spec(tools=("zoom", "broken"), environments=(), **more) -> TurnsSpec:
    given = {
        "max_turns": 4, "max_calls": 2, "max_seconds": 60.0, "max_answer_characters": 400, "timeout_s": 20.0,
        "num_workers": 1, **more,
    }  # fmt: skip
    return TurnsSpec(ToolsSpec(tools, FILE, environments=environments, sees=True), **given)


@pytest.fixture(scope="module")
def talks(reader):
    made = Conversations(spec(), TOKENS, eyes=reader)
    yield made
    made.close()


@pytest.fixture(scope="module")
def request_of(reader):
    """A prompt with a picture, and its question."""
    (known,) = reader.take([encoded(seeing_tools.board(SIDE, "blue"))])
    user = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "the answer?"}]}
    ids = TOKENS.encode(
        TOKENS.apply_chat_template([user], tokenize=False, add_generation_prompt=True), add_special_tokens=False
    )
    tokens, images = reader.expanded(ids, [known])
    return user, Request(7, tuple(tokens), 11, images=images)


def whole(talks: Conversations, engine: Engine, request: Request, most: int = 2000) -> Samples:
    async def run() -> list[Samples]:
        return [batch async for batch in talks.generate(engine, [request], Sampling(1.0, most, (END,)))]

    (made,) = asyncio.run(run())
    return made


def turn(*calls: dict) -> tuple[dict, str]:
    """An assistant's message with calls, and its text as the template writes it."""
    message = {"role": "assistant", "content": "", "tool_calls": list(calls)}
    user = {"role": "user", "content": "q"}
    text = TOKENS.apply_chat_template([user, {**message, "reasoning_content": "so"}, user], tokenize=False)
    return {**message, "reasoning_content": "so"}, text.split("assistant\n")[1].split("<|im_end|>")[0]


def expanded(text: str, images: list[Image.Image], processor) -> list[int]:
    """The tokens of a text, with as many of each image as transformers' processor has patches for."""
    pieces = text.split("<|image_pad|>")
    found = pieces[0]
    for piece, image in zip(pieces[1:], images, strict=True):
        found += "<|image_pad|>" * (int(processor(image)["image_grid_thw"].prod()) // 4) + piece
    return TOKENS.encode(found, add_special_tokens=False)


def test_answers_with_images_are_those_of_the_template_and_the_processor(talks, request_of, reader, processor):
    user, request = request_of
    said, text = turn(called("zoom", side=96, count=2), called("zoom", side=64))
    engine = Engine(text, "the answer")
    made = whole(talks, engine, request)
    pictures = [seeing_tools.board(side) for side in (96, 160, 64)]
    word = "here <|image_pad|> it is"
    tools = [
        {"role": "tool", "content": [{"type": "image"}, {"type": "image"}, {"type": "text", "text": word}]},
        {"role": "tool", "content": [{"type": "image"}, {"type": "text", "text": word}]},
    ]
    written = TOKENS.apply_chat_template([user, said, *tools], tokenize=False, add_generation_prompt=True)
    asked = list(engine.asked[1].prompt_ids)
    images = [seeing_tools.board(SIDE, "blue"), *pictures]
    # the tool's own words are plain characters, whatever they spell
    apart = written.replace(word, "here [] it is")
    assert TOKENS.decode(asked).replace(word, "here [] it is") == TOKENS.decode(expanded(apart, images, processor))
    kept = row_images(made, 0)
    assert engine.asked[1].images == kept and kept[0] == request.images[0] and len(kept) == 4
    for image, picture in zip(kept, images, strict=True):
        seen = processor(picture)
        assert asked[image.start : image.start + image.tokens] == [PAD] * image.tokens
        assert asked[image.start - 1] != PAD != asked[image.start + image.tokens]
        assert list(image.grid) == seen["image_grid_thw"][0].tolist()
        assert np.array_equal(reader.pixels(image.name), seen["pixel_values"])
    response = made.token_ids[int(made.prompt_lengths[0]) :]
    assert not made.sampled[response == PAD].any() and made.sampled.sum() == len(TOKENS.encode(text)) + 1 + len(
        TOKENS.encode("the answer<|im_end|>")
    )


def test_an_image_that_cannot_be_read_is_a_failed_answer_and_the_conversation_goes_on(talks, request_of, reader):
    words = {
        "cut": ("unreadable_image", "image 2 is no readable image of 40 bytes"),
        "large": ("unreadable_image", r"image 2 is too large: 2000 x 2032 pixels, and data.max_image_pixels = 1000000"),
        "thin": ("unreadable_image", "image 2 is 900 x 2 pixels"),
        "number": ("wrong_type", "image 2 is int: images of PIL and encoded bytes are taken"),
        "colours": ("wrong_type", "image 2 cannot be written as PNG: cannot write mode CMYK"),
    }
    for what, (reason, why) in words.items():
        engine = Engine(turn(called("broken", what=what))[1], "the answer")
        made = whole(talks, engine, request_of[1])
        assert f"Error: broken: {why}" in TOKENS.decode(made.token_ids), what
        assert [CALL_REASONS[each] for each in made.call_reasons] == [reason]
        assert turn_metrics(made)["tools/broken/failed"] == 1.0
        assert row_images(made, 0) == request_of[1].images == engine.asked[1].images
        assert made.turn_counts.tolist() == [2]


def test_an_answer_whose_images_leave_no_room_ends_the_response(talks, request_of):
    """A picture of 96 x 128 is 12 tokens more."""
    _, text = turn(called("zoom", side=96))
    made = whole(talks, Engine(text, "the answer"), request_of[1])
    answered = int(made.turn_starts[1])
    short = whole(talks, Engine(text, "the answer"), request_of[1], most=answered)
    assert STOP_REASONS[short.stop_reason[0]] == Stop.CONTEXT and row_images(short, 0) == request_of[1].images
    longer = whole(talks, Engine(text, "the answer"), request_of[1], most=answered + 1)
    assert len(row_images(longer, 0)) == 2 and longer.response_lengths[0] == answered + 1


def test_an_environment_has_the_rows_pictures_and_is_restored_with_its_own(request_of, reader, processor):
    """A response that goes on at another engine repeats the actions, whose replies have the same pictures."""
    _, text = turn(called("turn"))
    request = replace(request_of[1], row={"data_source": "", "ground_truth": "", "extra_info": {}}, max_tokens=None)
    both = []
    for _ in range(2):
        talks = Conversations(spec((), ("Walk",)), TOKENS, eyes=reader)
        both.append(talks)
    try:
        engine = Engine(text, text, "the answer")
        made = whole(both[0], engine, request)
        border = int(made.turn_starts[1])

        async def gone_on() -> Samples:
            sampling = Sampling(1.0, 2000, (END,))
            first = replace(request, max_tokens=border)
            (held,) = [each async for each in both[0].generate(Engine(text), [first], sampling)]
            other = Engine(text, "the answer")
            rest = replace(request, max_tokens=1000)
            (row,) = [each async for each in both[1].generate(other, [rest], sampling, {7: held})]
            assert other.asked[0].images == row_images(held, 0) and len(other.asked[1].images) == 3
            return row

        again = asyncio.run(gone_on())
    finally:
        for talks in both:
            talks.close()
    assert np.array_equal(made.token_ids, again.token_ids) and row_images(made, 0) == row_images(again, 0)
    assert made.turn_rewards.tolist() == again.turn_rewards.tolist() == [1.0, 1.5, 0.0]
    assert np.array_equal(made.call_replies, again.call_replies)
    blue = seeing_tools.board(SIDE, "blue")
    shown = [image.grid for image in row_images(made, 0)[1:]]
    assert shown == [tuple(processor(blue.resize((side, 64)))["image_grid_thw"][0].tolist()) for side in (64, 96)]


@pytest.mark.parametrize(
    ("template", "image"),
    [
        (HERMES, None),  # it writes parts as Python does
        (seeing(HERMES), SHOWN),
        (seeing(CODER), SHOWN),
        (seeing(QWEN35), SHOWN),
        (seeing(HERMES).replace("{% if part.type", "{% set n = 1 %}Picture {{ loop.index }}: {% if part.type"), None),
        (seeing(HERMES).replace(SHOWN, ""), None),
    ],
)
def test_the_form_of_an_image_in_an_answer_is_the_templates(template, image):
    assert dialect_of(tokenizer("hermes", template), {}).image == image
    assert dialect_of(tokenizer("glm", GLM), {}).image is None


@pytest.mark.parametrize("template", [seeing(HERMES), seeing(CODER), seeing(QWEN35)])
def test_the_text_behind_an_image_stands_as_the_template_writes_it(template):
    tokens = tokenizer("hermes", template)
    call = {"type": "function", "function": {"name": "zoom", "arguments": {"side": 64}}}
    asked = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    parts = [{"type": "image"}, {"type": "text", "text": " a part \n"}]
    told = {"role": "tool", "content": parts}
    whole = tokens.apply_chat_template([*asked, told], tokenize=False, add_generation_prompt=True)
    ids = dialect_of(tokens, {}).context([], [" a part \n"], [1])
    assert whole.endswith(tokens.decode(ids))


def test_a_template_without_a_form_for_images_says_so_to_the_model(reader, request_of):
    talks = Conversations(spec(), tokenizer("hermes", HERMES), eyes=reader)
    try:
        made = whole(talks, Engine(turn(called("zoom", side=64))[1], "the answer"), request_of[1])
    finally:
        talks.close()
    assert "Error: zoom: the model's chat template has no form for an image" in TOKENS.decode(made.token_ids)


@pytest.mark.parametrize("shown", ["picture", "damaged"])
def test_images_of_a_judges_reply_are_left_out_since_nobody_reads_them(shown):
    seen: list[bytes] = []

    def see(images):
        seen.extend(images)
        raise BadRow("image 1 is no readable image of 10 bytes")

    given = ToolsSpec((), FILE, environments=("Judging",), sees=True)
    with EnvironmentPool(given, 1, 30.0, see=see) as pool:
        session = pool.session("Judging", {"extra_info": {"shown": shown}}, 0)
        judged = session.judge().result(60)
        step, again = (session.step("show", {}).result(60) for _ in range(2))
    assert judged[:6] == ("ok", "well", 0.5, {}, False, []) and not judged.failed
    # of a step the model reads the fault, by the action's name
    assert (step.reason, step.text) == ("unreadable_image", "Error: show: image 1 is no readable image of 10 bytes")
    assert step.reward == 0.25 and len(seen) == 2
    assert not step.failed and again[:6] == step[:6], "the environment goes on"


def test_an_image_of_a_tool_is_stored_once_under_the_name_that_data_would_have(reader, model):
    data = encoded(seeing_tools.board(96))
    one, other = reader.take([data, data])
    file = path_in(model / "store", one.name)
    assert one == other and file.read_bytes() == data
    assert reader.read_images([data], model) == [one]


# ---------------------------------------------------------------- agents


def by_agent(name: str, reader, engine, request: Request, **extra_info) -> Samples:
    tools = ToolsSpec((), str(Path(seeing_agents.__file__)), network=True, agent=name)
    given = replace(spec(max_turns=9, max_prompt_length=500), tools=tools)
    talks = Conversations(given, TOKENS, eyes=reader)
    row = {"data_source": "", "ground_truth": "", "extra_info": extra_info, "prompt": []}
    try:
        return whole(talks, engine, replace(request, row=row))
    finally:
        talks.close()


def asks(*content) -> dict:
    return {"role": "user", "content": [_as_part(each) for each in content]}


def _as_part(each) -> dict:
    return {"type": "text", "text": each} if isinstance(each, str) else {"type": "image"}


def painted(colour: str, side: int = 64) -> Image.Image:
    return Image.new("RGB", (side, side + 32), colour)


def test_images_of_an_agents_turns_are_the_templates_and_another_image_is_another_branch(reader, request_of, processor):
    said, text = turn(called("look"))
    engine = Engine(text, "the", "the answer", "is", "408")
    made = by_agent("shows", reader, engine, request_of[1])
    assert STOP_REASONS[made.stop_reason[0]] == Stop.CLOSED and len(engine.asked) == 5
    function = {"name": "look", "description": "", "parameters": seeing_agents.TOOL["function"]["parameters"]}
    tool = {"type": "function", "function": function}

    def written(*messages) -> str:
        return TOKENS.apply_chat_template(list(messages), tools=[tool], tokenize=False, add_generation_prompt=True)

    first = asks(painted("red"), "the answer?")
    told = {"role": "tool", "content": [_as_part("is"), {"type": "image"}]}
    later = asks("and ", painted("red"))
    for number, colour, answer in ((1, "blue", "the"), (3, "green", "is")):
        shown = [painted("red"), painted(colour, 96)]
        found = TOKENS.decode(engine.asked[number].prompt_ids)
        assert found == TOKENS.decode(expanded(written(first, said, told), shown, processor))
        history = (first, said, told, {"role": "assistant", "content": answer, "reasoning_content": ""}, later)
        # a template of thoughts writes none where the model had none
        whole_text = written(*history).replace("<think>\n\n</think>\n\n", "")
        found = TOKENS.decode(engine.asked[number + 1].prompt_ids)
        assert found == TOKENS.decode(expanded(whole_text, [*shown, painted("red")], processor))
        pixels = [reader.pixels(image.name) for image in engine.asked[number + 1].images]
        for found, picture in zip(pixels, [*shown, painted("red")], strict=True):
            assert np.array_equal(found, processor(picture)["pixel_values"])
    kept = row_images(made, 0)
    assert made.branch_counts.tolist() == [2] and len(kept) == 6
    ids = made.token_ids.tolist()
    for image in kept:
        assert ids[image.start : image.start + image.tokens] == [PAD] * image.tokens
        assert ids[image.start - 1] != PAD != ids[image.start + image.tokens]
    assert ids.count(PAD) == sum(image.tokens for image in kept)
    assert not made.sampled[made.token_ids[made.prompt_lengths[0] :] == PAD].any()
    red, blue, green = (reader.take([encoded(painted(*each))])[0].name for each in
                        (("red",), ("blue", 96), ("green", 96)))  # fmt: skip
    assert [image.name for image in kept] == [red, blue, red, red, green, red]


def test_images_in_the_other_forms_of_clients(reader, request_of):
    engine = Engine(turn(called("look"))[1], "the", "answer", "is")
    made = by_agent("other_forms", reader, engine, request_of[1])
    names = [[image.name for image in request.images] for request in engine.asked]
    own = request_of[1].images[0].name
    blue, green, red = (reader.take([encoded(painted(*each))])[0].name for each in
                        (("blue", 96), ("green",), ("red",)))  # fmt: skip
    assert names == [[own], [own, blue], [green], [green, red]]
    assert made.branch_counts.tolist() == [2] and STOP_REASONS[made.stop_reason[0]] == Stop.CLOSED


@pytest.mark.parametrize("counts", [False, True])
def test_a_store_that_is_full_ends_the_run_of_an_agent_with_its_message(
    model, request_of, monkeypatch, tmp_path, counts
):
    def full(path, data):
        raise EnvironmentFault(f"{path}: an image of the data cannot be written: [Errno 28] No space left on device")

    monkeypatch.setattr(image_reader, "_write", full)
    reader = ImageReader(CONFIG, str(model), tmp_path, MOST)
    with pytest.raises(EnvironmentFault, match="No space left on device"):
        by_agent("asks_once", reader, Engine("the answer"), request_of[1], counts=counts)


def test_an_image_that_an_agent_cannot_show_is_refused_by_name_and_it_goes_on(reader, request_of, tmp_path):
    engine = Engine("the answer")
    told = tmp_path / "told"
    made = by_agent("wrong", reader, engine, request_of[1], told=str(told), ids=[5, PAD, 6])
    words = [
        "an image is at 'https://a.b/c.png': nothing is fetched", "an image is at 'file:///etc/hostname'",
        "an image is '??', which is no base64", "an image is at 'data:image/png,abc'",
        "an image is '\u00e9', which is no base64",
        "image 2 has 2 frames: only still images are read", "image 2 is no readable image of 10 bytes",
        "image 2 is too large: 2000 x 2032 pixels, and data.max_image_pixels = 1000000",
        "tokens, and data.max_prompt_length is 500", "'image_url'; only text is supported",
        "'video_url'; only text is supported",
        "the prompt has tokens of an image, and no image comes with it",
    ]  # fmt: skip
    for found, word in zip(json.loads(told.read_text()), words, strict=True):
        assert word in found
    assert len(engine.asked) == 1 and made.image_counts is None and made.turn_counts.tolist() == [1]
