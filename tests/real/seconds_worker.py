"""One rank: seconds of its core for log-probs and for one update of several batches. See test_rank_seconds.py."""

import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from padded import collate
from ranks import agree_on_port

from mrl.config.schema import RunConfig
from mrl.data.batch import TrainBatch
from mrl.data.samples import Sample
from mrl.rank.actor import MegatronActor

TRIES = 4  # of which the fastest counts: others load caches, or share the core's memory with another process


def main(rank: int, world_size: int, out: Path, plan: dict) -> None:
    torch.set_num_threads(1)
    cases = {name: RunConfig.model_validate(config) for name, config in plan.items()}
    first = next(iter(cases.values()))
    actor = MegatronActor(first, rank, world_size, "127.0.0.1", agree_on_port(out, rank, 0))
    found = {name: {"log_prob": [], "update": []} for name in cases}
    for _ in range(TRIES):
        for name, config in cases.items():
            actor.config = config
            batch = batch_of(config)
            began = time.process_time()
            actor.log_probs(batch)
            middle = time.process_time()
            actor.update(batch)
            found[name]["log_prob"].append(middle - began)
            found[name]["update"].append(time.process_time() - middle)
    best = {name: {phase: min(seconds) for phase, seconds in each.items()} for name, each in found.items()}
    (out / "seconds.json").write_text(json.dumps(best))


def batch_of(config: RunConfig) -> TrainBatch:
    """A step whose samples are all as long as their limits."""
    rng = np.random.default_rng(0)
    data = config.data
    samples = []
    for number in range(data.train_batch_size):
        prompt, response = (rng.integers(5, 60, n).tolist() for n in (data.max_prompt_length, data.max_response_length))
        samples.append(Sample(number, number, number, 0, prompt, response, (0.0,) * len(response), "stop", 0))
    batch = collate(samples, 1.0, 0)
    advantages = np.where(batch.response_mask, rng.normal(size=(len(samples), 1)), 0).astype(np.float32)
    old = np.where(batch.response_mask, -4.0, 0).astype(np.float32)
    return replace(batch, old_log_probs=old, advantages=advantages).packed()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), json.loads(Path(sys.argv[4]).read_text()))
