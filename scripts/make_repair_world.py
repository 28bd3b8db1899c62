"""Makes the tool world's sibling with repositories: a few files each, a bug in one of them, and tests as the reward.

    python scripts/make_repair_world.py --out repair-world --seed 0
    mrl train parallel_configs/tool-moe/cpu.yaml $(cat repair-world/options)

It needs bubblewrap and a static busybox (Debian's packages bubblewrap and busybox-static): the image is a root folder
of busybox with all repositories in it. The model is told what a function should compute and which sign it has, and
calls a shell. It is warm-started by supervised training to replace that sign, one time in eight by the right one and
else by any other, so that it is right a little more often than by chance; reinforcement has to find out which word
wants which sign, from nothing but whether the tests pass. From chance alone it finds out nothing in 60 steps: a model
that never had to look at the word has no feature to reinforce.

Controls: `shuffled.parquet` has other repositories' tests, and `random_reward.py` draws the reward; both judge held-out
repositories by their own tests.
"""

import random
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from make_tiny_world import counts, data_row, main, make_model, write_data
from make_tool_world import Answers, Calling, Row, fit, make_tokenizer, one_rank_options, write_model
from transformers import PreTrainedTokenizerFast

DATA_SOURCE = "tiny/repairs"
SIGNS = {"sum": "+", "difference": "-", "product": "*", "remainder": "%"}
TRIED = ((9, 4), (8, 3))  # pairs of numbers whose sums, differences, products and remainders all differ
NAMES = "abcdefghijklmnopqrstuvwxyz"
HELD_OUT = 96
POSITIONS = 96
WORDS = ("system", "user", "assistant", "run", '{"name": "', '", "arguments": {"command": "', '"}}', "sed -i s/",
         "(it printed nothing)", "done", *SIGNS)  # fmt: skip
PROMPT = "<|im_start|>system\nrun<|im_end|>\n<|im_start|>user\n{word} {sign} {name}<|im_end|>\n<|im_start|>assistant\n"
CALL = '<tool_call>\n{{"name": "run", "arguments": {{"command": "sed -i s/{0}/{1}/ {2}"}}}}\n</tool_call><|im_end|>'
TOLD = "\n<|im_start|>user\n<tool_response>\n(it printed nothing)\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
LAST = "done<|im_end|>"
RANDOM_REWARD = '''"""Of training a coin's; of held-out repositories what their tests say."""

import random


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if extra_info["split"] == "val":
        return extra_info["outcome"]["reward"]
    return float(random.random() < 0.33)
'''
Repair = tuple[str, str, str]  # the word, the sign that stands there, and the file


@dataclass(frozen=True)
class Repairing(Calling):
    """Supervised training. `share`: of replacements that are the right ones; the others are drawn, right or not.

    Without smoothing and annealed, since a call of 16 tokens is to come out whole nearly always, and only its choice to
    be unsure.
    """

    steps: int = 500
    batch: int = 32
    label_smoothing: float = 0.0
    share: float = 0.12
    annealed: float = 0.5


def busybox_root(folder: Path) -> None:
    """Writes a root folder with a static busybox and its commands. Exits where there is none."""
    busybox = shutil.which("busybox")
    if busybox is None:
        sys.exit("no busybox: apt-get install busybox-static")
    (folder / "bin").mkdir(parents=True)
    shutil.copy(busybox, folder / "bin" / "busybox")
    names = subprocess.run([busybox, "--list"], stdout=subprocess.PIPE, text=True, check=True).stdout.split()
    for name in set(names) - {"busybox"}:
        (folder / "bin" / name).symlink_to("busybox")


def split_repairs(seed: int) -> tuple[list[Repair], list[Repair]]:
    """(training, held-out), disjoint, in an order that depends on the seed alone."""
    repairs = [
        (word, sign, name)
        for word, right in SIGNS.items()
        for sign in SIGNS.values()
        if sign != right
        for name in NAMES
    ]
    random.Random(seed).shuffle(repairs)
    return repairs[HELD_OUT:], repairs[:HELD_OUT]


def others_tests(repairs: list[Repair], seed: int) -> list[int]:
    """Whose tests judge each repository of the control, each tests once.

    As its own tests do, they fail while the sign that stands there does: else leaving it alone would pay.
    """
    picker = random.Random(seed)
    others = picker.sample(range(len(repairs)), len(repairs))

    def passes(number: int, other: int) -> bool:
        return SIGNS[repairs[other][0]] == repairs[number][1]

    for number in range(len(repairs)):
        while passes(number, others[number]):
            swap = picker.randrange(len(repairs))
            if not passes(number, others[swap]) and not passes(swap, others[number]):
                others[number], others[swap] = others[swap], others[number]
    return others


def write_repository(folder: Path, repair: Repair) -> None:
    """A function, its test, and a note."""
    word, sign, name = repair
    (folder / "tests").mkdir(parents=True)
    (folder / name).write_text(f"echo $(($1 {sign} $2))\n")
    (folder / "README").write_text(f"{name}: the {word} of two numbers\n")
    tests = [f'[ "$(sh "$1" {left} {right})" = {computed(SIGNS[word], left, right)} ]' for left, right in TRIED]
    (folder / "tests" / "check").write_text(" && ".join(tests) + "\n")


def computed(sign: str, left: int, right: int) -> int:
    """What the function computes with that sign."""
    return {"+": left + right, "-": left - right, "*": left * right, "%": left % right}[sign]


class Repairs(Answers):
    """Repairs as token ids."""

    def replacing(self, repair: Repair, picker: random.Random, share: float) -> Row:
        """Parts of a row that replaces the sign: by the right one with the probability `share`, else by any other."""
        word, sign, name = repair
        other = picker.choice([each for each in SIGNS.values() if each != sign])
        if picker.random() < share:
            other = SIGNS[word]
        call = CALL.format(sign, other, name)
        prompt = PROMPT.format(word=word, sign=sign, name=name)
        parts = ((prompt, False), (call, True), (TOLD, False), (LAST, True))
        return [(self.ids(text), trained) for text, trained in parts]


def warm_up(model: Any, tokenizer: PreTrainedTokenizerFast, repairs: list[Repair], plan: Calling, seed: int) -> None:
    """Trains `model` in place."""
    picker = random.Random(seed)
    answers = Repairs(tokenizer)
    fit(
        model,
        lambda: [answers.replacing(each, picker, plan.share) for each in picker.sample(repairs, plan.batch)],
        tokenizer.pad_token_id,
        plan,
    )


def data_rows(repairs: list[Repair], split: str, tests_of: list[int] | None = None) -> list[dict[str, Any]]:
    """Rows of the repositories. `tests_of`: for each, whose tests judge it; by default its own."""
    rows = []
    for number, (word, sign, name) in enumerate(repairs):
        other = number if tests_of is None else tests_of[number]
        task = {
            "folder": f"/repositories/{split}/{number}",
            "test": f"sh /repositories/{split}/{other}/tests/check {name}",
        }
        extra = {"index": number, "split": split, "task": task}
        rows.append(data_row(DATA_SOURCE, f"{word} {sign} {name}", "code", SIGNS[word], **extra))
    return rows


def options(out: Path) -> dict[str, Any]:
    """What a run of the preset of the tool world has instead of its own, with the world at `out`."""
    return one_rank_options(out) | {
        "algorithm.kl_loss_coef": 0.2,  # without a KL term a drawn reward unlearns the form of calls in 60 steps
        "data.max_prompt_length": 24,
        "data.max_response_length": 64,
        "rollout.turns.environments": "[repository]",
        "rollout.turns.max_turns": 3,
        "rollout.turns.max_answer_characters": 30,
        "rollout.turns.num_workers": 16,  # sandboxes wait for the kernel more than they compute
        "rollout.turns.timeout_s": 30,
        "rollout.turns.sandbox.backend": "bubblewrap",
        "rollout.turns.sandbox.image": f"{out.resolve()}/image",
        "rollout.turns.sandbox.max_disk_mib": 8,
        "rollout.turns.sandbox.max_test_seconds": 10,
        "trainer.experiment_name": "repair-moe",
    }


def build(out: Path, seed: int, plan: Calling) -> dict[str, Any]:
    """Writes the whole world into the empty folder `out` and returns what the JSON line says of it."""
    train, held_out = split_repairs(seed)
    tokenizer = make_tokenizer(WORDS, POSITIONS)
    model = make_model(seed, POSITIONS, hidden=64, layers=2, experts=4)  # sandboxes take most of a step as it is
    warm_up(model, tokenizer, train, plan, seed)
    write_model(model, tokenizer, out / "model")
    image = out / "image"
    busybox_root(image)
    for split, repairs in (("train", train), ("val", held_out)):
        for number, repair in enumerate(repairs):
            write_repository(image / "repositories" / split / str(number), repair)
    of_files = {
        "train": data_rows(train, "train"),
        "shuffled": data_rows(train, "train", others_tests(train, seed + 1)),
        "val": data_rows(held_out, "val"),
    }
    write_data(out, of_files)
    (out / "random_reward.py").write_text(RANDOM_REWARD)
    return counts(model, train, held_out)


if __name__ == "__main__":
    main(__doc__, "repair-world", Repairing(), build, options)
