"""Makes the tool world's sibling in which credit by turn pays: some turns are worth what is done in them, others are
lotteries.

    python scripts/make_turn_world.py --out turn-world --seed 0
    given="parallel_configs/tool-moe/cpu.yaml $(cat turn-world/options)"
    mrl train $given --run-dir runs/by-turn --set algorithm.adv_estimator=grpo_turn --set algorithm.gamma=0.01
    mrl train $given --run-dir runs/by-response --set algorithm.adv_estimator=grpo

In each of four turns the model is shown a word and picks a sign. Of half of the words one sign is worth 1; the others
bring a drawn number, whatever is picked, whose spread is eight times that. Each training row has two of each, so that
summed up over a response the draws always drown the rest. The model is warm-started by supervised training to pick at
random, and of words that are worth something a little more often the right sign. Held-out rows have such words alone,
and the part `right` is the share of right picks.
"""

import os
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from make_tiny_world import counts, data_row, main, make_model, write_data
from make_tool_world import CONTEXT, Answers, Calling, Row, fit, make_tokenizer, one_rank_options, write_model
from transformers import PreTrainedTokenizerFast

DATA_SOURCE = "tiny/turns"
SIGNS = {"sum": "+", "difference": "-", "product": "*", "remainder": "%"}
LOTTERIES = ("north", "east", "south", "west")
TURNS = 4
TRAIN, HELD_OUT = 256, 32  # rows
POSITIONS = 128
WORDS = ("system", "user", "assistant", "pick", '{"name": "', '", "arguments": {"sign": "', '"}}', *SIGNS, *LOTTERIES)
PROMPT = "<|im_start|>system\npick<|im_end|>\n<|im_start|>user\n{0}<|im_end|>\n<|im_start|>assistant\n"
CALL = '<tool_call>\n{{"name": "pick", "arguments": {{"sign": "{0}"}}}}\n</tool_call><|im_end|>'
ENVIRONMENT = f'''"""Words, of which some are worth the right sign, and others are lotteries."""

import random

from mrl.acting.environment import Environment, Reply

SIGNS = {SIGNS}
SPREAD = 8.0  # of a lottery


class Picks(Environment):
    """A sign for each word of the row."""

    actions = ("pick",)
    parts = {{"right": 0.0}}

    def reset(self, row, seed):
        self.left = row["extra_info"]["words"].split()
        self.worth = sum(word in SIGNS for word in self.left)
        self.right = 0

    def pick(self, sign: str) -> Reply:
        """Picks a sign for the word.

        Args:
            sign: one character
        """
        word = self.left.pop(0)
        reward = random.gauss(0.0, SPREAD)
        if word in SIGNS:
            reward = float(sign == SIGNS[word])
            self.right += reward
        parts = {{"right": self.right / max(1, self.worth)}}
        return Reply(self.left[0] if self.left else "done", reward, parts, end=not self.left)
'''


@dataclass(frozen=True)
class Picking(Calling):
    """Supervised training. `share`: of picks for words that are worth something that are the right ones."""

    steps: int = 500
    batch: int = 16
    label_smoothing: float = 0.0
    share: float = 0.15
    annealed: float = 0.5


class Picks(Answers):
    """Responses as token ids."""

    def picking(self, words: list[str], picker: random.Random, share: float) -> Row:
        """Parts of a row with a pick for each word: the right one with the probability `share`, else any."""
        parts = []
        for number, word in enumerate(words):
            sign = picker.choice([*SIGNS.values()])
            if word in SIGNS and picker.random() < share:
                sign = SIGNS[word]
            read = (CONTEXT if number else PROMPT).format(word)
            parts += [(self.ids(read), False), (self.ids(CALL.format(sign)), True)]
        return parts


def drawn(words: tuple[str, ...], picker: random.Random) -> list[str]:
    """The words of a response."""
    return [picker.choice(words) for _ in range(TURNS)]


def mixed(picker: random.Random) -> list[str]:
    """The words of a training row: half of them lotteries, in any order."""
    words = [picker.choice(kind) for kind in (tuple(SIGNS), LOTTERIES) for _ in range(TURNS // 2)]
    return picker.sample(words, TURNS)


def warm_up(model: Any, tokenizer: PreTrainedTokenizerFast, plan: Calling, seed: int) -> None:
    """Trains `model` in place."""
    picker = random.Random(seed)
    answers = Picks(tokenizer)
    every = (*SIGNS, *LOTTERIES)
    fit(
        model,
        lambda: [answers.picking(drawn(every, picker), picker, plan.share) for _ in range(plan.batch)],
        tokenizer.pad_token_id,
        plan,
    )


def data_rows(rows: list[list[str]], split: str) -> list[dict[str, Any]]:
    """Rows of the words."""
    return [
        data_row(DATA_SOURCE, words[0], "turns", "", index=number, split=split, words=" ".join(words))
        for number, words in enumerate(rows)
    ]


def options(out: Path) -> dict[str, Any]:
    """What a run of the preset of the tool world has instead of its own, with the world at `out`."""
    return one_rank_options(out) | {
        "algorithm.kl_loss_coef": 0.1,
        "algorithm.policy_loss.loss_mode": "gspo-token",
        "data.max_prompt_length": 16,
        "data.max_response_length": 112,
        "rollout.turns.environments": "[Picks]",
        "rollout.turns.path": f"{os.path.relpath(out)}/environment.py",
        "rollout.turns.max_turns": TURNS + 1,
        "trainer.total_training_steps": 80,
        "trainer.test_freq": 20,
        "trainer.save_freq": 40,
        "trainer.experiment_name": "turn-moe",
    }


def build(out: Path, seed: int, plan: Calling) -> dict[str, Any]:
    """Writes the whole world into the empty folder `out` and returns what the JSON line says of it."""
    tokenizer = make_tokenizer(WORDS, POSITIONS)
    model = make_model(seed, POSITIONS, hidden=64, layers=2, experts=4)
    warm_up(model, tokenizer, plan, seed)
    write_model(model, tokenizer, out / "model")
    picker = random.Random(seed)
    train = [mixed(picker) for _ in range(TRAIN)]
    held_out = [drawn(tuple(SIGNS), picker) for _ in range(HELD_OUT)]
    write_data(out, {"train": data_rows(train, "train"), "val": data_rows(held_out, "val")})
    (out / "environment.py").write_text(ENVIRONMENT)
    return counts(model, train, held_out)


if __name__ == "__main__":
    main(__doc__, "turn-world", Picking(), build, options)
