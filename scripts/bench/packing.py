"""Padding and imbalance of batches with long, uneven responses, as the splitter of the actor cuts them.

    python scripts/bench/packing.py [--json]

Lengths follow a published DAPO log (mean 7,385 tokens, shortest 1,190, longest 20,480): log-normal, cut at both ends.
The layout has TP 4 with sequence parallelism and CP 2, so a sequence is a multiple of 4 tokens long and a pack of 16.
Cost is FLOPs of Qwen3-30B-A3B, attention's square included.
"""

import argparse
import json
import time

import numpy as np

from mrl.model import forward_flops_per_token, known_spec
from mrl.rank.batching import RowLengths, Splitter
from mrl.rank.packing import Shape

MODEL = "Qwen3-30B-A3B"
SHAPE = Shape(packed=True, context=2, tensor=4)
SHORTEST, MEAN, LONGEST = 1_190, 7_385, 20_480
CASES = ((1024, 16), (1024, 64), (512, 16))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = [_case(samples, dp) for samples, dp in CASES]
    if options.json:
        print(json.dumps({"rows": rows}))
        return
    print(f"{'samples':>8}{'dp':>5}{'padding':>10}{'imbalance':>12}{'tokens imbalance':>18}{'seconds':>9}")
    for row in rows:
        padding, cost, tokens = (
            f"{100 * row[key]:.4f} %" for key in ("padding_share", "dp_imbalance", "token_imbalance")
        )
        print(f"{row['samples']:>8}{row['dp']:>5}{padding:>10}{cost:>12}{tokens:>18}{row['seconds']:>9.3f}")


def lengths(samples: int, seed: int = 0) -> np.ndarray:
    """Tokens of each sample, int64; the cut log-normal is scaled until its mean is the published one."""
    normal = np.random.default_rng(seed).standard_normal(samples)
    low, high = 0.0, 20.0
    for _ in range(60):
        middle = (low + high) / 2
        found = np.clip(np.exp(middle + 0.6 * normal), SHORTEST, LONGEST)
        low, high = (middle, high) if found.mean() < MEAN else (low, middle)
    return found.astype(np.int64)


def _case(samples: int, dp: int) -> dict[str, float]:
    model = known_spec(MODEL)
    per_pair = forward_flops_per_token(model, 2.0) - forward_flops_per_token(model, 1.0)
    splitter = Splitter(
        SHAPE,
        dp,
        micro_batch_size=1,
        max_tokens=LONGEST,
        per_token=forward_flops_per_token(model, 1.0) - per_pair,
        per_pair=per_pair,
    )
    drawn = lengths(samples)
    tokens = RowLengths(drawn)
    start = time.perf_counter()
    shares = splitter.shares(tokens)
    seconds = time.perf_counter() - start
    loads = np.array([sum(drawn[micro.rows].sum() for micro in rank if not micro.is_filler) for rank in shares])
    return {
        "samples": samples, "dp": dp, "padding_share": splitter.padding_share(tokens, shares),
        "dp_imbalance": splitter.imbalance(tokens, shares), "token_imbalance": float(loads.max() / loads.mean() - 1),
        "seconds": seconds,
        "micro_batches": len(shares[0]), "mean_tokens": float(drawn.mean()),
    }  # fmt: skip


if __name__ == "__main__":
    main()
