"""Experiments with a step: what is changed, one thing at a time, and how much of the break each removes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mrl.config.schema import RunConfig
from mrl.tools.explain.band import Break
from mrl.tools.explain.evidence import StepSamples, stands_out

_NEVER_CLIPS = 1e6  # a band that wide
_QUARTERS = 4
REMOVES = 0.5  # share of a break that an experiment must remove to be a verdict


@dataclass(frozen=True)
class Experiment:
    """One change. `order`: what a rank is told. If it removes the break, the verdict is `cause`, of `kind`.

    `cure`: what to do.
    """

    name: str
    order: Mapping[str, Any]
    cause: str
    cure: str
    kind: str = "recipe"


def experiments_of(config: RunConfig, samples: StepSamples) -> list[Experiment]:
    """Returns the experiments that a configuration and a step's samples allow."""
    loss = config.algorithm.policy_loss
    found = [
        _of_settings(
            "without clipping",
            {f"algorithm.policy_loss.clip_ratio_{side}": _NEVER_CLIPS for side in ("low", "high")},
            "the clip band holds the break",
            f"compare algorithm.policy_loss.clip_ratio_low and _high ({loss.clip_ratio_low:g}, "
            f"{loss.clip_ratio_high:g}) with what the loss and the response length need",
        ),
        Experiment(
            "half the learning rate",
            {"lr_times": 0.5},
            "updates are too large",
            f"lower actor.optim.lr ({config.actor.optim.lr:g})",
        ),
        Experiment(
            "a fresh optimizer",
            {"fresh_optimizer": True},
            "the optimizer's moments",
            "compare the steps since the last resume; a lower actor.optim.lr with warm-up builds moments anew",
        ),
    ]
    if config.algorithm.use_kl_loss:
        found.append(
            _of_settings(
                "without the KL term",
                {"algorithm.use_kl_loss": False},
                "the KL term",
                "look at algorithm.kl_loss_coef and at the reference (ref.path)",
            )
        )
    if config.algorithm.use_kl_in_reward:
        found.append(
            Experiment(
                "without the KL in the rewards",
                {"kl_coef_times": 0.0},
                "the KL in the rewards",
                "look at algorithm.kl_ctrl and at the reference (ref.path)",
            )
        )
    if config.actor.ppo_epochs > 1:
        found.append(
            _of_settings(
                "with one epoch",
                {"actor.ppo_epochs": 1},
                "the step's rows are trained on too often",
                f"lower actor.ppo_epochs ({config.actor.ppo_epochs})",
            )
        )
    if config.algorithm.rollout_correction.level is not None:
        found.append(
            _of_settings(
                "without the rollout correction",
                {"algorithm.rollout_correction.level": None},
                "the rollout correction",
                "look at algorithm.rollout_correction and rollout_corr/*",
            )
        )
    if config.actor.use_dynamic_bsz or config.actor.ppo_micro_batch_size_per_gpu > 1:
        one = dict.fromkeys(("ppo_micro_batch_size_per_gpu", "log_prob_micro_batch_size_per_gpu"), 1)
        found.append(
            replace(
                _of_settings(
                    "with one response in each micro-batch",
                    {f"actor.{name}": value for name, value in ({"use_dynamic_bsz": False} | one).items()},
                    "the cut of the batch into micro-batches changes the step, which it must not",
                    "compare actor.use_dynamic_bsz, use_remove_padding and micro-batches with what the ranks compute",
                ),
                kind="ranks",
            )
        )
    found += _of_rows(samples)
    return found


_DEGREES = {
    "tensor_model_parallel_size": {"sequence_parallel": False},
    "context_parallel_size": {},
    "expert_model_parallel_size": {"expert_tensor_parallel_size": None},
}


def other_ways(config: RunConfig) -> list[Experiment]:
    """Returns experiments for which ranks start anew: another number format, and other layouts, all degrees at 1 last.

    Their steps are those from the checkpoint on, so the weights before the last one are nearly the run's.
    """
    found = []
    if config.model.dtype == "bfloat16":
        found.append(
            _of_settings(
                "in float32",
                {"model.dtype": "float32"},
                "the ranks' numbers in bfloat16",
                "look at actor/grad_norm and the logits; model.dtype: float32, or routers and heads in float32",
            )
        )
    layout = config.actor.layout
    cut = [name for name in _DEGREES if getattr(layout, name) > 1]
    for names in [*([name] for name in cut), *([cut] if len(cut) > 1 else ())]:
        settings = dict.fromkeys(names, 1)
        for name in names:
            settings |= {key: value for key, value in _DEGREES[name].items() if getattr(layout, key) != value}
        words = ", ".join(f"{name} 1" for name in names)
        found.append(
            _of_settings(
                f"with {words}",
                {f"actor.layout.{name}": value for name, value in settings.items()},
                f"the layout: with {words} the step is another one",
                "look at links and devices of these groups (mrl doctor), and at logs/actor-rank-N.log",
            )
        )
    return [replace(each, kind="ranks") for each in found]


def guesses_of(config: RunConfig, replicas: int) -> list[Experiment]:
    """Returns what may have been wrong in a step that does not repeat: one of them may give what the run had."""
    algorithm = config.algorithm
    usual = config.rollout.temperature
    found = [
        Experiment(
            "with a band that clips nothing",
            {"loss": {"clip_ratio_low": _NEVER_CLIPS, "clip_ratio_high": _NEVER_CLIPS}},
            "the update clipped nothing: its clip band was too wide",
            "compare algorithm.policy_loss.clip_ratio_low and _high with those of the ranks",
        ),
        Experiment(
            "with a fresh optimizer",
            {"fresh_optimizer": True},
            "the optimizer's state was lost: its moments and its count",
            "resume from the checkpoint before, and look at what the resume loaded (logs/actor-rank-N.log)",
        ),
        Experiment(
            "with moments of zero",
            {"lost_moments": True},
            "the optimizer's state was lost: its moments were zero",
            "resume from the checkpoint before, and look at what the resume loaded (logs/actor-rank-N.log)",
        ),
    ]
    if algorithm.use_kl_loss:
        for words, coefficient in (("the other sign of the KL term", -1.0), ("no KL term", 0.0)):
            found.append(
                Experiment(
                    f"with {words}",
                    {"loss": {"kl_loss_coef": coefficient * algorithm.kl_loss_coef}},
                    f"the update had {words}",
                    "compare algorithm.kl_loss_coef and kl_loss_type with what the ranks compute",
                )
            )
    if algorithm.use_kl_in_reward:
        for words, times in (("the other sign of", -1.0), ("no", 0.0), ("half", 0.5), ("twice", 2.0)):
            found.append(
                Experiment(
                    f"with {words} the KL in the rewards" if times else "with no KL in the rewards",
                    {"kl_coef_times": times},
                    f"the rewards had {words} {'the ' if times else ''}KL",
                    "compare algorithm.kl_ctrl and kl_penalty with what the ranks compute",
                )
            )
    if config.actor.ppo_epochs > 1:
        found.append(
            _of_settings(
                "with one epoch",
                {"actor.ppo_epochs": 1},
                f"the update made one epoch, and not {config.actor.ppo_epochs}",
                "compare actor.ppo_epochs with what the ranks had",
            )
        )
    for replica in range(replicas if replicas > 1 else 0):
        found.append(
            Experiment(
                f"without the gradients of replica {replica}",
                {"lost_replica": replica},
                f"gradients of replica {replica} of {replicas} were lost",
                "look at logs/actor-rank-N.log of its ranks, and at its links (mrl doctor)",
            )
        )
    for factor in (0.1, 0.5, 2.0, 10.0):
        found.append(
            Experiment(
                f"with {factor:g} times the learning rate",
                {"lr_times": factor},
                f"the learning rate was {factor:g} times the schedule's",
                "compare actor.optim.lr with what the ranks had",
            )
        )
    for factor in (0.6, 0.8, 1.25, 1.67):
        found.append(
            Experiment(
                f"at temperature {factor * usual:g}",
                {"settings": {"rollout.temperature": factor * usual}},
                f"the ranks' forward pass had another temperature, such as {factor * usual:g}",
                "compare rollout.temperature with that of the ranks",
            )
        )
    return found


def likeness(differences: Sequence[tuple[str, Any, Any]], metrics: Mapping[str, float]) -> float:
    """Returns how much of what did not repeat is explained by a guess: 1 if its metrics are those of the run.

    `differences`: name, the run's value, the repeated one. Metrics count alike, and none for less than nothing.
    """
    shares = []
    for name, was, again in differences:
        if was is None or name not in metrics or not np.isfinite([was, again, metrics[name]]).all():
            continue
        shares.append(max(0.0, 1 - abs(metrics[name] - was) / abs(again - was)))
    return float(np.mean(shares)) if shares else 0.0


def _of_settings(name: str, settings: dict[str, Any], cause: str, cure: str) -> Experiment:
    return Experiment(name, {"settings": settings}, cause, cure)


def _of_rows(samples: StepSamples) -> list[Experiment]:
    """Returns experiments that leave rows out: those that stand out, and each quarter of the groups."""
    found = []
    for what, values, cure in (
        ("reward", samples.scores, "look at them with mrl samples RUN --step N --worst K, and at the reward function"),
        ("length", samples.lengths.astype(np.float64), "look at data.max_response_length and at why they do not end"),
        ("mismatch", samples.gaps, "look at the engines' logs: logs/engine-N.log"),
    ):
        rows = np.flatnonzero(stands_out(values))
        if 0 < len(rows) < len(values) / 4:
            ids = ", ".join(map(str, samples.sample_id[rows][:8]))
            found.append(
                Experiment(
                    f"without the {len(rows)} responses whose {what} is an outlier",
                    {"rows": rows.tolist()},
                    f"{len(rows)} responses whose {what} is an outlier (ids {ids})",
                    cure,
                    "data",
                )
            )
    groups = np.unique(samples.group_id)
    if len(groups) >= 2 * _QUARTERS:
        for number, part in enumerate(np.array_split(groups, _QUARTERS), 1):
            rows = np.flatnonzero(np.isin(samples.group_id, part))
            prompts = np.unique(samples.prompt_id[rows])
            found.append(
                Experiment(
                    f"without quarter {number} of the groups",
                    {"rows": rows.tolist()},
                    f"some of the groups of prompts {', '.join(map(str, prompts[:8]))}",
                    "read their responses (mrl samples RUN --prompt ID)",
                    "data",
                )
            )
    return found


def removed(broken: Break, value: float | None, logs: bool) -> float:
    """Returns the share of a break that is gone with another value: 1 inside the band, 0 where nothing changed."""
    if value is None:
        return 0.0
    end = broken.high if broken.value > broken.high else broken.low
    points = np.array([broken.value, value, end], np.float64)
    if logs:
        points = np.log(np.maximum(points, 1e-12))
    was, now, edge = points
    if not np.isfinite(was):
        return float(np.isfinite(now))
    if was == edge:
        return 0.0
    return float(np.clip((was - now) / (was - edge), -1.0, 1.0))


def effects(
    breaks: Sequence[Break], logs: Mapping[str, bool], metrics: Mapping[str, Mapping[str, float]]
) -> dict[str, float]:
    """Returns how much of the breaks each experiment removes, by its name: the mean over what a step's update tells."""
    shares = {}
    for name, found in metrics.items():
        of_breaks = [removed(each, found[each.name], logs[each.name]) for each in breaks if each.name in found]
        if of_breaks:
            shares[name] = float(np.mean(of_breaks))
    return shares
