"""A drawn model that reads images, and its rows: with no, one or two pictures of different sizes."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pyarrow as pa
import pyarrow.parquet as pq
import torch

ROOT = Path(__file__).resolve().parents[2]
# a drawn model never counts right
REWARD = "def compute_score(solution_str, **_):\n    return len(set(solution_str)) % 3 / 2\n"
PICTURES = '''"""A tool that answers with pictures."""

from PIL import Image

from mrl.acting.environment import Reply


def picture(shade: int) -> Reply:
    """Shows a picture, and words beside it.

    Args:
        shade: of green
    """
    pictures = [Image.new("RGB", (16 + 8 * (shade % 3), 24), (200, shade * 40 % 256, 20)) for _ in range(1 + shade % 2)]
    return Reply(f"shade {shade}", images=pictures)
'''


def script() -> ModuleType:
    sys.path.insert(0, str(ROOT / "scripts"))
    spec = importlib.util.spec_from_file_location("make_vision_world", ROOT / "scripts" / "make_vision_world.py")
    found = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def tool_template(part: str) -> str:
    """That of the world that calls tools, with what writes a message's text and images in the place of its text."""
    from make_tool_world import CHAT_TEMPLATE

    usual = "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
    assert usual in CHAT_TEMPLATE
    answer = "{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}"
    assert answer in CHAT_TEMPLATE
    part = part.replace("message[", "m[")
    template = CHAT_TEMPLATE
    for plain, begin, end in (
        (usual, "'<|im_start|>' + m.role + '\\n'", "'<|im_end|>\\n'"),
        (answer, "'\\n<tool_response>\\n'", "'\\n</tool_response>'"),
    ):
        template = template.replace(plain, f"{{{{- {begin} }}}}{part}{{{{- {end} }}}}")
    return template


def make_seeing_world(folder: Path, experts: int, calls: bool = False) -> Path:
    """A drawn model and its data. `calls`: its template writes tools, and every fourth token ends a turn."""
    world = script()
    if calls:
        world.POSITIONS = 256
        world.SEEN += (
            "<|im_start|>",
            "<|im_end|>",
            "<tool_call>",
            "</tool_call>",
            "<tool_response>",
            "</tool_response>",
        )
        world.TEMPLATE = tool_template(world._PART)
    model, processor = world.make_model(0, experts), world.make_processor()
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():  # a freshly made model is nearly uniform
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(1.5)
            else:
                parameter.add_(0.6 * torch.rand(parameter.shape, generator=random) - 0.3)
    task = world.Task(world.make_tokenizer(), processor, model)
    world.save(model, task, processor, folder / "model")
    if calls:
        (folder / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, *range(11, 128, 4)]}))
    (folder / "data").mkdir()
    train_boards, held_out = world.boards(0)
    for name, boards in (("train", train_boards[:48]), ("val", held_out[:16])):
        rows = world.data_rows(boards, name)
        for number, row in enumerate(rows):
            if number % 4 == 1:
                row["prompt"][0]["content"] = "<image>and<image>?"
                row["images"] = [*row["images"], rows[number - 1]["images"][0]]
            if number % 4 == 3:
                row |= {"prompt": [{"role": "user", "content": f"none {number}"}], "images": []}
        pq.write_table(pa.Table.from_pylist(rows), folder / "data" / f"{name}.parquet")
    (folder / "reward.py").write_text(REWARD)
    (folder / "pictures.py").write_text(PICTURES)
    return folder
