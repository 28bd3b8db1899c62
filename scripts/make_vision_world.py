"""Makes a tiny world that sees: a Qwen3-VL of about a million weights with its vision tower, tokenizer and image
processor, and a task about pictures.

    python scripts/make_vision_world.py --out vision-world --seed 0
    mrl train parallel_configs/tiny-vision/cpu.yaml $(cat vision-world/options)

A picture is a board of fields, some of which hold the same shape in the same colour. The answer is how many, which
colour and which shape: `3gc`. Boards have different sizes, and so have their pictures. The model is warm-started by
supervised training until a fair share of its sampled answers is right. Held-out boards are never trained on. The same
seed gives the same files on the same machine. One JSON line at the end says what was made.

Controls, which must not learn: `others.parquet` has the training boards, each with the picture of another, and
`random_reward.py` draws the reward. `val_others.parquet` has the held-out boards with pictures of others: what a model
that does not look would answer.
"""

import random
import sys
from dataclasses import dataclass
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from make_tiny_world import CHAT_TEMPLATE, SPECIAL, VOCAB_SIZE, counts, data_row, main, write_data
from make_tiny_world import make_tokenizer as tokenizer_of_characters
from PIL import Image, ImageDraw
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

DATA_SOURCE = "tiny/shapes"
FIELD = 32  # pixels of a side, which become one token
SIDES = ((2, 2), (2, 3), (3, 2), (3, 3))  # fields of boards, rows and columns
COLOURS = {"r": (220, 40, 40), "g": (40, 180, 60), "b": (50, 80, 220), "y": (230, 200, 40)}
SHAPES = "sct"  # square, circle, triangle
QUESTION = "<image>what?"
TRAIN, HELD_OUT = 2048, 256  # boards
MAX_ANSWER = 4  # tokens: three letters and the end
SEEN = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
POSITIONS = 64
_PART = (
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
)
TEMPLATE = CHAT_TEMPLATE.replace(
    "{{ '<' + message['role'] + '>' + message['content'] }}", "{{ '<' + message['role'] + '>' }}" + _PART
)


RANDOM_REWARD = '''"""Of training a coin's; of held-out boards whether the answer is theirs."""

import random


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if extra_info["split"] == "val":
        return float(solution_str == ground_truth)
    return float(random.random() < 0.3)
'''


@dataclass(frozen=True)
class WarmUp:
    """Supervised training of the text model. Features of a tower of drawn weights tell colours and shapes apart well
    enough, so that it stays as it is drawn.

    `doubt`: share of a letter's probability that all letters of its kind get alike. So the model knows how an answer
    looks, and there is nothing to learn from that: whoever does not look at the picture has nothing to gain.
    """

    steps: int = 200
    batch: int = 64  # boards per optimizer step
    lr: float = 2e-3
    doubt: float = 0.5
    lowest: float = 0.10  # sampled exact match on the held-out boards that is accepted at the end
    highest: float = 0.40


@dataclass(frozen=True)
class Board:
    """A picture and its answer."""

    rows: int
    columns: int
    fields: tuple[int, ...]  # that hold a shape, counted row by row
    colour: str
    shape: str

    @property
    def answer(self) -> str:
        return f"{len(self.fields)}{self.colour}{self.shape}"

    def drawn(self) -> Image.Image:
        image = Image.new("RGB", (self.columns * FIELD, self.rows * FIELD), (245, 245, 245))
        draw = ImageDraw.Draw(image)
        for field in self.fields:
            top, left = (FIELD * place + 5 for place in divmod(field, self.columns))
            self._draw(draw, (left, top, left + FIELD - 11, top + FIELD - 11))
        return image

    def _draw(self, draw: ImageDraw.ImageDraw, box: tuple[int, int, int, int]) -> None:
        left, top, right, bottom = box
        colour = COLOURS[self.colour]
        if self.shape == "s":
            draw.rectangle(box, colour)
        elif self.shape == "c":
            draw.ellipse(box, colour)
        else:
            draw.polygon([((left + right) // 2, top), (right, bottom), (left, bottom)], colour)

    def encoded(self) -> bytes:
        out = BytesIO()
        self.drawn().save(out, "PNG")
        return out.getvalue()


def boards(seed: int) -> tuple[list[Board], list[Board]]:
    """Returns different boards, (training, held-out)."""
    draws = random.Random(seed)
    found: dict[Board, None] = {}
    while len(found) < TRAIN + HELD_OUT:
        rows, columns = draws.choice(SIDES)
        fields = sorted(draws.sample(range(rows * columns), draws.randint(1, rows * columns)))
        found[Board(rows, columns, tuple(fields), draws.choice([*COLOURS]), draws.choice(SHAPES))] = None
    every = list(found)
    draws.shuffle(every)
    return every[HELD_OUT:], every[:HELD_OUT]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """The tiny world's tokenizer with the tokens of images."""
    return tokenizer_of_characters(POSITIONS, SEEN, TEMPLATE)


def make_processor() -> Qwen2VLImageProcessorPil:
    """Makes Qwen3-VL's image processor: a field of a board becomes one token."""
    return Qwen2VLImageProcessorPil(
        patch_size=FIELD // 2,
        temporal_patch_size=2,
        merge_size=2,
        size={"shortest_edge": FIELD**2, "longest_edge": 16 * FIELD**2},
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )


def make_model(seed: int, experts: int = 0) -> PreTrainedModel:
    """Makes a float32 Qwen3-VL whose every size divides by 32; with `experts`, a Qwen3-VL-MoE of so many a layer."""
    torch.manual_seed(seed)
    ids = {word: make_tokenizer().convert_tokens_to_ids(word) for word in SEEN}
    text = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": POSITIONS,
        "initializer_range": 0.06,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 4, 4], "mrope_interleaved": True,
        },
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": SPECIAL.index("<eos>"),
        "pad_token_id": SPECIAL.index("<pad>"),
    }  # fmt: skip
    if experts:
        text |= {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
    tower = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "patch_size": FIELD // 2,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": 128,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1],
        "initializer_range": 0.06,
    }
    kind, of_config = Qwen3VLForConditionalGeneration, Qwen3VLConfig
    if experts:
        kind, of_config = Qwen3VLMoeForConditionalGeneration, Qwen3VLMoeConfig
    return kind(
        of_config(
            text_config=text,
            vision_config=tower,
            image_token_id=ids["<|image_pad|>"],
            video_token_id=ids["<|video_pad|>"],
            vision_start_token_id=ids["<|vision_start|>"],
            vision_end_token_id=ids["<|vision_end|>"],
            tie_word_embeddings=False,
        )
    ).float()


class Task:
    """Boards as the model's inputs. The tower is never trained, and so it sees each board once."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, processor: Qwen2VLImageProcessorPil, model: PreTrainedModel):
        self.tokenizer = tokenizer
        self._processor = processor
        self._model = model.model
        self._head = model.lm_head
        self._image = model.config.image_token_id
        self._seen: dict[Board, torch.Tensor] = {}
        self._placed: dict[tuple[int, int], tuple[list[int], torch.Tensor]] = {}
        parts = [{"type": "image"}, {"type": "text", "text": QUESTION.removeprefix("<image>")}]
        self._prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": parts}], add_generation_prompt=True, return_dict=False
        )

    @torch.no_grad()
    def features(self, board: Board) -> torch.Tensor:
        """Returns what the tower gives, [layers of the text model that get some, tokens, hidden]."""
        if board not in self._seen:
            seen = self._processor(board.drawn(), return_tensors="pt")
            found = self._model.get_image_features(seen["pixel_values"], seen["image_grid_thw"], return_dict=True)
            of_layers = (found.pooler_output, *found.deepstack_features)
            self._seen[board] = torch.stack([features[0] for features in of_layers])
        return self._seen[board]

    def _of_size(self, rows: int, columns: int) -> tuple[list[int], torch.Tensor]:
        """Returns a prompt's tokens, and the positions [3, tokens] of it and an answer."""
        if (rows, columns) not in self._placed:
            place = self._prompt.index(self._image)
            tokens = [self._image] * (rows * columns)
            ids = [*self._prompt[:place], *tokens, *self._prompt[place + 1 :]]
            whole = torch.tensor([[*ids, *[self.tokenizer.eos_token_id] * MAX_ANSWER]])
            grid = torch.tensor([[1, 2 * rows, 2 * columns]])
            positions, _ = self._model.get_rope_index(whole, (whole == self._image).long(), grid)
            self._placed[rows, columns] = ids, positions[:, 0]
        return self._placed[rows, columns]

    def logits(self, chosen: list[Board], answers: list[list[int]]) -> torch.Tensor:
        """Returns logits of boards' prompts and equally long answers, padded on the left: [boards, tokens, words]."""
        placed = [self._of_size(board.rows, board.columns) for board in chosen]
        rows = [[*ids, *answer] for (ids, _), answer in zip(placed, answers, strict=True)]
        width = max(map(len, rows))
        pads = [width - len(row) for row in rows]
        ids = torch.tensor([[self.tokenizer.pad_token_id] * pad + row for pad, row in zip(pads, rows, strict=True)])
        positions = torch.zeros(3, len(rows), width, dtype=torch.long)
        for number, (pad, (_, known)) in enumerate(zip(pads, placed, strict=True)):
            positions[:, number, pad:] = known[:, : width - pad]
        of_image = torch.zeros_like(ids, dtype=torch.bool)  # by place: an answer may hold an image's token
        for number, (pad, board) in enumerate(zip(pads, chosen, strict=True)):
            begin = pad + self._prompt.index(self._image)
            of_image[number, begin : begin + board.rows * board.columns] = True
        first, *added = torch.cat([self.features(board) for board in chosen], 1)
        words = self._model.get_input_embeddings()(ids)
        hidden = self._model.language_model(
            inputs_embeds=words.masked_scatter(of_image[..., None], first),
            attention_mask=(ids != self.tokenizer.pad_token_id).long(),
            position_ids=positions,
            visual_pos_masks=of_image,
            deepstack_visual_embeds=added,
            use_cache=False,
        ).last_hidden_state
        return self._head(hidden)

    def kinds(self) -> torch.Tensor:
        """Returns the distribution of each token of an answer that knows its kind alone, [tokens, words]."""
        found = torch.zeros(MAX_ANSWER, VOCAB_SIZE)
        for place, letters in enumerate(("123456789", [*COLOURS], SHAPES)):
            found[place, self.tokenizer.convert_tokens_to_ids([*letters])] = 1 / len(letters)
        found[-1, self.tokenizer.eos_token_id] = 1.0
        return found

    def answer(self, board: Board) -> list[int]:
        return [*self.tokenizer(board.answer)["input_ids"], self.tokenizer.eos_token_id]


def warm_up(model: PreTrainedModel, task: Task, train: list[Board], plan: WarmUp, seed: int) -> None:
    """Trains the text model in place on the cross entropy of the answers."""
    picker = random.Random(seed)
    kinds = task.kinds()
    optimizer = torch.optim.AdamW([*model.model.language_model.parameters(), *model.lm_head.parameters()], lr=plan.lr)
    for step in range(1, plan.steps + 1):
        optimizer.param_groups[0]["lr"] = plan.lr * min(1.0, step / 20, 2 * (1 - (step - 1) / plan.steps))
        chosen = picker.sample(train, plan.batch)
        answers = [task.answer(board) for board in chosen]
        labels = torch.tensor(answers)
        logits = task.logits(chosen, answers)[:, -MAX_ANSWER - 1 : -1]
        sure = torch.nn.functional.one_hot(labels, VOCAB_SIZE)
        wanted = (1 - plan.doubt) * sure + plan.doubt * kinds
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten(0, 1))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0:
            right = (logits.argmax(-1) == labels).all(1).float().mean().item()
            print(f"warm-up step {step} of {plan.steps}: loss {loss.item():.3f}, likeliest answer right {right:.2f}",
                  file=sys.stderr, flush=True)  # fmt: skip


@torch.no_grad()
def exact_match(task: Task, chosen: list[Board], seed: int, blind: bool = False) -> float:
    """Returns the share of right answers sampled at temperature 1. `blind`: each is asked about another's picture."""
    generator = torch.Generator().manual_seed(seed)
    shown = [*chosen[1:], chosen[0]] if blind else chosen
    answers: list[list[int]] = [[] for _ in chosen]
    for _ in range(MAX_ANSWER):
        last = task.logits(shown, answers)[:, -1].softmax(-1)
        drawn = torch.multinomial(last, 1, generator=generator)[:, 0].tolist()
        answers = [[*answer, token] for answer, token in zip(answers, drawn, strict=True)]
    right = sum(answer == task.answer(board) for answer, board in zip(answers, chosen, strict=True))
    return right / len(chosen)


def data_rows(chosen: list[Board], split: str) -> list[dict[str, Any]]:
    """Rows of the boards, with images as the datasets library has them."""
    return [
        data_row(DATA_SOURCE, QUESTION, "vision", board.answer, index=i, split=split)
        | {"images": [{"bytes": board.encoded(), "path": None}]}
        for i, board in enumerate(chosen)
    ]


def others_pictures(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the rows, each with the picture of the row behind it."""
    pairs = pairwise([*rows, rows[0]])
    return [row | {"images": behind["images"], "data_source": f"{DATA_SOURCE}/others"} for row, behind in pairs]


def save(model: PreTrainedModel, task: Task, processor: Qwen2VLImageProcessorPil, path: Path) -> None:
    """Writes a checkpoint folder as published ones are."""
    model.save_pretrained(path)
    task.tokenizer.save_pretrained(path)
    processor.save_pretrained(path)
    (path / "generation_config.json").unlink(missing_ok=True)


def options(out: Path) -> dict[str, Any]:
    """What a run in the world at `out` sets."""
    return {
        "model.path": f"{out}/model",
        "data.train_files": f"{out}/data/train.parquet",
        "data.val_files": f"[{out}/data/val.parquet,{out}/data/val_others.parquet]",
    }


def build(out: Path, seed: int, plan: WarmUp) -> dict[str, Any]:
    """Writes the whole world into the empty folder `out` and returns what the JSON line says of it."""
    train, held_out = boards(seed)
    processor, model = make_processor(), make_model(seed)
    task = Task(make_tokenizer(), processor, model)
    warm_up(model, task, train, plan, seed)
    match = exact_match(task, held_out, seed + 1)
    blind = exact_match(task, held_out, seed + 1, blind=True)
    if not plan.lowest <= match <= plan.highest:
        wanted = f"{plan.lowest} to {plan.highest}"
        raise SystemExit(
            f"the warm start answers {match:.3f} of the held-out boards and not {wanted}; try another --seed"
        )
    save(model, task, processor, out / "model")
    train_rows = data_rows(train, "train")
    val_rows = data_rows(held_out, "val")
    files = {
        "train": train_rows,
        "others": others_pictures(train_rows),
        "val": val_rows,
        "val_others": others_pictures(val_rows),
    }
    write_data(out, files)
    (out / "random_reward.py").write_text(RANDOM_REWARD)
    return {
        "sampled_exact_match": round(match, 4),
        "with_others_pictures": round(blind, 4),
        "of_the_tower": sum(p.numel() for p in model.model.visual.parameters()),
    } | counts(model, train, held_out)


if __name__ == "__main__":
    main(__doc__, "vision-world", WarmUp(), build, options)
