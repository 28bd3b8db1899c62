"""Explains a step of a run: what broke, whether it repeats, and what removes it.

    1 the samples    versions, groups, scores: what they say by themselves
    2 a replay       the same step from the checkpoint before it. What does not repeat is a fault of the process:
                     of the passes, if log-probs differ; of updates, if they are equal and gradients differ
    3 the engines    where log-probs repeat, and generation's are far from them, generation computed something else
    4 experiments    where all that is as it should be, the step is computed with one thing changed at a time

The first verdict is the first of these that speaks; verdicts of experiments are ordered by what they remove.
"""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mrl.errors import ConfigError
from mrl.record.attempts import read_attempts
from mrl.tools.explain.band import FALSE_ALARM, WATCHED, Break, breaks, judged_step
from mrl.tools.explain.evidence import StepSamples, of_groups, of_length, of_mismatch, of_versions
from mrl.tools.explain.experiments import REMOVES, effects, experiments_of
from mrl.tools.explain.replay import Replay, StoredRun, replay, replayed_faults

_MISMATCH = re.compile("rollout_corr/|training/rollout_")  # of engines and ranks
_BEFORE = 5  # steps whose samples say what is usual
_LOGS = {each.name: each.logs for each in WATCHED}


@dataclass(frozen=True)
class LikelyCause:
    """One possible cause. `kind`: samples, ranks, update, engines, recipe or data. `removes`: of the break, 0 to 1."""

    kind: str
    cause: str
    evidence: str
    change: str
    removes: float | None = None


@dataclass(frozen=True)
class Explanation:
    """The answer of `mrl explain`. `step` is None where no step leaves the run's band."""

    run: str
    step: int | None
    breaks: list[Break] = field(default_factory=list)
    verdicts: list[LikelyCause] = field(default_factory=list)
    repeats: bool | None = None
    replayed: str = ""
    experiments: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Returns plain data."""
        return asdict(self) | {"false_alarm": FALSE_ALARM}


def explain(path: Path, step: int | None = None) -> Explanation:
    """Explains a step, by default the first that leaves the run's own band.

    Raises ConfigError for a run or a step that cannot be explained, and EnvironmentFault where a replay fails.
    """
    run = StoredRun.read(path)
    rows = [run.rows[number] for number in run.steps]
    if step is None:
        found = breaks(rows)
        if not found:
            return Explanation(str(path), None)
        step = found[0].step
    elif step not in run.rows or step < 1:
        raise ConfigError(f"--step {step}: the run has no such step; it has steps {run.steps[0]} to {run.steps[-1]}")
    found = [each for each in breaks(rows) if each.step == step] or judged_step(rows, step)
    if not found:
        raise ConfigError(
            f"--step {step}: every metric is within the band that the steps before it give (or fewer than 8 steps are "
            "before it); without --step the first step that is not is explained"
        )
    return _explained(run, step, found)


def _explained(run: StoredRun, step: int, found: Sequence[Break]) -> Explanation:
    verdicts = []
    samples = None
    folder = run.folder.samples
    try:
        samples = StepSamples.read(folder, step)
    except FileNotFoundError:
        if not replayed_faults(run.config):
            run.base(step)  # says which samples are missing, and the key that keeps them
    if samples is not None:
        verdicts += _of_samples(run, step, samples)
    if faults := replayed_faults(run.config):
        verdicts += _of_engines(found, samples)
        return Explanation(
            str(run.folder.path), step, list(found), verdicts, None, f"not replayed: {'; '.join(faults)}"
        )
    tried = experiments_of(run.config, samples)
    again = replay(run, step, [dict(each.order) | {"name": each.name} for each in tried])
    if not again.repeats:
        verdicts = [*_of_process(run, again), *verdicts]
    else:
        verdicts += _of_engines(found, samples)
    shares = effects(found, _LOGS, again.experiments)
    verdicts += [
        LikelyCause(
            "recipe" if "rows" not in each.order else "data",
            each.cause,
            f"computed {each.name}, {shares[each.name]:.0%} of the break is gone",
            each.cure,
            shares[each.name],
        )
        for each in sorted(tried, key=lambda each: -shares.get(each.name, 0.0))
        if shares.get(each.name, 0.0) >= REMOVES
    ]
    said = f"steps {again.first + 1} to {step} again, {again.compared} metrics compared"
    if again.weights is not None:
        said += f", weights and optimizer after it {'equal' if again.weights else 'NOT equal'} the checkpoint's"
    for name, why in again.failed.items():
        said += f"; {name} could not be computed: {why}"
    return Explanation(str(run.folder.path), step, list(found), verdicts, again.repeats, said, shares, again.seconds)


def _of_samples(run: StoredRun, step: int, samples: StepSamples) -> list[LikelyCause]:
    """Returns what the samples say by themselves."""
    found = []
    if told := of_versions(run.config, step, samples):
        found.append(
            LikelyCause(
                "samples",
                "engines generated with other weights than the step's",
                told,
                "look at reshard/verified and reshard/weight_version of the steps before, and at logs/ of the engines",
            )
        )
    if told := of_groups(samples):
        found.append(
            LikelyCause(
                "samples", "groups with one response", told, "look at rollout.n, and at what filters or loses rows"
            )
        )
    before = []
    for earlier in range(max(1, step - _BEFORE), step):
        try:
            before.append(StepSamples.read(run.folder.samples, earlier))
        except FileNotFoundError:
            continue
    if told := of_length(samples, before):
        found.append(
            LikelyCause(
                "samples", "the reward pays length", told, "read the best responses, and mend the reward function"
            )
        )
    return found


def _of_process(run: StoredRun, again: Replay) -> list[LikelyCause]:
    """Says what kind of fault a step that does not repeat has: in the passes, in its learning rate, or in updates."""
    if not again.differences:
        return [
            LikelyCause(
                "update",
                f"weights or optimizer states after step {again.step} are not what the step makes",
                "all metrics repeat, and the checkpoint's bytes do not",
                "look at the rank's log and memory (mrl doctor); resume from the checkpoint before",
            )
        ]
    step = min(again.differences)
    unlike = again.differences[step]
    names = {name for name, _, _ in unlike}
    shown = "; ".join(f"{name} was {was!r}, and is {now!r}" for name, was, now in unlike[:4])
    resumed = [each.step for each in read_attempts(run.folder.path) if each.step == step - 1 and each.step > 0]
    after = " right after a resume" if resumed else ""
    evidence = f"step {step}{after} does not repeat in {len(unlike)} metrics: {shown}"
    if "actor/lr" in names:
        cause, change = "the learning rate was not the schedule's", "compare actor.optim.lr with what the ranks had"
        kind = "update"
    elif any(_MISMATCH.match(name) or name == "actor/entropy" for name in names):
        cause = "the ranks' forward pass computed something else than it does now"
        change = "look at that node's devices and memory (mrl doctor), and at logs/actor-rank-N.log"
        kind = "ranks"
    else:
        cause = "log-probs repeat, and updates do not: gradients or the optimizer's state were wrong"
        change = "look at logs/actor-rank-N.log of that step, and resume from the checkpoint before it"
        kind = "update"
        if resumed:
            cause = "log-probs repeat, and updates do not: the resume lost a part of the optimizer's state"
    return [LikelyCause(kind, cause, evidence, change)]


def _of_engines(found: Sequence[Break], samples: StepSamples | None) -> list[LikelyCause]:
    """Says what generation did otherwise, where its log-probs left the band and the ranks' repeat."""
    if samples is None or not any(_MISMATCH.match(each.name) for each in found):
        return []
    return [
        LikelyCause(
            "engines",
            f"generation computed other probabilities than the ranks, which repeat: {told}",
            f"mean difference {samples.gaps[samples.gaps == samples.gaps].mean():.2g} nats a token",
            "compare rollout.* with model.*: dtype, quantization, rope scaling, temperature; and logs/engine-N.log",
        )
        for told in of_mismatch(samples)
    ]


def lines(found: Explanation) -> list[str]:
    """Returns the explanation as text."""
    if found.step is None:
        return [
            f"{found.run}: no step leaves the run's own band; in {FALSE_ALARM:.0%} of healthy runs one would by chance"
        ]
    said = [f"{found.run}: step {found.step}"]
    for each in found.breaks:
        said.append(
            f"  {each.name} {each.value:.4g}, usually {each.low:.4g} to {each.high:.4g}: {each.words} (by chance: "
            f"{each.chance:.2g})"
        )
    if found.repeats is not None:
        said.append(f"replay: {'equal bits' if found.repeats else 'NOT EQUAL'}: {found.replayed}")
    elif found.replayed:
        said.append(found.replayed)
    for number, each in enumerate(found.verdicts, 1):
        said += [f"{number}. {each.cause}", f"   {each.evidence}", f"   change: {each.change}"]
    if not found.verdicts:
        said.append(
            "nothing that was tried removes it: " + ", ".join(found.experiments or ["no experiment was possible"])
        )
    return said
