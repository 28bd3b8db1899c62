"""Makes the tiny world's sibling with long responses: the same small Qwen3-MoE, and a task whose answers are over 300
tokens long.

    python scripts/make_long_world.py --out long-world --seed 0

The task is to count: to `137>` the answer is `137 138 139 ...`, eighty numbers in characters. What short answers cannot
show, such as the spread of sequence ratios and over-long responses, shows here. The reward is graded
(counting_reward.py): a model that is unsure of each character never gets three hundred of them right at once. The same
seed gives the same files on the same machine. One JSON line at the end says what was made.

    python scripts/make_long_world.py --heavy-tailed --out tailed-world --seed 0

makes another task of it: to `137-149>` the answer is the thirteen numbers from 137 to 149. How many is drawn from
the lognormal that fits the lengths of a published run, so that the longest of a batch are several times the mean.
"""

import math
import random
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from counting_reward import compute_score
from make_tiny_world import main, make_model, make_tokenizer, save_model
from transformers import PreTrainedTokenizerFast, Qwen3MoeForCausalLM

DATA_SOURCE = "tiny/counting"
NUMBERS = 80  # in an answer
FIRST, LAST = 100, 919  # starts; all numbers have three digits
HELD_OUT = 128  # starts
POSITIONS = 512
# of the numbers that a heavy-tailed task asks for, over NUMBERS: fitted to mean 7,385, longest 20,480, 3.9 % clipped
TAIL_MU, TAIL_SIGMA = -1.2208, 0.6927
LEAST = 2
MAX_RESPONSE = 384  # tokens; a right answer has 80 x 4 = 320 with its end


@dataclass(frozen=True)
class Counting:
    """Supervised training with a little label smoothing, so that sampling explores: of three hundred characters some
    three go wrong.

    With ten times as much, responses lose the thread and end after a hundred tokens.
    """

    steps: int = 150
    batch: int = 12  # answers per optimizer step
    lr: float = 2e-3
    label_smoothing: float = 0.01
    heavy_tailed: bool = False


TAILED = Counting(steps=400, heavy_tailed=True)  # where to stop is one more thing to learn


def answer(start: int, numbers: int = NUMBERS) -> str:
    """So many numbers from `start` on."""
    return " ".join(str(number) for number in range(start, start + numbers))


@dataclass(frozen=True)
class Task:
    """What is asked of each start: the first as many numbers, or a number of its own of them."""

    heavy_tailed: bool = False

    def numbers(self, start: int) -> int:
        """In the answer. Of a heavy tail always the same for a start, and NUMBERS at most."""
        if not self.heavy_tailed:
            return NUMBERS
        drawn = random.Random(f"numbers of {start}").gauss(TAIL_MU, TAIL_SIGMA)
        return max(LEAST, min(NUMBERS, round(NUMBERS * math.exp(drawn))))

    def question(self, start: int) -> str:
        """All of one length."""
        return f"{start}-{start + self.numbers(start) - 1}>" if self.heavy_tailed else f"{start}>"

    def answer(self, start: int) -> str:
        """The right one."""
        return answer(start, self.numbers(start))


def split_starts(seed: int) -> tuple[list[int], list[int]]:
    """(training, held-out), disjoint, in an order that depends on the seed alone."""
    starts = list(range(FIRST, LAST + 1))
    random.Random(seed).shuffle(starts)
    return starts[HELD_OUT:], starts[:HELD_OUT]


def prompt_ids(tokenizer: PreTrainedTokenizerFast, start: int, task: Task = Task()) -> list[int]:
    """The question as the chat template renders it."""
    messages = [{"role": "user", "content": task.question(start)}]
    return tokenizer(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))["input_ids"]


def warm_up(
    model: Qwen3MoeForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    starts: list[int],
    plan: Counting,
    seed: int,
    task: Task = Task(),
) -> None:
    """Trains `model` in place on the cross entropy of the answers; all questions have the same length."""
    picker, optimizer = random.Random(seed), torch.optim.AdamW(model.parameters(), lr=plan.lr)
    prompt = len(prompt_ids(tokenizer, FIRST, task))
    for step in range(1, plan.steps + 1):
        picked = picker.sample(starts, plan.batch)
        answers = [[*tokenizer(task.answer(s))["input_ids"], tokenizer.eos_token_id] for s in picked]
        width = max(map(len, answers))
        labels = torch.tensor([ids + [-100] * (width - len(ids)) for ids in answers])
        prompts = torch.tensor([prompt_ids(tokenizer, s, task) for s in picked])
        ids = torch.cat([prompts, labels.clamp(min=0)], 1)
        logits = model(ids).logits[:, prompt - 1 : -1]
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), label_smoothing=plan.label_smoothing
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"warm-up step {step} of {plan.steps}: loss {loss.item():.3f}", file=sys.stderr, flush=True)


@torch.no_grad()
def sample(
    model: Qwen3MoeForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    starts: list[int],
    generator: torch.Generator,
    tokens: int = MAX_RESPONSE,
    task: Task = Task(),
) -> list[list[int]]:
    """Token ids of one response to each start, sampled at temperature 1;
    with its end where it has one within `tokens`.
    """
    step, cache, drawn = torch.tensor([prompt_ids(tokenizer, s, task) for s in starts]), None, []
    for _ in range(tokens):
        out = model(step, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        step = torch.multinomial(out.logits[:, -1].softmax(-1), 1, generator=generator)
        drawn.append(step)
    rows = torch.cat(drawn, 1).tolist()
    return [row[: row.index(tokenizer.eos_token_id) + 1] if tokenizer.eos_token_id in row else row for row in rows]


def data_rows(starts: list[int], split: str, task: Task = Task()) -> list[dict[str, Any]]:
    """Rows in verl's schema."""
    return [
        {
            "data_source": DATA_SOURCE,
            "prompt": [{"role": "user", "content": task.question(start)}],
            "ability": "counting",
            "reward_model": {"style": "rule", "ground_truth": task.answer(start)},
            "extra_info": {"index": i, "split": split},
        }
        for i, start in enumerate(starts)
    ]


def build(out: Path, seed: int, plan: Counting) -> dict[str, Any]:
    """Writes the whole world into the empty folder `out` and returns what the JSON line says."""
    start, task = time.monotonic(), Task(plan.heavy_tailed)
    train, held_out = split_starts(seed)
    tokenizer, model = make_tokenizer(POSITIONS), make_model(seed, POSITIONS)
    warm_up(model, tokenizer, train, plan, seed, task)
    drawn = sample(model, tokenizer, held_out[:32], torch.Generator().manual_seed(seed + 1), task=task)
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in drawn]
    scores = [compute_score(DATA_SOURCE, text, task.answer(s)) for text, s in zip(texts, held_out, strict=False)]
    save_model(model, tokenizer, out / "model")
    (out / "data").mkdir()
    for name, starts in (("train", train), ("val", held_out)):
        pq.write_table(pa.Table.from_pylist(data_rows(starts, name, task)), out / "data" / f"{name}.parquet")
    return {
        "seed": seed,
        "sampled_score": round(sum(scores) / len(scores), 4),
        "sampled_length": sum(map(len, drawn)) / len(drawn),
        "train_prompts": len(train),
        "val_prompts": len(held_out),
        "warm_up": asdict(plan),
        "seconds": round(time.monotonic() - start, 1),
    }


if __name__ == "__main__":
    if tailed := "--heavy-tailed" in sys.argv:
        sys.argv.remove("--heavy-tailed")
    main(__doc__, "tailed-world" if tailed else "long-world", TAILED if tailed else Counting(), build)
