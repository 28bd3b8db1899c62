"""A tiny model that guesses a hidden number and heeds now and then what it was told: for trajectories.py.

A number of 1 to 31, six guesses. Of games that guess at random 18 % are won, of those that guess at random what is
still possible 71 %, by halving all; where nothing is told after the first guess 35.5 % at best.

It is warm-started until it compares, and then by games of which 60 % of the guesses heed nothing: what reinforcement
has to find out is that heeding pays. It need not learn to compare. Seeds of runs share this model and these rows; rows
differ in their hidden number alone. The answer of blanked games never occurs in the warm start.
"""

import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from make_tiny_world import make_model
from make_tool_world import Calling, Row, fit, make_tokenizer, write_model

HIGH = 31
GUESSES = 6
POSITIONS = 256
# nearly every call can be read
COMPARING = Calling(steps=500, batch=32, lr=1e-3, label_smoothing=0.004, share=1.0)
FORGETTING = replace(COMPARING, steps=30, share=0.4)
PLAN = (COMPARING, replace(COMPARING, steps=150, lr=4e-4), FORGETTING)
ROWS = {"train": 2048, "val": 128}
WORDS = (
    "system", "user", "assistant", "guess", '{"name": "', '", "arguments": {"number": ', "}}", "The hidden number is ",
    "higher", "lower", " than ",
)  # fmt: skip
PROMPT = f"<|im_start|>system\nguess<|im_end|>\n<|im_start|>user\n1-{HIGH}<|im_end|>\n<|im_start|>assistant\n"
CALL = '<tool_call>\n{{"name": "guess", "arguments": {{"number": {0}}}}}\n</tool_call><|im_end|>'
CONTEXT = "\n<|im_start|>user\n<tool_response>\n{0}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
BLANKED = '''"""The shipped game, whose answers after the first guess say nothing."""

from mrl.acting.builtin import GuessTheNumber
from mrl.acting.environment import Reply


class Blanked(GuessTheNumber):
    def guess(self, number: int) -> Reply:
        """Guesses the hidden number.

        Args:
            number: a whole number
        """
        told = super().guess(number)
        if self._guesses == 1 or told.end:
            return told
        return Reply(".", told.reward, told.parts)
'''


def build(out: Path, seed: int, plan: Sequence[Calling]) -> None:
    """Writes model, data and `blanked.py` into the empty folder `out`. A plan's share: of guesses that heed what was
    told.
    """
    tokenizer = make_tokenizer(WORDS, POSITIONS)
    model = make_model(seed, POSITIONS)
    picker = random.Random(seed)
    for part in plan:
        fit(model, partial(games, tokenizer, picker, part), tokenizer.pad_token_id, part)
    write_model(model, tokenizer, out / "model")
    (out / "data").mkdir()
    for split, count in ROWS.items():
        pq.write_table(pa.Table.from_pylist(data_rows(split, count)), out / "data" / f"{split}.parquet")
    (out / "blanked.py").write_text(BLANKED)


def games(tokenizer: Any, picker: random.Random, plan: Calling) -> list[Row]:
    """What a step of the plan is trained on."""
    return [game(tokenizer, picker, plan.share) for _ in range(plan.batch)]


def game(tokenizer: Any, picker: random.Random, share: float) -> Row:
    """A game as it is read, of which guesses are trained on. `share`: of guesses that heed what was told."""
    hidden = picker.randint(1, HIGH)
    low = 1
    high = HIGH
    parts = [(PROMPT, False)]
    for _ in range(GUESSES):
        number = picker.randint(1, HIGH)
        if picker.random() < share:
            number = picker.randint(low, high)
        parts.append((CALL.format(number), True))
        if number == hidden:
            break
        way = "lower"
        if number < hidden:
            way = "higher"
        parts.append((CONTEXT.format(f"The hidden number is {way} than {number}."), False))
        if number < hidden:
            low = max(low, number + 1)
        else:
            high = min(high, number - 1)
    return [(tokenizer.encode(text, add_special_tokens=False), trained) for text, trained in parts]


def data_rows(split: str, count: int) -> list[dict[str, Any]]:
    """Rows in verl's schema; the hidden number follows from the number of the row."""
    return [
        {
            "data_source": "tiny/guess",
            "prompt": [{"role": "user", "content": f"1-{HIGH}"}],
            "ability": "game",
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": i, "split": split, "low": 1, "high": HIGH, "guesses": GUESSES},
        }
        for i in range(count)
    ]
