"""What a rehearsal of a model that sees reads: a small tower as transformers loads it, the user's rows with their
images, the model's own image processor.
"""

import json
from collections import Counter
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from mrl.acting.dialects import dialect_of
from mrl.config.load import load_config
from mrl.data.dataset import PromptDataset, PromptParameters, load_tokenizer
from mrl.data.image_reader import ImageReader
from mrl.data.samples import ImageStore
from mrl.errors import ConfigError, DataError
from mrl.model.registry import known_hf_config
from mrl.tools.rehearse.compose import WorkFolder
from mrl.tools.rehearse.marks import SWITCHES
from mrl.tools.rehearse.prepare import TRAIN_ROWS, VAL_ROWS, prepare
from mrl.tools.rehearse.scoring import ROW
from mrl.tools.rehearse.small_model import small_hf_config, write_checkpoint, write_tokenizer
from mrl.tools.rehearse.small_tower import IMAGE_TOKENS, TOKENS, ids_of
from mrl.tools.rehearse.watched import WATCHED

PRESET = Path(__file__).parents[2] / "parallel_configs" / "qwen3-vl-30b-a3b" / "h100-4x8.yaml"
SEEING = ("Qwen2.5-VL-7B", "Qwen3-VL-2B", "Qwen3-VL-30B-A3B", "Qwen3.5-27B", "Qwen3.5-35B-A3B")
QUESTION = "Find x. You FIRST think about the reasoning process as an internal monologue and then say the answer. "


@pytest.mark.parametrize("name", SEEING)
def test_the_small_model_that_sees_is_the_one_of_transformers_class_and_tells_images_apart(name, tmp_path):
    original = known_hf_config(name)
    write_tokenizer(tmp_path, sees=True)
    tokenizer = load_tokenizer(str(tmp_path))
    ids = dict(zip(IMAGE_TOKENS, tokenizer.convert_tokens_to_ids(list(IMAGE_TOKENS)), strict=True))
    config = small_hf_config(original, 2, 320, 64, sees=True) | ids_of(tokenizer)
    assert config["image_token_id"] == ids["<|image_pad|>"] and config["vision_end_token_id"] == ids["<|vision_end|>"]
    write_checkpoint(tmp_path, config, (7,), 64)
    model, said = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32, output_loading_info=True)
    assert not said["missing_keys"] and not said["mismatched_keys"]
    assert {key for key in said["unexpected_keys"] if not key.startswith("mtp.")} == set()
    tower = model.config.vision_config
    given = original["vision_config"]
    assert (tower.patch_size, tower.spatial_merge_size) == (given["patch_size"], given["spatial_merge_size"])
    assert bool(getattr(tower, "deepstack_visual_indexes", ())) == bool(given.get("deepstack_visual_indexes"))
    assert type(model).__name__ == original["architectures"][0]
    image = [ids["<|image_pad|>"]] * TOKENS
    row = torch.tensor([[5, ids["<|vision_start|>"], *image, ids["<|vision_end|>"], 9, 11]])
    numbers = 3 * tower.temporal_patch_size * tower.patch_size**2
    grid = torch.tensor([[1, 4, 4]])
    logits = []
    for seed in (0, 1):
        pixels = torch.randn(16, numbers, generator=torch.Generator().manual_seed(seed))
        kinds = (row == image[0]).long()
        with torch.no_grad():
            out = model(input_ids=row, pixel_values=pixels, image_grid_thw=grid, mm_token_type_ids=kinds)
        logits.append(out.logits[0, -1])
    assert torch.isfinite(logits[0]).all()
    assert (logits[0] - logits[1]).abs().max() > 1e-3


def test_a_model_of_text_alone_cannot_be_made_to_see():
    with pytest.raises(ConfigError, match="model_type 'qwen3_moe' has no vision tower"):
        small_hf_config(known_hf_config("Qwen3-30B-A3B"), 2, 320, 64, sees=True)


def png(number: int, width: int = 300, height: int = 200) -> bytes:
    out = BytesIO()
    Image.new("RGB", (width, height), (number * 5 % 256, 80, 200)).save(out, "PNG")
    return out.getvalue()


def row(number: int, *images: bytes, content: str = "") -> dict:
    """A row as geo3k has them."""
    return {
        "data_source": "hiyouga/geometry3k",
        "prompt": [{"role": "user", "content": content or "<image>" * len(images) + QUESTION}],
        "images": [{"bytes": image, "path": None} for image in images],
        "reward_model": {"style": "rule", "ground_truth": str(number)},
        "extra_info": {"split": "train", "index": number},
    }


def prepared(tmp_path: Path, *overrides: str):
    work = WorkFolder(tmp_path / "work")
    work.path.mkdir()
    return work, prepare(load_config(PRESET, overrides=overrides).config, work, 2)


def written(work: WorkFolder, kind: str = "train") -> list[dict]:
    return [json.loads(line) for line in work.rows(kind, 0).read_text().splitlines()]


def loaded(work: WorkFolder, made, kind: str = "train") -> PromptDataset:
    """The rows as the run will read them."""
    data = made.rehearsal.config.data
    reader = ImageReader.of(str(work.model), ImageStore("", data.max_image_pixels))
    parameters = PromptParameters(max_prompt_length=data.max_prompt_length, images=reader, image_key=data.image_key)
    return PromptDataset.load([str(work.rows(kind, 0))], load_tokenizer(str(work.model)), parameters)


def test_the_users_rows_come_with_their_images_and_long_texts_are_cut_around_them(tmp_path):
    several = [png(number, 640, 480) for number in range(50, 55)]
    rows = [row(0, png(0)[:40]), row(1, png(1)), row(2, *several), row(3, content="no image " + QUESTION)]
    rows[:0] = [row(99, png(99), content="<image><|image_pad|>" + QUESTION)]  # a bad row, as for a run
    rows += [row(number, png(number)) for number in range(4, 40)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    work, made = prepared(tmp_path, f"data.train_files={tmp_path / 'train.parquet'}")
    found = written(work)
    assert [each["extra_info"]["index"] for each in found] == [*range(1, TRAIN_ROWS + 1)]  # without the bad ones
    assert [each["extra_info"][ROW] for each in found] == [*range(TRAIN_ROWS)]
    stored = [[(work.rows("train", 0).parent / name).read_bytes() for name in each["images"]] for each in found]
    assert stored[:3] == [[png(1)], several, []] and all(len(images) == 1 for images in stored[3:])
    prompts = loaded(work, made)
    report = prompts.report
    assert (report.kept, report.bad, report.filtered, report.duplicates) == (TRAIN_ROWS, 0, 0, 0)
    assert [len(prompt.images) for prompt in prompts][:3] == [1, 5, 0]
    assert all(0 < image.tokens <= TOKENS for prompt in prompts for image in prompt.images)
    assert any("which makes at most about 4 tokens" in text for text in made.substitutes)
    assert "a vision tower of 27 layers of 1152 to 2 of 64" in made.model


def test_rows_that_are_not_there_show_images(tmp_path):
    work, made = prepared(tmp_path, "data.val_files=[gone.parquet]")
    for kind, count in (("train", TRAIN_ROWS), ("val", VAL_ROWS)):
        prompts = loaded(work, made, kind)
        shown = [len(prompt.images) for prompt in prompts]
        assert len(shown) == count and sum(shown) == count * 3 // 4


def test_the_models_own_processor_and_tokens_are_used(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    write_tokenizer(model, sees=True)
    tokenizer = load_tokenizer(str(model))
    own = known_hf_config("Qwen3-VL-30B-A3B")
    own |= ids_of(tokenizer)
    (model / "config.json").write_text(json.dumps(own))
    settings = {"image_processor_type": "Qwen2VLImageProcessorFast", "patch_size": 16, "temporal_patch_size": 2,
                "merge_size": 2, "image_mean": [0.4, 0.5, 0.6], "image_std": [0.2] * 3, "min_pixels": 3136,
                "max_pixels": 12845056}  # fmt: skip
    (model / "processor_config.json").write_text(json.dumps({"image_processor": settings}))
    work, made = prepared(tmp_path, f"model.path={model}")
    kept = json.loads((work.model / "preprocessor_config.json").read_text())
    assert kept == {key: value for key, value in settings.items() if "pixels" not in key} | {
        "size": {"shortest_edge": 32**2, "longest_edge": TOKENS * 32**2}
    }
    assert not (work.model / "processor_config.json").exists()
    small = json.loads((work.model / "config.json").read_text())
    assert small["image_token_id"] == own["image_token_id"]
    assert next(text.split(",")[0] for text in made.substitutes) == "images: the model's own image processor"
    assert len(loaded(work, made)) == TRAIN_ROWS


def test_a_file_of_broken_images_is_refused_as_one_without_a_usable_row(tmp_path):
    pq.write_table(pa.Table.from_pylist([row(0, b"no image"), row(1, png(1)[:50])]), tmp_path / "train.parquet")
    with pytest.raises(DataError, match=r"train\.parquet: no row of it can be used"):
        prepared(tmp_path, f"data.train_files={tmp_path / 'train.parquet'}")


def test_a_template_without_a_form_for_images_is_refused(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    write_tokenizer(model)
    (model / "chat_template.jinja").write_text("{% for m in messages %}{{ m['role'] }}{% endfor %}")
    (model / "config.json").write_text(json.dumps(known_hf_config("Qwen3-VL-30B-A3B")))
    with pytest.raises(DataError, match="the chat template gives 0 tokens of images for 1 images"):
        prepared(tmp_path, f"model.path={model}")


def test_a_rate_of_the_tower_is_seen_in_the_optimizers_groups_as_the_switch_names_it():
    (row,) = (row for row in WATCHED if row.switch == "actor.optim.vision_lr")
    given = SimpleNamespace(config=SimpleNamespace(vision_lr=1e-5))

    def made(*rates: float) -> SimpleNamespace:
        groups = [{"max_lr": rate} for rate in rates]
        return SimpleNamespace(chained_optimizers=[SimpleNamespace(param_groups=groups)])

    assert row.seen(given, made(1e-4)) is None
    switch = next(switch for switch in SWITCHES if switch.name == row.switch)
    names = Counter({f"{row.switch}={row.seen(given, made(1e-4, 1e-5))}": 2})
    assert switch.found_in(SimpleNamespace(exercised=names), None, 1e-5) == "ran in 2 processes"


def test_our_template_shows_images_of_users_and_of_tools(tmp_path):
    write_tokenizer(tmp_path, with_tools=True, sees=True)
    tokenizer = load_tokenizer(str(tmp_path))
    parts = [{"type": "image"}, {"type": "text", "text": "x"}]
    text = tokenizer.apply_chat_template([{"role": "user", "content": parts}], tokenize=False)
    assert text == "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>x<|im_end|>\n"
    assert dialect_of(tokenizer, {}).image == "<|vision_start|><|image_pad|><|vision_end|>"
