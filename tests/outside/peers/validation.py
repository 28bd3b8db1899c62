"""verl's table of validation scores, over drawn prompts, responses and answers."""

import numpy as np
from verl.trainer.ppo.metric_utils import process_validation_metrics

PEERS = ("verl", "numpy")
TABLES = 12


def cases() -> list[dict]:
    draw = np.random.default_rng(6)
    return [_case(draw, number) for number in range(TABLES)]


def _case(draw: np.random.Generator, number: int) -> dict:
    n = (1, 2, 3, 4, 5, 8)[number % 6]
    sources, uids = [], []
    infos: dict[str, list] = {"reward": []}
    if number % 2:
        infos["acc"] = []
    if number % 3:
        infos["pred"] = []
    for source in ("math/one", "two")[: 1 + number % 2]:
        for prompt in range(int(draw.integers(1, 4))):
            for _ in range(n):
                sources.append(source)
                uids.append(f"{source}-{prompt}")
                answer = str(draw.integers(0, 3))
                for name, values in infos.items():
                    values.append(answer if name == "pred" else float(draw.choice([0.0, 1.0, 0.25])))
    return {"sources": sources, "uids": uids, "infos": infos, "gave": process_validation_metrics(sources, uids, infos)}
