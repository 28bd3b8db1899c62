"""Images of rows: what is read and how, what is refused in which words, and the tokens of a prompt with images.

Pixels are compared with Pillow's and transformers' own; formats of columns are those of verl's data sets and of the
datasets library.
"""

import json
import os
import shutil
import zlib
from base64 import b64encode
from dataclasses import astuple
from functools import partial
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from mrl.data import image_reader
from mrl.data.dataset import PromptDataset, PromptParameters
from mrl.data.image_reader import ImageReader, path_in
from mrl.data.images import image_bytes, open_image, with_images
from mrl.data.row_files import BadRow
from mrl.data.samples import ImageStore, KnownImage, RowImage
from mrl.engine.requests import Request
from mrl.errors import ConfigError, DataError, EnvironmentFault

MOST = 1_000_000


def encoded(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    out = BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def drawn(width=40, height=30, mode="RGB", seed=0) -> Image.Image:
    numbers = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(numbers).convert(mode)


def png(width: int, height: int, depth: int = 8, colour: int = 2, data: bytes = b"") -> bytes:
    """A PNG file written by hand, which may promise more than it has."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        checked = kind + content
        return len(content).to_bytes(4, "big") + checked + zlib.crc32(checked).to_bytes(4, "big")

    header = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes((depth, colour, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")


# ---------------------------------------------------------------- what is read


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "GIF", "WEBP"])
def test_an_image_without_losses_has_its_own_pixels(kind):
    image = drawn().quantize(8).convert("RGB") if kind == "GIF" else drawn()
    options = {"lossless": True} if kind == "WEBP" else {}
    assert np.array_equal(np.asarray(open_image(encoded(image, kind, **options), 1, MOST)), np.asarray(image))


@pytest.mark.parametrize("mode", ["L", "1", "P", "LA", "RGBA"])
def test_other_colours_become_rgb(mode):
    image = drawn(mode=mode)
    assert np.array_equal(np.asarray(open_image(encoded(image), 1, MOST)), np.asarray(image.convert("RGB")))


def test_what_is_transparent_is_white():
    image = drawn(mode="RGBA")
    image.putalpha(Image.fromarray(np.where(np.arange(40)[None] < 20, 255, 0).astype(np.uint8).repeat(30, 0)))
    found = np.asarray(open_image(encoded(image), 1, MOST))
    assert np.array_equal(found[:, :20], np.asarray(drawn())[:, :20])
    assert (found[:, 20:] == 255).all()


@pytest.mark.parametrize(
    ("mode", "transparent"),
    [("RGB", (0, 0, 0)), ("L", 0), ("P", 3), ("P", bytes(range(0, 256, 4))), ("1", 0), ("LA", None), ("RGBA", None)],
)
def test_transparency_is_read_as_vllms_server_reads_it(mode, transparent):
    """vllm.multimodal.media.image.ImageMediaIO of 0.32, of the same bytes: a colour of an RGB image stays as it is."""
    from vllm.multimodal.media.image import ImageMediaIO

    image = Image.fromarray(np.random.default_rng(0).integers(0, 2, (30, 40, 4), np.uint8) * 255, "RGBA").convert(mode)
    data = encoded(image, **({} if transparent is None else {"transparency": transparent}))
    assert np.array_equal(np.asarray(open_image(data, 1, MOST)), np.asarray(ImageMediaIO().load_bytes(data).media))


def test_a_photograph_taken_sideways_stands_upright():
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    data = encoded(drawn(), exif=exif.tobytes())
    assert open_image(data, 1, MOST).size == (30, 40)


def test_the_smallest_and_the_largest_allowed_image_are_read():
    assert open_image(encoded(drawn(1, 1)), 1, MOST).size == (1, 1)
    assert open_image(encoded(drawn(40, 25)), 1, 1000).size == (40, 25)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (encoded(drawn())[:-200], "PNG, 40 x 30.*cannot be decoded"),
        (encoded(drawn(), "JPEG")[:-300], "JPEG, 40 x 30.*cannot be decoded"),
        (encoded(drawn(), "GIF", save_all=True, append_images=[drawn(seed=1)]), "has 2 frames: only still"),
        (encoded(drawn(), "PNG", save_all=True, append_images=[drawn(seed=1)]), "has 2 frames: only still"),
        (encoded(drawn(), "WEBP", save_all=True, append_images=[drawn(seed=1)]), "has 2 frames: only still"),
        (encoded(drawn(mode="CMYK"), "JPEG"), "colours of the kind CMYK"),
        (encoded(drawn(mode="CMYK"), "TIFF"), "colours of the kind CMYK"),
        (encoded(drawn(mode="LAB"), "TIFF"), "colours of the kind LAB"),
        (encoded(Image.fromarray(np.zeros((4, 4), np.uint16))), "16 bits a colour"),
        (png(2, 2, depth=16, data=bytes(2 * 13)), "16 bits a colour"),
        (encoded(Image.fromarray(np.zeros((4, 4), np.float32)), "TIFF"), "colours of the kind F"),
        (png(0, 0), "image 3 "),
        (png(20_000, 20_000), r"too large: .*400000000 pixels.*max_image_pixels = 1000000"),
        (png(2_000, 2_000), "too large: 2000 x 2000 pixels, and data.max_image_pixels = 1000000"),
        (png(1001, 1000, data=bytes(10_000_000)), "too large: 1001 x 1000"),
        (png(100, 100, data=bytes(100)), "cannot be decoded"),
        (encoded(drawn(), "EPS"), "no readable image of .* bytes; read are PNG, JPEG"),
        (encoded(drawn(), "ICO"), "no readable image"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "no readable image"),
        (b"", "no readable image of 0 bytes"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:aa\nsize 3\n", "pointer of Git LFS"),
    ],
)  # fmt: skip
def test_what_would_be_another_picture_or_none_is_refused_by_name(data, words):
    with pytest.raises(BadRow, match=words) as caught:
        open_image(data, 3, MOST)
    assert "image 3 " in str(caught.value)


# ---------------------------------------------------------------- where it lies


def test_an_image_is_bytes_or_of_the_datasets_library_or_a_file(tmp_path):
    data = encoded(drawn())
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a b.png").write_bytes(data)
    of_file = tmp_path / "pictures" / "a b.png"
    for entry in (
        data,
        {"bytes": data, "path": None},
        {"bytes": data, "path": "of_another_machine.png"},
        {"bytes": None, "path": "pictures/a b.png"},
        {"type": "image", "image": "pictures/a b.png"},
        "pictures/a b.png",
        str(of_file),
        f"file://{tmp_path}/pictures/a%20b.png",
        {"image": f"file://localhost{tmp_path}/pictures/a%20b.png"},
        {"image": f"data:image/png;base64,{b64encode(data).decode()}"},  # as qwen_vl_utils.fetch_image, which verl asks
    ):
        assert image_bytes(entry, 1, tmp_path) == data, entry


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("../secret.png", "outside of the data file's folder"),
        ("/etc/hostname", "outside of the data file's folder"),
        ("file:///etc/hostname", "outside of the data file's folder"),
        ("link.png", "outside of the data file's folder"),
        ("file://%2e%2e/secret.png", "nothing is fetched"),
        ("https://example.org/a.png", "nothing is fetched"),
        ("HTTP://example.org/a.png", "nothing is fetched"),
        ("s3://bucket/a.png", "nothing is fetched"),
        ("data:image/png;base64,AAA", "is no base64"),
        ("data:image/png,AAAA", "nothing is fetched"),
        ("file://host/a.png", "nothing is fetched"),
        ("missing.png", "is no file"),
        ("iVBORw0KGgo" * 30, "cannot be read: File name too long; base64 is read behind data:image/png;base64,"),
        ("http://[x", "cannot be read: Invalid IPv6 URL"),
        ("file://[", "cannot be read: Invalid IPv6 URL"),
        ("\ud800.png", "cannot be read: 'utf-8' codec can't encode"),
        ("loop.png", "cannot be read"),
        ("a\0b.png", "zero byte"),
        (".", "is no file"),
        ({"bytes": None, "path": None}, "neither bytes nor a path"),
        ({"path": "a.png", "max_pixels": 100}, "has max_pixels: only bytes"),
        ({"image_url": {"url": "x"}}, "has image_url: only bytes"),
        (7, "is int: bytes"),
        ([1, 2], "is list: bytes"),
    ],
)
def test_what_lies_elsewhere_or_is_no_image_is_refused_by_name(tmp_path, entry, words):
    (tmp_path / "secret.png").write_bytes(encoded(drawn()))
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    (folder / "loop.png").symlink_to(folder / "loop.png")
    with pytest.raises(BadRow, match=words):
        image_bytes(entry, 1, folder)


# ---------------------------------------------------------------- its place in the prompt


def test_marks_become_parts_as_in_verl():
    """verl.utils.dataset.rl_dataset._build_messages: text between marks is a part, empty text is none."""
    found = with_images([{"role": "user", "content": "<image>What is\n<image> this?"}], 2)
    image = {"type": "image"}
    assert found[0]["content"] == [
        image,
        {"type": "text", "text": "What is\n"},
        image,
        {"type": "text", "text": " this?"},
    ]
    parts = [{"type": "image", "text": None}, {"type": "text", "text": "<image>"}]  # as parquet reads them
    assert with_images([{"role": "user", "content": parts}], 1)[0]["content"] == [
        image,
        {"type": "text", "text": "<image>"},
    ]
    plain = [{"role": "system", "content": "no image"}, {"role": "user", "content": "<image>"}]
    assert with_images(plain, 1)[0] == plain[0]


@pytest.mark.parametrize(("content", "images"), [("<image><image>", 1), ("none", 1), ("<image>", 2), ("<image>", 0)])
def test_as_many_marks_as_images(content, images):
    with pytest.raises(BadRow, match=f"the prompt has {content.count('<image>')} images .* the row has {images}"):
        with_images([{"role": "user", "content": content}], images)


@pytest.mark.parametrize("part", [{"type": "video"}, {"type": "image", "image": "a.png"}, {"type": "text"}, "text"])
def test_other_parts_are_refused(part):
    with pytest.raises(BadRow, match="a part of a message"):
        with_images([{"role": "user", "content": [part]}], 0)


# ---------------------------------------------------------------- what the model is given

CONFIG = {
    "image_token_id": 7,
    "vision_config": {"patch_size": 16, "temporal_patch_size": 2, "spatial_merge_size": 2},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("model")
    settings = {
        "image_processor_type": "Qwen2VLImageProcessorFast", "patch_size": 16, "temporal_patch_size": 2,
        "merge_size": 2, "size": {"shortest_edge": 4096, "longest_edge": 65536}, "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return str(folder)


@pytest.fixture(scope="module")
def processor(model):
    from transformers import AutoImageProcessor

    return AutoImageProcessor.from_pretrained(model, backend="pil")


@pytest.fixture
def reader(model, tmp_path) -> ImageReader:
    return ImageReader(CONFIG, model, tmp_path / "store", MOST)


def stored(reader: ImageReader, entries: list, folder: Path) -> list[KnownImage]:
    known = reader.read_images(entries, folder)
    reader.keep([(entries, folder)], folder / "store", [image.name for image in known])
    return known


@pytest.mark.parametrize("size", [(1, 1), (40, 30), (64, 64), (500, 300), (20, 1000), (999, 1000)])
def test_grids_and_pixels_are_those_of_transformers_processor(reader, processor, tmp_path, size):
    image = drawn(*size)
    (known,) = stored(reader, [encoded(image)], tmp_path)
    expected = processor(image)
    assert [list(known.grid)] == expected["image_grid_thw"].tolist()
    assert known.tokens == expected["image_grid_thw"].prod() // 4
    assert np.array_equal(reader.pixels(known.name), expected["pixel_values"])


def test_an_image_is_stored_once_whatever_it_is_called(reader, tmp_path):
    data = encoded(drawn())
    (tmp_path / "a.png").write_bytes(data)
    one, other = stored(reader, [data, "a.png"], tmp_path)
    assert one == other and [file for file in (tmp_path / "store").rglob("*") if file.is_file()] == [
        path_in(tmp_path / "store", one.name)
    ]


def test_images_are_written_once_a_run_has_a_folder_and_only_those_that_it_lacks(reader, tmp_path):
    first, second, other = (encoded(drawn(seed=seed)) for seed in range(3))
    names = [image.name for image in reader.read_images([first, second], tmp_path)]
    assert not (tmp_path / "store").exists()
    reader.keep([([other, b"no image", first], tmp_path), ([second], tmp_path)], tmp_path / "store", names)
    files = [path_in(tmp_path / "store", name) for name in names]
    assert sorted(files) == sorted(file for file in (tmp_path / "store").rglob("*") if file.is_file())
    reader.keep([], tmp_path / "store", names)  # a resume reads no data again
    files[1].unlink()
    with pytest.raises(DataError, match="1 images of the data have changed"):
        reader.keep([([first, other], tmp_path)], tmp_path / "store", names)


def test_a_damaged_image_is_written_again_from_the_data(reader, tmp_path):
    data = encoded(drawn())
    (known,) = stored(reader, [data], tmp_path)
    file = path_in(tmp_path / "store", known.name)
    file.write_bytes(data[:-20])
    with pytest.raises(DataError, match="1 images of the data have changed"):
        reader.keep([], tmp_path / "store", [known.name])
    reader.keep([([data], tmp_path)], tmp_path / "store", [known.name])
    assert file.read_bytes() == data


@pytest.fixture
def engine_folder(model, tmp_path) -> str:
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return str(folder)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_workers_of_an_engine_see_the_images_that_a_request_names_in_its_order(
    engine_folder, reader, processor, tmp_path, order
):
    """From a request through vLLM's input to pixels: names, places and grids stand as the prompt has them."""
    from mrl.engine.image_inputs import NAMES, RequestImages
    from mrl.engine.v0_common import CommonWorkerExtension

    store = ImageStore(str(tmp_path / "store"), MOST)
    images = [drawn(40, 30), drawn(160, 128, seed=1)]
    known = stored(reader, [encoded(image) for image in images], tmp_path)
    token = CONFIG["image_token_id"]
    ids, places = reader.expanded([5, token, 6, token], [known[i] for i in order])
    given = RequestImages(engine_folder, store).input_of(Request(0, tuple(ids), 0, images=places))
    assert given["prompt_token_ids"] == ids
    assert given["mm_hashes"]["image"] == [known[i].name for i in order]
    found = [(place.offset, place.length) for place in given["mm_placeholders"]["image"]]
    assert found == [(place.start, place.tokens) for place in places] and found[0][1] != found[1][1]
    items = given["mm_kwargs"]["image"]
    names = torch.stack([item[NAMES].data for item in items])
    assert [item["image_grid_thw"].data.tolist() for item in items] == [list(known[i].grid) for i in order]

    seeing = SimpleNamespace()
    worker = SimpleNamespace(
        model_config=SimpleNamespace(model=engine_folder), model_runner=SimpleNamespace(get_model=lambda: seeing)
    )
    CommonWorkerExtension.see_images(worker, *astuple(store))
    each = [processor(images[i])["pixel_values"] for i in order]
    patches = [len(pixels) for pixels in each]
    assert np.array_equal(seeing.images.of(names, patches, [1, 0]).numpy(), np.concatenate(each))
    own = seeing.images.of(names, patches, [1]).split(patches)
    assert torch.isnan(own[0]).all() and np.array_equal(own[1].numpy(), each[1])


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_worker_reads_the_images_that_its_tower_computes(monkeypatch, workers):
    """What vLLM's own sharding takes of pixels in which all others are not there."""
    from vllm.model_executor.models import vision

    from mrl.engine import seeing_models

    monkeypatch.setattr(vision, "get_tensor_model_parallel_world_size", lambda: workers)
    monkeypatch.setattr(vision, "tensor_model_parallel_all_gather", lambda tensor, dim: tensor.repeat(workers, 1))
    monkeypatch.setattr(seeing_models, "get_tensor_model_parallel_world_size", lambda: workers)
    grids = [[1, 2, 2], [1, 4, 2], [1, 2, 6], [1, 4, 4], [1, 2, 2]]
    patches = [a * b * c for a, b, c in grids]
    tower = torch.nn.Linear(3, 3)
    shown = []
    tower.forward = lambda pixels, sizes: shown.append(pixels) or pixels[::4]
    tower.spatial_merge_size, tower.out_hidden_size = 2, 3
    read = []
    for rank in range(workers):
        for module in (vision, seeing_models):
            monkeypatch.setattr(module, "get_tensor_model_parallel_rank", lambda rank=rank: rank)
        own = seeing_models._own_share(patches)
        pixels = torch.full((sum(patches), 3), float("nan"))
        for number in own:
            pixels.split(patches)[number].fill_(number)
        vision.run_dp_sharded_mrope_vision_model(tower, pixels, grids, rope_type="rope_3d")
        assert sorted(shown[-1].unique().tolist()) == sorted(own)
        read += own
    assert sorted(read) == list(range(len(grids)))


@pytest.mark.parametrize("damage", ["truncated", "other", "missing"])
def test_a_damaged_image_ends_its_request_by_name_before_an_engine_reads_it(engine_folder, reader, tmp_path, damage):
    from mrl.engine.image_inputs import RequestImages

    data = encoded(drawn())
    (known,) = stored(reader, [data], tmp_path)
    file = path_in(tmp_path / "store", known.name)
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(data[:-20] if damage == "truncated" else encoded(drawn(seed=5)))
    request = Request(0, (5, 5), 0, images=(RowImage(known.name, 0, 1, known.grid),))
    with pytest.raises(EnvironmentFault, match=f"{file.name}: an image of the data"):
        RequestImages(engine_folder, ImageStore(str(tmp_path / "store"), MOST)).input_of(request)


def test_an_image_of_an_impossible_shape_is_a_bad_row(reader, tmp_path):
    with pytest.raises(BadRow, match=r"image 2 is 900 x 2 pixels: absolute aspect ratio"):
        reader.read_images([encoded(drawn()), encoded(drawn(900, 2))], tmp_path)


def test_a_stored_image_that_changed_or_went_is_a_fault(reader, tmp_path):
    (known,) = stored(reader, [encoded(drawn())], tmp_path)
    path_in(tmp_path / "store", known.name).write_bytes(encoded(drawn(seed=5)))
    with pytest.raises(EnvironmentFault, match="has changed"):
        reader.pixels(known.name)
    path_in(tmp_path / "store", known.name).unlink()
    with pytest.raises(EnvironmentFault, match="cannot be read"):
        reader.pixels(known.name)


def test_each_image_has_its_tokens_where_the_template_has_one(reader):
    images = [KnownImage("a", (1, 4, 6), 6), KnownImage("b", (1, 2, 2), 1)]
    ids, rows = reader.expanded([1, 7, 2, 3, 7, 4], images)
    assert ids == [1, *[7] * 6, 2, 3, 7, 4]
    assert rows == (RowImage("a", 1, 6, (1, 4, 6)), RowImage("b", 9, 1, (1, 2, 2)))
    assert reader.expanded([1, 2], []) == ([1, 2], ())
    with pytest.raises(BadRow, match="2 tokens of images for 1 images"):
        reader.expanded([7, 1, 7], images[:1])
    with pytest.raises(BadRow, match="two images touch"):
        reader.expanded([1, 7, 7], images)


@pytest.mark.parametrize("key", ["image_token_id", "vision_config"])
def test_a_configuration_that_lacks_what_images_need_is_told_by_name(key, model, tmp_path):
    with pytest.raises(ConfigError, match=f"config.json has no {key}"):
        ImageReader({name: value for name, value in CONFIG.items() if name != key}, model, tmp_path / "store", MOST)


def test_a_processor_that_keeps_sizes_is_refused_as_tokens_are_counted_by_new_ones(model, tmp_path):
    settings = json.loads((Path(model) / "preprocessor_config.json").read_text())
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings | {"do_resize": False}))
    with pytest.raises(ConfigError, match="do_resize: false"):
        ImageReader(CONFIG, str(tmp_path), tmp_path / "store", MOST)


@pytest.mark.parametrize(
    "given",
    [
        {"size": {"min_pixels": 3136, "max_pixels": 50176}},
        {"size": {"shortest_edge": 3136}},
        {"size": {"height": 280, "width": 280}},
        {"max_pixels": "12845056"},
        {"max_pixels": 0},
    ],
)
def test_a_processor_without_limits_of_pixels_is_refused_as_transformers_refuses_each_image(model, tmp_path, given):
    """Qwen2VLImageProcessorPil of transformers 5.19 raises at its first image."""
    settings = json.loads((Path(model) / "preprocessor_config.json").read_text())
    settings = {key: value for key, value in settings.items() if key != "size"} | given
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match="write numbers above 0 as its min_pixels and max_pixels"):
        ImageReader(CONFIG, str(tmp_path), tmp_path / "store", MOST)


@pytest.mark.parametrize("key", ["patch_size", "temporal_patch_size", "spatial_merge_size"])
def test_a_processor_that_is_not_the_models_is_refused(model, tmp_path, key):
    other = {**CONFIG, "vision_config": {**CONFIG["vision_config"], key: 3}}
    with pytest.raises(ConfigError, match=f"vision_config.{key} of config.json is 3"):
        ImageReader(other, model, tmp_path, MOST)


@pytest.mark.parametrize("key", ["patch_size", "temporal_patch_size", "spatial_merge_size"])
def test_a_tower_whose_sizes_are_not_written_is_not_taken_for_the_processors(model, tmp_path, key):
    sizes = {name: value for name, value in CONFIG["vision_config"].items() if name != key}
    with pytest.raises(ConfigError, match=f"vision_config has no {key}"):
        ImageReader({**CONFIG, "vision_config": sizes}, model, tmp_path, MOST)


def test_a_folder_without_a_processor_or_with_another_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="has no image processor"):
        ImageReader(CONFIG, str(tmp_path), tmp_path, MOST)
    (tmp_path / "preprocessor_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"image processor .* cannot be read"):
        ImageReader(CONFIG, str(tmp_path), tmp_path, MOST)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": "CLIPImageProcessor"}))
    with pytest.raises(ConfigError, match="is CLIPImageProcessorPil, which is not read"):
        ImageReader(CONFIG, str(tmp_path), tmp_path, MOST)


# ---------------------------------------------------------------- prompts


class Tokenizer:
    """A letter a token, and the token 7 an image."""

    chat_template = "letters"

    def apply_chat_template(self, messages, **_):
        contents = [message["content"] for message in messages]
        parts = [part for each in contents for part in (each if isinstance(each, list) else [{"text": each}])]
        return [token for part in parts for token in (map(ord, part["text"]) if "text" in part else [7])]


def loaded(reader, folder: Path, *rows, **changes) -> PromptDataset:
    file = folder / "rows.parquet"
    filled = [
        {"data_source": "d", "prompt": [{"role": "user", "content": text}], "images": images,
         "reward_model": {"ground_truth": "1"}}
        for text, images in rows
    ]  # fmt: skip
    pq.write_table(pa.Table.from_pylist(filled), file)
    return PromptDataset.load([str(file)], Tokenizer(), PromptParameters(**{"images": reader} | changes))


def test_rows_become_prompts_with_the_tokens_and_places_of_their_images(reader, processor, tmp_path):
    one, other = ({"bytes": encoded(drawn(64, 64, seed=seed)), "path": None} for seed in (0, 1))
    rows = [
        ("a<image>b<image>", [one, other]),
        ("c<image>d<image>", [other, one]),
        ("plain", []),
        ("text", None),
    ]
    data = loaded(reader, tmp_path, *rows)
    assert data.report.kept == 4 and not data.report.bad
    first = data[0]
    assert list(first.token_ids) == [ord("a"), *[7] * 4, ord("b"), *[7] * 4]
    assert [(image.start, image.tokens, image.grid) for image in first.images] == [
        (1, 4, (1, 4, 4)), (6, 4, (1, 4, 4)),
    ]  # fmt: skip
    assert [image.name for image in data[1].images] == [image.name for image in reversed(first.images)]
    assert data[2].images == data[3].images == () and "".join(map(chr, data[3].token_ids)) == "text"
    names = {image.name for prompt in data for image in prompt.images}
    reader.keep([([one], tmp_path), ([other], tmp_path)], tmp_path / "store", names)
    assert np.array_equal(reader.pixels(first.images[0].name), processor(drawn(64, 64))["pixel_values"])


@pytest.mark.parametrize("none", [[], None])
def test_a_mark_without_an_image_is_a_bad_row(reader, tmp_path, none):
    """As of a file whose column of images has another name than data.image_key: no row trains without its picture."""
    with pytest.raises(DataError, match=r"has 1 images .* and the row has 0"):
        loaded(reader, tmp_path, ("<image>a", none), ("b", [{"bytes": encoded(drawn()), "path": None}]))


def test_other_images_under_the_same_words_are_another_prompt(reader, tmp_path):
    images = [[{"bytes": encoded(drawn(seed=seed)), "path": None}] for seed in (0, 1, 0)]
    data = loaded(reader, tmp_path, *(("<image>a", each) for each in images))
    assert (data.report.kept, data.report.duplicates) == (2, 1)


def test_bad_images_are_bad_rows_by_name_and_the_others_stay(reader, tmp_path):
    good = {"bytes": encoded(drawn(64, 64)), "path": None}
    rows = [
        ("<image>", [good]), ("<image>", [{"bytes": encoded(drawn())[:-200], "path": None}]), ("<image>", [good, good]),
        ("a\x07", []), ("<image>", [{"bytes": None, "path": "https://example.org/a.png"}]),
        ("<image>", [{"bytes": encoded(drawn(200, 200)), "path": None}]),
    ]  # fmt: skip
    data = loaded(reader, tmp_path, *rows, max_bad_row_share=1.0, max_prompt_length=30)
    found = [aside.reason for aside in data.report.bad_rows]
    words = ("cannot be decoded", "has 1 images", "1 tokens of images for 0 images", "nothing is fetched",
             "image 1 alone has 36 tokens, more than data.max_prompt_length = 30")  # fmt: skip
    assert [word in reason for word, reason in zip(words, found, strict=True)] == [True] * 5
    assert data.report.kept == 1


def test_images_count_in_the_limit_of_a_prompt(reader, tmp_path):
    good = [{"bytes": encoded(drawn(64, 64)), "path": None}]
    assert loaded(reader, tmp_path, ("abc<image>", good), ("a", []), max_prompt_length=6).report.filtered == 1
    cut = {"max_prompt_length": 6, "filter_overlong_prompts": False, "truncation": "left", "max_bad_row_share": 1.0}
    report = loaded(reader, tmp_path, ("abc<image>", good), ("a", []), **cut).report
    assert "with images is not cut to 6" in report.bad_rows[0].reason


def test_without_a_reader_rows_with_images_are_bad_as_before(tmp_path):
    rows = [("<image>", [{"bytes": encoded(drawn()), "path": None}]), ("a", [])]
    report = loaded(None, tmp_path, *rows, max_bad_row_share=1.0).report
    assert "images is not empty: set model.vision: frozen" in report.bad_rows[0].reason
    assert report.kept == 1


def test_images_of_another_column_are_read_by_its_name_and_of_two_columns_refused(reader, tmp_path):
    image = {"bytes": encoded(drawn(64, 64)), "path": None}
    row = {
        "data_source": "d",
        "prompt": [{"role": "user", "content": "<image>"}],
        "reward_model": {"ground_truth": "1"},
    }
    file = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist([row | {"pictures": [image]}]), file)
    read = partial(PromptDataset.load, [str(file)], Tokenizer())
    parameters = PromptParameters(images=reader, image_key="pictures", max_bad_row_share=1.0)
    assert len(read(parameters)[0].images) == 1
    pq.write_table(
        pa.Table.from_pylist([row | {"pictures": [image], "images": [image]}, row | {"pictures": [image]}]), file
    )
    assert "data.image_key names the column pictures" in read(parameters).report.bad_rows[0].reason


def test_many_rows_are_looked_at_by_several_processes_with_the_same_result(reader, tmp_path, monkeypatch):
    pictures = [encoded(drawn(40 + seed, 30, seed=seed)) for seed in range(6)]
    rows = [(f"<image>{number}", [{"bytes": data, "path": None}]) for number, data in enumerate(pictures)]
    rows[2] = ("<image>2", [{"bytes": pictures[2][:-200], "path": None}])
    rows[4] = ("4", None)
    changes = {"max_bad_row_share": 0.5}
    alone = loaded(reader, tmp_path, *rows, **changes)
    monkeypatch.setattr(image_reader, "FEW", 1)
    started = []
    pool = image_reader.ProcessPoolExecutor

    def counted(*arguments):
        started.append(arguments)
        return pool(*arguments)

    monkeypatch.setattr(image_reader, "ProcessPoolExecutor", counted)
    together = loaded(reader, tmp_path, *rows, **changes)
    assert len(started) == 1 and (together.report.kept, together.report.bad) == (5, 1)
    assert together.report == alone.report and together.fingerprint == alone.fingerprint
    assert [prompt.images for prompt in together] == [prompt.images for prompt in alone]
    assert "cannot be decoded" in together.report.examples[0].reason


def test_a_process_that_is_ended_while_it_looks_is_a_fault_and_no_silence(reader, tmp_path, monkeypatch):
    monkeypatch.setattr(image_reader, "FEW", 0)
    monkeypatch.setattr(image_reader, "_look", ends_itself)
    with pytest.raises(EnvironmentFault, match=r"looks at the images .* was ended"):
        loaded(reader, tmp_path, ("<image>a", [{"bytes": encoded(drawn()), "path": None}]))


def ends_itself(*_) -> None:
    os._exit(9)
