"""A tiny model that guesses a hidden number, warm-started until it heeds in part what it was told: for trajectories.py.

A number of 1 to 15, four guesses. Of games that guess at random 24 % are won, of those that guess at random what is
still possible 60 %, by halving all; where nothing is told after the first guess 37 %, and 47 % at best.
"""

import random
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from make_tiny_world import make_model
from make_tool_world import Calling, Row, fit, make_tokenizer, write_model

HIGH = 15
GUESSES = 4
POSITIONS = 256
PLAN = Calling(steps=150, batch=64, label_smoothing=0.004, share=1.0)  # nearly every call can be read
ROWS = {"train": 2048, "val": 128}
WORDS = (
    "system", "user", "assistant", "guess", '{"name": "', '", "arguments": {"number": ', "}}", "The hidden number is ",
    "higher", "lower", " than ",
)  # fmt: skip
PROMPT = f"<|im_start|>system\nguess<|im_end|>\n<|im_start|>user\n1-{HIGH}<|im_end|>\n<|im_start|>assistant\n"
CALL = '<tool_call>\n{{"name": "guess", "arguments": {{"number": {0}}}}}\n</tool_call><|im_end|>'
CONTEXT = "\n<|im_start|>user\n<tool_response>\n{0}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
BLANKED = '''"""The shipped game, whose answers after the first guess say nothing."""

from mrl.environments.builtin_environments import GuessTheNumber
from mrl.environments.environment import Reply


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


def build(out: Path, seed: int, plan: Calling) -> None:
    """Writes model, data and `blanked.py` into the empty folder `out`. The plan's share: of games whose guesses heed
    what was told.
    """
    tokenizer = make_tokenizer(WORDS, POSITIONS)
    model = make_model(seed, POSITIONS)
    picker = random.Random(seed)

    def rows() -> list[Row]:
        return [game(tokenizer, picker, picker.random() < plan.share) for _ in range(plan.batch)]

    fit(model, rows, tokenizer.pad_token_id, plan)
    write_model(model, tokenizer, out / "model")
    (out / "data").mkdir()
    for split, count in ROWS.items():
        pq.write_table(pa.Table.from_pylist(data_rows(split, count)), out / "data" / f"{split}.parquet")
    (out / "blanked.py").write_text(BLANKED)


def game(tokenizer: Any, picker: random.Random, heeds: bool) -> Row:
    """A game as it is read, of which guesses are trained on."""
    hidden = picker.randint(1, HIGH)
    low = 1
    high = HIGH
    parts = [(PROMPT, False)]
    for _ in range(GUESSES):
        number = picker.randint(low, high)
        parts.append((CALL.format(number), True))
        if number == hidden:
            break
        way = "lower"
        if number < hidden:
            way = "higher"
        parts.append((CONTEXT.format(f"The hidden number is {way} than {number}."), False))
        if heeds and number < hidden:
            low = max(low, number + 1)
        elif heeds:
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
