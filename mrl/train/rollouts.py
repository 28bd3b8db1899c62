"""Which responses a step trains on: those to one batch of prompts, or with dynamic sampling (DAPO) of as many as it takes to fill it.

A group whose responses all have the same value has advantage 0 and teaches nothing. With algorithm.filter_groups such groups are dropped
and further prompts generated, data.gen_batch_size at a time in the order of the data, until data.train_batch_size groups are left over;
what is more than that is dropped too. The place in the data moves past every prompt that was generated, so a resumed run repeats nothing
and misses nothing.
"""

import dataclasses
from dataclasses import dataclass

import numpy as np

from mrl.algo.advantages import soft_overlong_penalty
from mrl.config.schema import RunConfig
from mrl.data.batch import Sample
from mrl.data.order import DataCursor
from mrl.errors import DataError
from mrl.record.metrics import PhaseTimer
from mrl.reward.items import OK, RewardResult, failure_counts
from mrl.train import phases
from mrl.train.responding import collect_rewards
from mrl.train.run import Run

SCORE, REWARD = "score", "reward"


@dataclass(frozen=True)
class Group:
    """The responses to one prompt, with what they scored. `differs`: they do not all have the same value. A dropped one has no samples."""

    samples: tuple[Sample, ...]
    results: tuple[RewardResult, ...]
    differs: bool


@dataclass(frozen=True)
class Rollouts:
    """What a step trains on, ordered by (group_id, sample_id), and the place in the data after all that was generated for it."""

    samples: list[Sample]
    results: list[RewardResult]
    cursor: DataCursor
    metrics: dict[str, float]


def gather(run: Run, timer: PhaseTimer) -> Rollouts:
    """Generates and scores until the step's batch is full, or as far as algorithm.filter_groups allows.

    Raises DataError when too many rewards fail, or when the batches of prompts are used up and `on_exhausted` says to stop, or leaves
    nothing to train on.
    """
    wanted, limit = run.config.data.train_batch_size, _most_batches(run.config)
    groups: list[Group] = []
    cursor, batches = run.state.cursor, 0
    while sum(_taken(run.config, g) for g in groups) < wanted and batches < limit:
        with timer("gen"):
            prompts, cursor = phases.next_prompts(run, cursor)
            samples = phases.generate(run, prompts, batches)  # responses are scored in the background as they arrive
        with timer("reward"):
            results = collect_rewards(run, samples)
        groups = without_dropped_tokens(run.config, [*groups, *as_groups(run.config, samples, results)])
        batches += 1
        run.record.progress(f"groups for the step, batch {batches}", min(sum(_taken(run.config, g) for g in groups), wanted), wanted)
    chosen = choose(run.config, groups, f"step {run.state.step + 1}: after {batches} batches of prompts")
    return Rollouts(*renumbered(chosen), cursor, _metrics(groups, chosen, batches))


def without_dropped_tokens(config: RunConfig, groups: list[Group]) -> list[Group]:
    """The groups, without the samples of those that nothing can bring back: tokens of many batches would fill the driver's memory.

    Results stay, for the metrics. `on_exhausted: unfiltered` may bring back as many of the first as a batch holds.
    """
    filtering, left = config.algorithm.filter_groups, []
    spare = config.data.train_batch_size if filtering.on_exhausted == "unfiltered" else 0
    for group in groups:
        dropped = not _taken(config, group)
        left.append(dataclasses.replace(group, samples=()) if dropped and not spare else group)
        spare -= dropped and spare > 0
    return left


def _most_batches(config: RunConfig) -> float:
    groups = config.algorithm.filter_groups
    if not groups.enable:
        return 1
    return groups.max_num_gen_batches or float("inf")


def _taken(config: RunConfig, group: Group) -> bool:
    return group.differs or not config.algorithm.filter_groups.enable


def as_groups(config: RunConfig, samples: list[Sample], results: list[RewardResult]) -> list[Group]:
    """The responses to one batch of prompts by group, in order."""
    groups = config.algorithm.filter_groups
    values = metric_values(groups.metric if groups.enable else SCORE, results, rewards_of(config, samples, results))
    ids = np.array([s.group_id for s in samples])
    found = []
    for group in np.unique(ids):
        rows = np.flatnonzero(ids == group)
        picked = values[rows]
        found.append(Group(tuple(samples[i] for i in rows), tuple(results[i] for i in rows), bool(picked.min() < picked.max())))
    return found


def rewards_of(config: RunConfig, samples: list[Sample], results: list[RewardResult]) -> np.ndarray:
    """float64 [batch]: scores after the soft overlong penalty, where it is on."""
    scores, buffer = np.array([r.score for r in results], dtype=np.float64), config.algorithm.overlong_buffer
    if not buffer.enable:
        return scores
    lengths = np.array([len(s.response_ids) for s in samples])
    return scores + soft_overlong_penalty(lengths, config.data.max_response_length, buffer.len, buffer.penalty_factor)


def metric_values(metric: str, results: list[RewardResult], rewards: np.ndarray) -> np.ndarray:
    """float64 [batch]: `score`, `reward` (after penalties), or the reward's part of that name; of a failed reward always its score.

    Raises DataError when the reward function gives no such part, or no number under that name.
    """
    if metric == REWARD:
        return rewards
    return np.array([r.score if metric == SCORE or r.reason != OK else _part(r, metric) for r in results], dtype=np.float64)


def _part(result: RewardResult, name: str) -> float:
    value = result.parts.get(name)
    if isinstance(value, bool | int | float):
        return float(value)
    known = ", ".join([SCORE, REWARD, *sorted(result.parts)])
    raise DataError(
        f"the reward of sample {result.sample_id} has no number under {name!r} (algorithm.filter_groups.metric, gdpo_reward_keys); "
        f"allowed: {known}"
    )


def part_values(names: tuple[str, ...], results: list[RewardResult], rewards: np.ndarray) -> dict[str, np.ndarray]:
    """The reward's parts by name, float64 [batch] each; `rewards` [batch] are those after penalties, the part `reward`."""
    return {name: metric_values(name, results, rewards) for name in names}


def choose(config: RunConfig, groups: list[Group], when: str) -> list[Group]:
    """The first data.train_batch_size groups that are to be trained on; what on_exhausted says where there are fewer. Raises DataError."""
    wanted, filtering = config.data.train_batch_size, config.algorithm.filter_groups
    taken = [g for g in groups if _taken(config, g)]
    if len(taken) >= wanted or not filtering.enable:
        return taken[:wanted]
    if filtering.on_exhausted == "unfiltered":
        return (taken + [g for g in groups if not g.differs])[:wanted]
    if filtering.on_exhausted == "partial" and taken:
        return taken
    raise DataError(
        f"{when}, {len(taken)} of the {wanted} groups of a step have responses that differ in {filtering.metric} "
        f"({len(groups)} generated): the prompts are too easy or too hard for the model as it is. Raise "
        "algorithm.filter_groups.max_num_gen_batches or rollout.n, give other prompts, or set on_exhausted to "
        + ("unfiltered" if filtering.on_exhausted == "partial" else "partial or unfiltered")
    )


def renumbered(groups: list[Group]) -> tuple[list[Sample], list[RewardResult]]:
    """Samples and results with group and sample ids counted from 0, as every later part expects them within a step."""
    pairs = [(number, s, r) for number, g in enumerate(groups) for s, r in zip(g.samples, g.results, strict=True)]
    samples = [dataclasses.replace(s, group_id=number, sample_id=i) for i, (number, s, _) in enumerate(pairs)]
    return samples, [dataclasses.replace(r, sample_id=i) for i, (_, _, r) in enumerate(pairs)]


def _metrics(groups: list[Group], chosen: list[Group], batches: int) -> dict[str, float]:
    results = [r for g in groups for r in g.results]
    failed = sum(failure_counts(results).values())
    return {
        "train/num_gen_batches": float(batches),
        "train/uniform_group_share": 1.0 - sum(g.differs for g in groups) / len(groups),
        "train/trained_groups": float(len(chosen)),
        "reward/failed": float(failed),
        "reward/failure_share": failed / len(results),
    }
