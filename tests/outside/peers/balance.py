"""verl's balancing of sequences over ranks: the heaviest part of its Karmarkar-Karp partitions of drawn lengths."""

import numpy as np
from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions

PEERS = ("verl",)
BATCHES = 200


def cases() -> list[dict]:
    draw = np.random.default_rng(7)
    return [_case(draw, number) for number in range(BATCHES)]


def _case(draw: np.random.Generator, number: int) -> dict:
    parts = int(draw.choice([2, 4, 8, 16]))
    rows = parts * int(draw.integers(1, 17))
    if number % 2:
        lengths = np.minimum(draw.lognormal(6.5, 0.8, rows), 8192).astype(int) + 1
    else:
        lengths = draw.integers(1, 4096, rows)
    given = lengths.tolist()
    found = get_seqlen_balanced_partitions(given, parts, equal_size=True)
    return {"lengths": given, "parts": parts, "heaviest": max(sum(given[i] for i in part) for part in found)}
