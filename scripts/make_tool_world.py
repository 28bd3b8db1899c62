"""Makes the tiny world's sibling with a tool: the same small Qwen3-MoE with Qwen's framing tokens, and products of two
numbers of three digits, which are out of its reach and easy with a calculator.

    python scripts/make_tool_world.py --out tool-world --seed 0
    mrl train parallel_configs/tool-moe/cpu.yaml

It is warm-started by supervised training: most answers are a guess of the right length, some call the calculator and
repeat what it says. So it calls now and then, and reinforcement has to find out that calling pays. The reward, in
`reward.py` of the world, looks at what was said last. Held-out products are never trained on, neither here nor later.
The same seed gives the same files on the same machine. One JSON line at the end says what was made.
"""

import os
import random
import string
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from make_tiny_world import counts, data_row, main, make_model, save_model, write_data
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3MoeForCausalLM

DATA_SOURCE = "tiny/products"
TRAIN, HELD_OUT = 4096, 128  # problems
POSITIONS = 128
VOCAB_SIZE = 128
FRAME = ("<|im_start|>", "<|im_end|>")
ADDED = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
# texts that are a token each, so that a call is some twenty tokens long
WORDS = ("system", "user", "assistant", "calculator", '{"name": "', '", "arguments": {"expression": "', '"}}')
PROMPT = "<|im_start|>system\ncalculator<|im_end|>\n<|im_start|>user\n{0}*{1}=<|im_end|>\n<|im_start|>assistant\n"
CALL = '<tool_call>\n{{"name": "calculator", "arguments": {{"expression": "{0}*{1}"}}}}\n</tool_call><|im_end|>'
CONTEXT = "\n<|im_start|>user\n<tool_response>\n{0}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
CHAT_TEMPLATE = """{%- if tools %}{{ '<|im_start|>system\\n' }}
{%- for tool in tools %}{{ tool.function.name }}{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}
{%- for m in messages %}
{%- if m.role == "tool" %}
{%- if loop.first or messages[loop.index0 - 1].role != "tool" %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != "tool" %}{{ '<|im_end|>\\n' }}{% endif %}
{%- elif m.role == "assistant" %}{{ '<|im_start|>assistant\\n' + m.content }}
{%- for call in m.tool_calls or [] %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) }}
{{- '}\\n</tool_call>' }}
{%- endfor %}{{ '<|im_end|>\\n' }}
{%- else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
REWARD = '''"""Right is what was said last: behind the answers of tools, where there are some."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str.rsplit("assistant\\n", 1)[-1].strip() == ground_truth)
'''

Row = list[tuple[list[int], bool]]  # parts of a row, and whether each is trained on


@dataclass(frozen=True)
class Calling:
    """Supervised training. `share`: of answers that call."""

    steps: int = 370
    batch: int = 64  # answers per optimizer step
    lr: float = 2e-3
    label_smoothing: float = 0.05
    share: float = 0.25
    annealed: float = 0.0  # of the steps, the last ones, over which the learning rate falls to nothing


@dataclass(frozen=True)
class Product:
    """`left * right`, both of three digits."""

    left: int
    right: int

    @property
    def answer(self) -> str:
        return str(self.left * self.right)


def make_tokenizer(own: Sequence[str] = WORDS, positions: int = POSITIONS) -> PreTrainedTokenizerFast:
    """A token a character over printable ASCII and a few words of its own, with Qwen's framing tokens."""
    words = ["<pad>", "<unk>", *own, *string.digits, *string.ascii_lowercase, *"ABCDEFGHIJKLMNOPQRSTUVWXYZ"]
    words += [c for c in string.printable[:95] if c not in words] + ["\n"]
    framing = [*FRAME, *ADDED]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    parts = "|".join(_escaped(word) for word in sorted(own, key=len, reverse=True))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(rf"{parts}|[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    core.add_special_tokens(list(FRAME))
    core.add_tokens(list(ADDED))
    if len(words) + len(framing) > VOCAB_SIZE:
        raise SystemExit(f"{len(words) + len(framing)} words, and room for {VOCAB_SIZE}")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<|im_end|>", unk_token="<unk>",
        clean_up_tokenization_spaces=False, model_max_length=positions,
    )  # fmt: skip
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _escaped(word: str) -> str:
    return "".join(c if c.isalnum() else f"\\{c}" for c in word)


def split_products(seed: int) -> tuple[list[Product], list[Product]]:
    """(training, held-out), disjoint, in an order that depends on the seed alone."""
    numbers = random.Random(seed).sample(range(900 * 900), TRAIN + HELD_OUT)
    products = [Product(100 + number // 900, 100 + number % 900) for number in numbers]
    return products[HELD_OUT:], products[:HELD_OUT]


class Answers:
    """Products as token ids, with what is trained on of each."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast):
        self.tokenizer = tokenizer

    def ids(self, text: str) -> list[int]:
        """Of a text."""
        return self.tokenizer.encode(text, add_special_tokens=False)

    def calling(self, product: Product) -> Row:
        """Parts of a row: what the calculator says is not trained on."""
        prompt = self.ids(PROMPT.format(product.left, product.right))
        call = self.ids(CALL.format(product.left, product.right))
        told = self.ids(CONTEXT.format(product.answer))
        return [(prompt, False), (call, True), (told, False), (self.ids(product.answer + "<|im_end|>"), True)]

    def guessing(self, product: Product, picker: random.Random) -> Row:
        """Parts of a row whose answer has the right length."""
        digits = len(product.answer)
        guess = picker.randrange(10 ** (digits - 1), 10**digits)
        prompt = self.ids(PROMPT.format(product.left, product.right))
        return [(prompt, False), (self.ids(f"{guess}<|im_end|>"), True)]


def batch_of(rows: list[Row], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids [rows, length], labels with -100 outside of what is trained on)."""
    length = max(sum(len(ids) for ids, _ in parts) for parts in rows)
    ids = torch.full((len(rows), length), pad)
    labels = torch.full_like(ids, -100)
    for row, parts in enumerate(rows):
        start = 0
        for part, trained in parts:
            ids[row, start : start + len(part)] = torch.tensor(part)
            if trained:
                labels[row, start : start + len(part)] = torch.tensor(part)
            start += len(part)
    return ids, labels


def warm_up(model: Qwen3MoeForCausalLM, answers: Answers, products: list[Product], plan: Calling, seed: int) -> None:
    """Trains `model` in place."""
    picker = random.Random(seed)

    def rows() -> list[Row]:
        picked = picker.sample(products, plan.batch)
        calls = [picker.random() < plan.share for _ in picked]
        pairs = zip(picked, calls, strict=True)
        return [answers.calling(p) if call else answers.guessing(p, picker) for p, call in pairs]

    fit(model, rows, answers.tokenizer.pad_token_id, plan)


def rate(step: int, plan: Calling) -> float:
    """Of `plan.lr`, at a step from 0 on: it rises over 30 steps, and falls over the annealed ones."""
    rising = min(1.0, (step + 1) / 30)
    if not plan.annealed:
        return rising
    return min(rising, (plan.steps - step) / (plan.annealed * plan.steps))


def fit(model: Qwen3MoeForCausalLM, rows: Callable[[], list[Row]], pad: int, plan: Calling) -> None:
    """Trains `model` in place on what `rows` gives for each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=plan.lr, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, plan))
    for step in range(1, plan.steps + 1):
        ids, labels = batch_of(rows(), pad)
        logits = model(ids).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels[:, 1:].flatten(), label_smoothing=plan.label_smoothing
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            print(f"warm-up step {step} of {plan.steps}: loss {loss.item():.3f}", file=sys.stderr, flush=True)


def data_rows(products: list[Product], split: str) -> list[dict[str, Any]]:
    """Rows of the products."""
    return [
        data_row(DATA_SOURCE, f"{p.left}*{p.right}=", "math", p.answer, index=i, split=split)
        for i, p in enumerate(products)
    ]


def write_model(model: Qwen3MoeForCausalLM, tokenizer: PreTrainedTokenizerFast, path: Path) -> None:
    """A checkpoint whose responses end at <|im_end|>."""
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    save_model(model, tokenizer, path)


def one_rank_options(out: Path) -> dict[str, Any]:
    """What a run of this world's preset sets with another world at `out`, whose environment rewards: one small rank,
    four updates a step.
    """
    near = os.path.relpath(out)
    return {
        "model.path": f"{near}/model",
        "cluster.n_gpus_per_node": 2,
        "actor.layout.world_size": 1,
        "actor.layout.tensor_model_parallel_size": 1,
        "actor.layout.expert_model_parallel_size": 1,
        "actor.layout.sequence_parallel": "false",
        "actor.optim.lr": 1e-4,
        "actor.ppo_mini_batch_size": 2,
        # nothing but this holds the form of calls where rewards are drawn
        "algorithm.use_kl_loss": "true",
        "data.train_files": f"{near}/data/train.parquet",
        "data.val_files": f"{near}/data/val.parquet",
        "data.train_batch_size": 8,
        "rollout.turns.tools": "[]",
        "reward.custom_reward_function": "null",
        "reward.function": "environment",
    }


def build(out: Path, seed: int, plan: Calling) -> dict[str, Any]:
    """Writes the whole world into the empty folder `out` and returns what the JSON line says of it."""
    train, held_out = split_products(seed)
    tokenizer, model = make_tokenizer(), make_model(seed, POSITIONS)
    warm_up(model, Answers(tokenizer), train, plan, seed)
    write_model(model, tokenizer, out / "model")
    write_data(out, {"train": data_rows(train, "train"), "val": data_rows(held_out, "val")})
    (out / "reward.py").write_text(REWARD)
    return counts(model, train, held_out)


if __name__ == "__main__":
    main(__doc__, "tool-world", Calling(), build)
