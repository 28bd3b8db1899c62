"""Makes the tiny world's sibling with long responses: the same small Qwen3-MoE, and a task whose answers are over 300
tokens long.

    python scripts/make_long_world.py --out long-world --seed 0

The task is to count: to `137>` the answer is `137 138 139 ...`, eighty numbers in characters. What short answers cannot
show, such as the spread of sequence ratios and over-long responses, shows here. The reward is graded
(counting_reward.py): a model that is unsure of each character never gets three hundred of them right at once. The same
seed gives the same files on the same machine. One JSON line at the end says what was made.
"""

import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from counting_reward import compute_score
from make_tiny_world import counts, data_row, main, make_model, make_tokenizer, save_model, write_data
from transformers import PreTrainedTokenizerFast, Qwen3MoeForCausalLM

DATA_SOURCE = "tiny/counting"
NUMBERS = 80  # in an answer
FIRST, LAST = 100, 919  # starts; all numbers have three digits
HELD_OUT = 128  # starts
POSITIONS = 512
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


def question(start: int) -> str:
    """Asks for the numbers from `start` on."""
    return f"{start}>"


def answer(start: int) -> str:
    """The right one."""
    return " ".join(str(number) for number in range(start, start + NUMBERS))


def split_starts(seed: int) -> tuple[list[int], list[int]]:
    """(training, held-out), disjoint, in an order that depends on the seed alone."""
    starts = list(range(FIRST, LAST + 1))
    random.Random(seed).shuffle(starts)
    return starts[HELD_OUT:], starts[:HELD_OUT]


def prompt_ids(tokenizer: PreTrainedTokenizerFast, start: int) -> list[int]:
    """The question as the chat template renders it."""
    messages = [{"role": "user", "content": question(start)}]
    return tokenizer(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))["input_ids"]


def warm_up(
    model: Qwen3MoeForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    starts: list[int],
    plan: Counting,
    seed: int,
) -> None:
    """Trains `model` in place on the cross entropy of the answers; all questions and answers have the same length."""
    picker, optimizer = random.Random(seed), torch.optim.AdamW(model.parameters(), lr=plan.lr)
    prompt = len(prompt_ids(tokenizer, FIRST))
    for step in range(1, plan.steps + 1):
        picked = picker.sample(starts, plan.batch)
        labels = torch.tensor([[*tokenizer(answer(s))["input_ids"], tokenizer.eos_token_id] for s in picked])
        prompts = torch.tensor([prompt_ids(tokenizer, s) for s in picked])
        ids = torch.cat([prompts, labels], 1)
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
) -> list[list[int]]:
    """Token ids of one response to each start, sampled at temperature 1;
    with its end where it has one within `tokens`.
    """
    step, cache, drawn = torch.tensor([prompt_ids(tokenizer, s) for s in starts]), None, []
    for _ in range(tokens):
        out = model(step, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        step = torch.multinomial(out.logits[:, -1].softmax(-1), 1, generator=generator)
        drawn.append(step)
    rows = torch.cat(drawn, 1).tolist()
    return [row[: row.index(tokenizer.eos_token_id) + 1] if tokenizer.eos_token_id in row else row for row in rows]


def data_rows(starts: list[int], split: str) -> list[dict[str, Any]]:
    """Rows of the starts."""
    return [
        data_row(DATA_SOURCE, question(start), "counting", answer(start), index=i, split=split)
        for i, start in enumerate(starts)
    ]


def build(out: Path, seed: int, plan: Counting) -> dict[str, Any]:
    """Writes the whole world into the empty folder `out` and returns what the JSON line says of it."""
    train, held_out = split_starts(seed)
    tokenizer, model = make_tokenizer(POSITIONS), make_model(seed, POSITIONS)
    warm_up(model, tokenizer, train, plan, seed)
    drawn = sample(model, tokenizer, held_out[:32], torch.Generator().manual_seed(seed + 1))
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in drawn]
    scores = [compute_score(DATA_SOURCE, text, answer(s)) for text, s in zip(texts, held_out, strict=False)]
    save_model(model, tokenizer, out / "model")
    write_data(out, {"train": data_rows(train, "train"), "val": data_rows(held_out, "val")})
    return {
        "sampled_score": round(sum(scores) / len(scores), 4),
        "sampled_length": sum(map(len, drawn)) / len(drawn),
    } | counts(model, train, held_out)


if __name__ == "__main__":
    main(__doc__, "long-world", Counting(), build)
