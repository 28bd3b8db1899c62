"""Answers scored in a second: simple ones (exact comparison), expressions (math-verify), with one worker and with more.

python scripts/bench/verifier.py [--answers 20000] [--workers 2] [--json]

Goal: 2,000 simple answers a second on one worker.
"""

import argparse
import json
import time

from mrl.reward.items import RewardItem, RewardSpec
from mrl.reward.pool import RewardPool

SIMPLE = [
    ("42", "42"),
    ("1/2", "0.5"),
    (r"\frac{3}{4}", r"\dfrac{6}{8}"),
    ("1,234", "1234"),
    ("(1,2)", "(1, 2)"),
    ("5", "6"),
    ("C", r"\text{C}"),
]
EXPRESSIONS = [(rf"{n}\sqrt{{3}}", rf"\sqrt{{{3 * n * n}}}") for n in range(2, 12)]
THINKING = "First we look at the numbers and then at what they say. " * 40  # a response is long, its answer short


def items(pairs: list[tuple[str, str]], count: int) -> list[RewardItem]:
    """`count` responses that box the pairs' answers in turn."""
    chosen = (pairs[i % len(pairs)] for i in range(count))
    return [
        RewardItem(i, "math", rf"{THINKING}The answer is \boxed{{{answer}}}.", truth)
        for i, (truth, answer) in enumerate(chosen)
    ]


def answers_per_s(batch: list[RewardItem], workers: int) -> float:
    """Best of three."""
    with RewardPool(RewardSpec("math"), num_workers=workers, timeout_s=30.0) as pool:
        pool.score(batch[: len(batch) // 10])
        seconds = []
        for _ in range(3):
            begin = time.perf_counter()
            pool.score(batch)
            seconds.append(time.perf_counter() - begin)
    return len(batch) / min(seconds)


def main() -> None:
    """Prints a table, or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--answers", type=int, default=20_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    simple, hard = items(SIMPLE, args.answers), items(EXPRESSIONS, max(args.answers // 100, 20))
    result = {
        "answers_per_s": answers_per_s(simple, 1),
        f"answers_per_s_{args.workers}_workers": answers_per_s(simple, args.workers),
        "expressions_per_s": answers_per_s(hard, 1),
        f"expressions_per_s_{args.workers}_workers": answers_per_s(hard, args.workers),
    }
    if args.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name:32} {value:10.0f}")


if __name__ == "__main__":
    main()
