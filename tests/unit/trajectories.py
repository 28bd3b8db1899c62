"""Responses of several turns, the same with something else in the place of their context, and without it."""

from dataclasses import replace

import numpy as np

from mrl.data.samples import Sample, Turn

PROMPTS, N = 6, 4


def trajectories(seed: int = 0) -> list[Sample]:
    """Of one to four turns, some without context; log-probs at context are 0, as they are appended."""
    rng, found = np.random.default_rng(seed), []
    for i in range(PROMPTS * N):
        prompt = tuple(rng.integers(1, 120, rng.integers(1, 9)).tolist())
        sampled, turns = [], []
        for turn in range(int(rng.integers(1, 5)) if i % 4 else 1):
            if turn:
                sampled += [False] * int(rng.integers(1, 9))
            turns.append(Turn(len(sampled), "stop", int(rng.integers(0, 3)), float(rng.random())))
            sampled += [True] * int(rng.integers(1, 9))
        reason = ("stop", "length")[i % 5 == 0]
        turns[-1] = Turn(turns[-1].start, reason)
        ids = tuple(rng.integers(1, 120, len(sampled)).tolist())
        log_probs = np.where(sampled, -3 * rng.random(len(sampled)), 0.0)
        made = Sample(i // N, i // N, i, i, prompt, ids, log_probs, reason, 1, sampled=sampled, turns=tuple(turns))
        found.append(made)
    return found


def filled(samples: list[Sample], value: float | None) -> list[Sample]:
    """With `value` as the log-prob of context; None: random numbers."""
    rng = np.random.default_rng(5)
    found = []
    for sample in samples:
        noise = -9 * rng.random(len(sample.response_ids)) if value is None else value
        found.append(replace(sample, rollout_log_probs=np.where(sample.sampled, sample.rollout_log_probs, noise)))
    return found


def cut_out(samples: list[Sample]) -> list[Sample]:
    """What was sampled alone, as a response of one turn."""
    found = []
    for sample in samples:
        kept = np.array(sample.sampled)
        ids = tuple(np.array(sample.response_ids)[kept].tolist())
        log_probs = np.array(sample.rollout_log_probs)[kept]
        found.append(replace(sample, response_ids=ids, rollout_log_probs=log_probs, sampled=None, turns=()))
    return found


def with_one_let_in(samples: list[Sample]) -> list[Sample]:
    """A context token of one response counts as sampled."""
    number = next(i for i, sample in enumerate(samples) if not all(sample.sampled) and sample.stop_reason == "stop")
    sampled = list(samples[number].sampled)
    sampled[sampled.index(False)] = True
    return [replace(each, sampled=sampled) if i == number else each for i, each in enumerate(samples)]
