"""Images beside answers in `mrl report` and `mrl samples`: small copies of what the run has stored, nothing else."""

import base64
from io import BytesIO

import pytest
from PIL import Image

from mrl.tools.report.html import _sample
from mrl.tools.report.page import SampleBlock
from mrl.tools.report.pictures import picture
from mrl.tools.report.samples import ShownImage, images_of, parts_of, text_with_images
from mrl.tools.report.samples import _sample as _row

NAME = "ab" + "0" * 62


def store(folder, data: bytes, name: str = NAME) -> None:
    (folder / name[:2]).mkdir(parents=True, exist_ok=True)
    (folder / name[:2] / name).write_bytes(data)


def png(width: int, height: int) -> bytes:
    out = BytesIO()
    Image.new("RGB", (width, height), (250, 0, 0)).save(out, "PNG")
    return out.getvalue()


@pytest.mark.parametrize(("size", "shown"), [((40, 30), (40, 30)), ((3200, 1600), (320, 160))])
def test_a_stored_image_becomes_a_small_one_inside_the_page(tmp_path, size, shown):
    store(tmp_path, png(*size))
    head, _, data = picture(tmp_path, NAME).partition(",")
    found = Image.open(BytesIO(base64.b64decode(data)))
    assert head == "data:image/png;base64" and found.size == shown and found.getpixel((5, 5)) == (250, 0, 0)


@pytest.mark.parametrize("name", ["cd" + "0" * 62, "../secret", "/etc/hostname", ""])
def test_what_is_no_stored_image_is_not_shown(tmp_path, name):
    store(tmp_path, png(4, 4))
    (tmp_path.parent / "secret").write_bytes(png(4, 4))
    assert picture(tmp_path, name) is None


@pytest.mark.parametrize("data", [b"", b"no image", png(40, 30)[:60], b"<svg onload='x'/>"])
def test_a_broken_image_is_not_shown(tmp_path, data):
    store(tmp_path, data)
    assert picture(tmp_path, NAME) is None


def test_words_stand_for_the_tokens_of_images():
    row = {"images": [{"name": "b", "first_token": 4, "tokens": 1}, {"name": "a", "first_token": 1, "tokens": 2}]}
    images = images_of(row)
    assert images == (ShownImage("a", 1, 2), ShownImage("b", 4, 1)) and images_of({}) == ()
    text = text_with_images([5, 7, 7, 6, 7, 8], images, lambda ids: "".join(map(str, ids)))
    assert text == "5 [image 1: 2 tokens] 6 [image 2: 1 tokens] 8"
    assert text_with_images([5, 6], (), None) == "5 6"
    assert text_with_images([6, 7, 8], images, lambda ids: "".join(map(str, ids)), 3) == "6 [image 2: 1 tokens] 8"


def test_an_image_of_a_tools_answer_is_one_token_of_what_is_shown():
    row = {
        "prompt_id": 0, "prompt_ids": [5, 7, 7], "response_ids": [1, 2, 7, 7, 3], "rollout_log_probs": [-1.0] * 5,
        "stop_reason": "stop", "sampled": [True, False, False, False, True],
        "images": [{"name": "a", "first_token": 1, "tokens": 2}, {"name": "b", "first_token": 5, "tokens": 2}],
    }  # fmt: skip
    sample = _row(0, row, (1,), 1.0, "ok")
    (part,) = parts_of(sample, sample.log_probs, lambda ids: "".join(map(str, ids)))
    assert [token.text for token in part.tokens] == ["1", "2", " [image 2: 2 tokens] ", "3"]
    assert [token.is_context for token in part.tokens] == [False, True, True, False]


def test_pictures_stand_in_the_figure_of_their_answer():
    block = SampleBlock("Best", (), "prompt", (), 1.0, "log-prob", ("data:image/png;base64,AAAA", 'data:"><script>'))
    assert '<img src="data:image/png;base64,AAAA" alt="image 1">' in _sample(block)
    assert "<script>" not in _sample(block)
