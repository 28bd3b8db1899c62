"""Explains a step of a run: what broke, whether it repeats, and what removes it.

    1 the samples    versions, groups, scores: what they say by themselves
    2 a replay       the same step from the checkpoint before it. What does not repeat is a fault of the process:
                     of the passes, if log-probs differ; of updates, if they are equal and gradients differ
    3 the engines    where log-probs repeat, and generation's are far from them, generation computed something else
    4 experiments    where all that is as it should be, the step is computed with one thing changed at a time

Scores of stored responses are computed again, too: what the reward function does not give now was a fault of scoring.
Where no step leaves the band, the newest scores and steps are computed again all the same, as faults may be small.

The first verdict is the first of these that speaks; verdicts of experiments are ordered by what they remove. Where only
experiments speak of the first step that leaves the band, the next such step is explained, and the newest ones audited:
a step may leave it by chance, or by what a fault did before.
"""

import re
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from mrl.driver.replay_views import fitting
from mrl.errors import ConfigError, DataError, MrlError
from mrl.record.attempts import read_attempts
from mrl.record.sample_files import DAMAGED, StepFile, steps_with_responses
from mrl.tools.explain.asked_tools import ToolAsker, of_tools, tool_asker
from mrl.tools.explain.band import FALSE_ALARM, LEAST, MEASURED, WATCHED, Break, beyond, breaks, judged_step, usual
from mrl.tools.explain.by_transformers import (
    RANKS,
    against_transformers,
    differences,
    folder_of_weights,
    lacks_room,
    stored_rows,
    verdict,
    why_not,
)
from mrl.tools.explain.evidence import (
    EVERYWHERE,
    NOT_KEPT,
    StepSamples,
    of_cut_off,
    of_far_rows,
    of_groups,
    of_length,
    of_mismatch,
    of_replicas,
    of_versions,
)
from mrl.tools.explain.experiments import REMOVES, Experiment, effects, experiments_of, guesses_of, likeness, other_ways
from mrl.tools.explain.replay import MORE_STEPS, TIME_S, Replay, StoredRun, replay, replayed_faults
from mrl.tools.explain.rewards import Rescorer, of_rewards, of_sources, rescorer

_MISMATCH = re.compile("rollout_corr/|training/rollout_")  # of engines and ranks
LIKE = 0.9  # of what did not repeat, that a guess must give to be the verdict
_AUDITED_SCORES = 10_000  # responses that are scored again where no step leaves the band
_SURE = 1e-3  # chance of a break below which it is taken for a fault without knowing where
_BREAKS = 2  # steps that leave the band, which are explained
_OF_PROCESS = ("samples", "tools", "reward", "ranks", "update", "engines")  # kinds that experiments do not find
_LACKS, _VANISHED = 0.9, 0.05  # of a replica's gradient: of what a replay gives, and of the steps before
_NEAR_ZERO = 0.01  # of a fixed bound: what is usual below it is as good as 0, in logarithms too
_USUAL = 3  # steps below a fixed bound that say what is usual
_BEFORE = 5  # steps whose samples say what is usual
_LOGS = {each.name: each.logs for each in WATCHED}


@dataclass(frozen=True)
class LikelyCause:
    """One possible cause. `removes`: of the break, 0 to 1.

    `kind`: samples, tools, reward, ranks, update, engines, recipe, data, world (of tools) or unknown.
    """

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
    steps: int = LEAST + 1  # of the run; of up to LEAST none is judged by a band

    def to_json(self) -> dict[str, Any]:
        """Returns plain data."""
        return asdict(self) | {"false_alarm": FALSE_ALARM}


@dataclass(frozen=True)
class Limits:
    """What an explanation may take. `end`: by time.monotonic(); `repeats_calls`: whether calls of tools that may act on
    the world are made again.
    """

    end: float
    repeats_calls: bool = False

    @property
    def left(self) -> float:
        """Seconds that are left, 1 at least: a replay then says that it was not done."""
        return max(self.end - time.monotonic(), 1.0)

    def part(self, share: float) -> float:
        """Returns when a share of what is left is over."""
        return time.monotonic() + share * self.left


_TOOLS, _SCORES = 0.2, 0.4  # shares of the time that is left, from the start: the rest is for replays


def explain(path: Path, step: int | None = None, seconds: float = TIME_S, repeats_calls: bool = False) -> Explanation:
    """Explains a step, by default the first that leaves the run's own band. `seconds`: for all of it, but the time of
    calls that have begun. `repeats_calls`: whether calls of tools that may act on the world are made again.

    Raises ConfigError for a run or a step that cannot be explained, and EnvironmentFault where a replay fails and
    nothing else says what was wrong.
    """
    limits = Limits(time.monotonic() + seconds, repeats_calls)
    run = StoredRun.read(path)
    return replace(_found(run, step, limits), steps=run.steps[-1])


def _found(run: StoredRun, step: int | None, limits: Limits) -> Explanation:
    rows = [run.rows[number] for number in run.steps]
    bounded = run.config.trainer.schedule == "sync"  # ahead of training, weights of generation are older by design
    if step is not None:
        if step not in run.rows or step < 1:
            raise ConfigError(
                f"--step {step}: the run has no such step; it has steps {run.steps[0]} to {run.steps[-1]}"
            )
        found = [each for each in breaks(rows) if each.step == step] or judged_step(rows, step)
        found = found or (beyond([run.rows[step]]) if bounded else [])
        if not found:
            raise ConfigError(
                f"--step {step}: every metric is within the band that the steps before it give (or fewer than 8 steps "
                "are before it); without --step the first step that is not is explained"
            )
        return _explained(run, step, found, limits)
    found = breaks(rows) or (beyond(rows) if bounded else [])
    explained = []
    for number in sorted({each.step for each in found})[:_BREAKS]:
        explained.append(_explained(run, number, [each for each in found if each.step == number], limits))
        if any(each.kind in _OF_PROCESS for each in explained[-1].verdicts):
            return explained[-1]
    audited = _audited(run, limits)
    return explained[0] if explained and not audited.verdicts else audited


def _explained(run: StoredRun, step: int, found: Sequence[Break], limits: Limits) -> Explanation:
    """Explains a step that leaves its band.

    Facts come first: what samples and scores say by themselves, and what does not repeat. What may be a consequence
    comes after what engines computed.
    """
    folder = run.folder.samples
    notes: list[str] = []
    samples = None
    facts, hints, last = [], [], []
    try:
        samples = StepSamples.read(folder, step)
    except FileNotFoundError:
        if not replayed_faults(run.config):
            run.base(step)  # says which samples are missing, and the key that keeps them
    if samples is not None:
        facts = _of_samples(run, step, samples)
        ends = limits.part(_TOOLS), limits.part(_SCORES)
        with _opened(tool_asker(run, ends[0], limits.repeats_calls), notes) as asker:
            told = _of_tools(step, asker, notes)
            facts += [each for each in told if each.kind in _OF_PROCESS]
            last = [each for each in told if each.kind not in _OF_PROCESS]
        with _opened(rescorer(run, ends[1]), notes) as again:
            told = _of_scores(step, again, notes)
            facts += told
            hints = [] if told else [*_of_length(run, step, samples), *_of_sources(step, again, notes)]
            hints += last
    differs = any(_MISMATCH.match(each.name) for each in found)
    if faults := replayed_faults(run.config):
        facts += _of_replicas(run, step)
        told = _of_routes(run, step, limits.left) if differs else []
        told = told or _of_transformers(run, step, found, limits, notes)
        told = told or _of_engines(found, samples, "of which it is not known whether they repeat")
        verdicts = [*facts, *told, *hints] or _of_unknown(found, samples)
        notes.insert(0, f"not replayed: {'; '.join(faults)}")
        return Explanation(str(run.folder.path), step, list(found), verdicts, replayed="; ".join(notes))
    tried = experiments_of(run.config, samples)
    guesses = guesses_of(run.config, run.replicas)
    with tempfile.TemporaryDirectory(prefix="mrl-served-") as made:
        of_ranks = Path(made) / RANKS
        of_ranks.mkdir()
        is_compared = bool(_surely_of_engines(found)) and not why_not(run.config)
        try:
            full = lacks_room(run.config, Path(made), 2) if is_compared else ""
            again = replay(
                run, step, _orders(tried), _orders(guesses), limits.left, views=differs,
                served=of_ranks if is_compared and not full else None,
            )  # fmt: skip
        except MrlError as error:
            if not facts and not hints:
                raise
            notes.insert(0, f"not replayed: {str(error).splitlines()[0]}")
            return Explanation(str(run.folder.path), step, list(found), [*facts, *hints], replayed="; ".join(notes))
        told = []
        if differs and again.repeats:
            told = _of_routes(run, step, limits.left) if run.config.actor.router_replay == "R3" else []
            told = told or of_views(run, step, again.views, of_far_rows(samples))
            told = told or _of_transformers(run, step, found, limits, notes, Path(made), again, full)
            told = told or _of_engines(found, samples, "which repeat")
    said = _replayed(again, notes)
    if not again.repeats:
        verdicts = [*_of_process(run, again, guesses), *facts, *hints]
        return Explanation(str(run.folder.path), step, list(found), verdicts, False, said, seconds=again.seconds)
    verdicts = [*facts, *told]
    shares = effects(_to_usual(run, found), _LOGS, again.experiments)
    verdicts += hints
    verdicts += _of_experiments(tried, shares)
    if not verdicts or (told and told[0].kind == "ranks"):
        ways = other_ways(run.config)
        notes.clear()
        shares |= _other_ways(run, step, found, ways, limits, notes)
        rest = verdicts[len(facts) :]
        verdicts = [*facts, *_of_experiments(ways, shares), *rest] or _of_unknown(found, samples)
        said = "; ".join([said, *notes])
    return Explanation(str(run.folder.path), step, list(found), verdicts, True, said, shares, again.seconds)


def _to_usual(run: StoredRun, found: Sequence[Break]) -> list[Break]:
    """Returns breaks with what was usual in the steps before in place of a fixed bound, where several have it.

    A metric that falls just below a bound is no nearer to a healthy step's than one that stays just above it.
    """
    measured = []
    for each in found:
        before = [run.rows[step].get(each.name) for step in run.steps if 0 < step < each.step]
        healthy = [value for value in before if value is not None and value <= each.high]
        if each.chance == 0 and np.isfinite(each.value) and len(healthy) >= _USUAL:
            each = replace(each, high=max(float(np.median(healthy)), _NEAR_ZERO * each.high))
        measured.append(each)
    return measured


def _of_experiments(tried: Sequence[Experiment], shares: Mapping[str, float]) -> list[LikelyCause]:
    """Returns verdicts of experiments that remove enough of the break, those that remove most of it first; of those
    that remove about as much, those that were named first.
    """
    return [
        LikelyCause(
            each.kind,
            each.cause,
            f"computed {each.name}, {shares[each.name]:.0%} of the break is gone",
            each.cure,
            shares[each.name],
        )
        for each in sorted(tried, key=lambda each: -round(shares.get(each.name, 0.0), 1))
        if shares.get(each.name, 0.0) >= REMOVES
    ]


def _other_ways(
    run: StoredRun, step: int, found: Sequence[Break], ways: Sequence[Experiment], limits: Limits, notes: list[str]
) -> dict[str, float]:
    """Computes a step in other number formats and layouts. Returns the share of the break that each removes."""
    shares: dict[str, float] = {}
    for way in ways:
        try:
            again = replay(run, step, (), (), limits.left, settings=way.order["settings"])
        except MrlError as error:
            notes.append(f"{way.name} could not be computed: {str(error).splitlines()[0]}")
        else:
            shares |= effects(_to_usual(run, found), _LOGS, {way.name: again.metrics})
    return shares


def _replayed(again: Replay, notes: Sequence[str]) -> str:
    """Says what was computed again and what could not be. `notes` are of what else was looked at."""
    said = f"steps {again.first + 1} to {again.step} again, {again.compared} metrics compared"
    if again.weights is not None:
        said += f", weights and optimizer after it {'equal' if again.weights else 'NOT equal'} the checkpoint's"
    said = "; ".join([said, *(f"{name} could not be computed: {why}" for name, why in again.failed.items()), *notes])
    if failed := [view for view in again.views if "failed" in view]:
        kinds = ", ".join(sorted({view["kind"] for view in failed}))
        said += f"; {len(failed)} other ways of generation ({kinds}) could not be computed: {failed[0]['failed']}"
    if late := sum("late" in view for view in again.views):
        said += f"; for {late} other ways of generation there was no time (--minutes)"
    return said


def _orders(experiments: Sequence[Experiment]) -> list[dict[str, Any]]:
    return [dict(each.order) | {"name": each.name} for each in experiments]


def _audited(run: StoredRun, limits: Limits) -> Explanation:
    """Explains a run of which no step leaves its band: what its newest samples say, and whether scores and steps
    repeat.
    """
    folder = run.folder.samples
    notes: list[str] = []
    newest = []
    counted = 0
    for step in reversed([step for step in steps_with_responses(folder) if step in run.rows]):
        newest.insert(0, step)
        with suppress(*DAMAGED):  # reading them says so
            counted += len(StepFile(folder, step).scores)
        if counted > _AUDITED_SCORES:
            break
    scored = 0
    asked = tool_asker(run, limits.part(_TOOLS), limits.repeats_calls)
    with _opened(asked, notes) as asker, _opened(rescorer(run, limits.part(_SCORES)), notes) as again:
        for step in newest:
            try:
                verdicts = _of_samples(run, step, StepSamples.read(folder, step))
            except MrlError as error:
                notes.append(str(error).splitlines()[0])
                continue
            unsaid = len(notes)
            for told in _of_tools(step, asker, notes):
                if told.kind in _OF_PROCESS:
                    verdicts.append(told)
                else:
                    notes.append(f"step {step}: {told.cause}: {told.evidence}; tools of the world may")
            verdicts += _of_scores(step, again, notes) or _of_sources(step, again, notes, searched=True)
            if verdicts:
                return Explanation(str(run.folder.path), step, verdicts=verdicts, replayed="; ".join(notes))
            scored += again is not None and len(notes) == unsaid
    notes = list(dict.fromkeys(notes))  # what there was no time for is alike in all steps
    if scored:
        notes.insert(0, f"scores of {scored} steps repeat")
    if replayed_faults(run.config):
        return Explanation(str(run.folder.path), None, replayed="; ".join(notes))
    last = run.steps[-1]
    guesses = guesses_of(run.config, run.replicas)
    try:
        first, _ = run.base(last, MORE_STEPS - 1)
        if last - first > MORE_STEPS:
            raise ConfigError(
                f"no step is computed again: of the newest {MORE_STEPS} none has a checkpoint (trainer.save_freq)"
            )
        found = replay(run, last, guesses=_orders(guesses), seconds=limits.left, earlier=MORE_STEPS - 1)
    except MrlError as error:
        notes.append(str(error).splitlines()[0])
        return Explanation(str(run.folder.path), None, replayed="; ".join(notes))
    if not found.repeats:
        return Explanation(
            str(run.folder.path),
            found.step,
            verdicts=_of_process(run, found, guesses),
            repeats=False,
            replayed=_replayed(found, notes),
            seconds=found.seconds,
        )
    notes.insert(0, f"steps {found.first + 1} to {last} repeat in {found.compared} metrics")
    return Explanation(str(run.folder.path), None, repeats=True, replayed="; ".join(notes), seconds=found.seconds)


Again = TypeVar("Again", Rescorer, ToolAsker)


@contextmanager
def _opened(again: Again | str, notes: list[str]) -> Iterator[Again | None]:
    """Gives what computes something again; None where nothing can, and `notes` say why."""
    if isinstance(again, str):
        notes += filter(None, [again])
        yield None
        return
    with again:
        yield again


def _of_tools(step: int, asker: ToolAsker | None, notes: list[str]) -> list[LikelyCause]:
    """Says that tools did not answer what they answer now."""
    if asker is None:
        return []
    try:
        told = of_tools(step, asker)
    except MrlError as error:
        notes.append(str(error).splitlines()[0])
        return []
    cure = "read these turns (mrl samples RUN --turns), and look at logs/engine-N.tools.log and at the tools"
    return [LikelyCause("tools" if told.is_fault else "world", told.cause, told.evidence, cure)] if told else []


def _of_scores(step: int, again: Rescorer | None, notes: list[str]) -> list[LikelyCause]:
    """Says what is wrong with a step's scores where the reward function gives other ones now."""
    if again is None:
        return []
    try:
        told = of_rewards(again.step(step), again)
    except MrlError as error:
        notes.append(str(error).splitlines()[0])
        return []
    cure = "read these responses (mrl samples RUN --step N), and look at logs/ of the scorers and at the function"
    return [LikelyCause("reward", *told, cure)] if told else []


def _of_sources(step: int, again: Rescorer | None, notes: list[str], searched: bool = False) -> list[LikelyCause]:
    """Says that the scores of one source repeat, and are not what they were."""
    if again is None or len(again.sources) < 2:
        return []
    before = []
    try:
        for earlier in range(max(1, step - _BEFORE), step):
            with suppress(FileNotFoundError):
                before.append(again.step(earlier))
        told = of_sources(again.step(step), before, again, searched)
    except MrlError as error:
        notes.append(str(error).splitlines()[0])
        return []
    return (
        [LikelyCause("reward", *told, "look at that source's rows (data.train_files) and reward function")]
        if told
        else []
    )


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
    if told := of_cut_off(run.config, samples):
        found.append(
            LikelyCause(
                "samples",
                "responses are cut off before they end",
                told,
                "look at the engines' max_tokens and max_model_len, and at data.max_response_length",
            )
        )
    if run.config.rollout.n > 1 and (told := of_groups(samples)):
        found.append(
            LikelyCause(
                "samples", "groups with one response", told, "look at rollout.n, and at what filters or loses rows"
            )
        )
    return found


def _of_length(run: StoredRun, step: int, samples: StepSamples) -> list[LikelyCause]:
    """Says that the reward began to pay length."""
    before = []
    for earlier in range(max(1, step - _BEFORE), step):
        with suppress(FileNotFoundError, DataError):
            before.append(StepSamples.read(run.folder.samples, earlier))
    told = of_length(samples, before)
    cure = "read the best responses, and mend the reward function"
    return [LikelyCause("reward", "the reward pays length", told, cure)] if told else []


def _of_process(run: StoredRun, again: Replay, guesses: Sequence[Experiment]) -> list[LikelyCause]:
    """Says what kind of fault a step that does not repeat has: in the passes, in its learning rate, or in updates.

    `guesses`: those that the replay computed in its place.
    """
    if not again.differences:
        return [
            LikelyCause(
                "update",
                f"weights or optimizer states after step {again.step} are not what the step makes",
                "all metrics repeat, and the checkpoint's bytes do not",
                "look at the rank's log and memory (mrl doctor); resume from the checkpoint before",
            )
        ]
    step = again.step
    unlike = again.differences[step]
    likely = {each.name: likeness(unlike, again.experiments.get(each.name, {})) for each in guesses}
    names = {name for name, _, _ in unlike}
    telling = sorted(unlike, key=lambda each: each[0] not in ("actor/lr", "actor/skipped_updates"))
    shown = "; ".join(f"{name} was {was!r}, and is {now!r}" for name, was, now in telling[:4])
    resumed = [each.step for each in read_attempts(run.folder.path) if each.step == step - 1 and each.step > 0]
    after = " right after a resume" if resumed else ""
    evidence = f"step {step}{after} does not repeat in {len(unlike)} metrics: {shown}"
    nearest = max(guesses, key=lambda each: likely[each.name])
    lost = run.rows[step].get("actor/skipped_updates", 0.0)
    if lost and "actor/skipped_updates" in names:
        cause = f"gradients were not finite in {lost:.0f} updates, which were skipped; the same rows give finite ones"
        change = "look at logs/actor-rank-N.log of that step, and at that node's devices (mrl doctor)"
        kind = "update"
    elif "actor/kl_coef" in names:
        cause = "the weight of the KL in the rewards was not what the steps before give"
        change = "compare algorithm.kl_ctrl with what the run had, and look at what a resume loaded (checkpoints/)"
        kind = "update"
    elif "actor/lr" in names:
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
        if told := of_replicas(run.rows[step], run.rows[step] | {name: now for name, _, now in unlike}, _LACKS):
            cause, change = _lost(run, told[0])
            evidence += f". {told[1]}"
    if likely[nearest.name] >= LIKE and not names & {"actor/lr", "actor/kl_coef"} and not lost:
        cause, change = nearest.cause, nearest.cure
        evidence += f". Computed {nearest.name}, {likely[nearest.name]:.0%} of the difference is what the run had"
    return [LikelyCause(kind, cause, evidence, change)]


def _lost(run: StoredRun, replica: int) -> tuple[str, str]:
    """Says that a replica's gradients were lost, and what to look at."""
    told = next(each for each in guesses_of(run.config, run.replicas) if each.order.get("lost_replica") == replica)
    return told.cause, told.cure


def _of_replicas(run: StoredRun, step: int) -> list[LikelyCause]:
    """Says that a replica's gradients were lost, by metrics alone: it added nearly nothing, which is unusual."""
    before = [run.rows[number] for number in range(step - _BEFORE, step) if number in run.rows]
    usual = {
        name: float(np.median(norms))
        for name in run.rows[step]
        if (norms := [row[name] for row in before if isinstance(row.get(name), float)])
    }
    told = of_replicas(run.rows[step], usual, _VANISHED)
    if told is None:
        return []
    replica, evidence = told
    cause, change = _lost(run, replica)
    return [LikelyCause("update", cause, evidence, change)]


def _of_routes(run: StoredRun, step: int, seconds: float) -> list[LikelyCause]:
    """Says whether replayed routes hold the break of a run with router_replay R3: without them its log-probs agree.

    Both means are of all tokens of the step. The steps from the checkpoint on are trained without routes, too, so the
    weights are nearly those of the run: that can only make log-probs differ more.
    """
    was = run.rows[step].get("training/rollout_log_probs_abs_diff_mean")
    if not was:
        return []
    left = (1 - REMOVES) * was
    try:
        again = replay(run, step, seconds=seconds, views=True, floor=left, settings={"actor.router_replay": "disabled"})
    except MrlError:
        return []  # it has another fault, too
    now = again.views[0].get("gap", was)
    if now > left:
        return of_views(run, step, again.views)
    return [
        LikelyCause(
            "engines",
            "routes that were replayed are not those of their tokens",
            f"with the routers' own choices (from step {again.first + 1} on), the mean difference of log-probs falls "
            f"from {was:.2g} to {now:.2g} nats a token",
            "look at actor.router_replay and at logs/engine-N.log; disabled trains without engines' routes",
            1 - now / was,
        )
    ]


def of_views(run: StoredRun, step: int, views: Sequence[Mapping[str, Any]], whose: str = "") -> list[LikelyCause]:
    """Says what generation computed, where one of the views gives its log-probs; the best first. `whose`: words on the
    engine of the responses that differ.

    Nothing is said of schedules ahead of training, whose responses are of earlier versions by design.
    """
    if run.config.trainer.schedule != "sync":
        return []
    found = []
    for view in fitting(views)[:3]:
        own = views[0]["gap"]
        share = 1 - view["fits"] / own
        found.append(
            LikelyCause(
                "engines",
                _in_words(run, step, view) + whose,
                f"computed so, the mean difference falls from {own:.2g} to {view['fits']:.2g} nats a token "
                f"({share:.0%} less)",
                _CURES[view["kind"]],
                share,
            )
        )
    return found


_CURES = {
    "temperature": "compare rollout.temperature with what the engines' requests have",
    "version": "look at reshard/verified and reshard/weight_version of the steps before, and at logs/engine-N.log",
    "expert": "look at reshard/verified, and set reshard.verify_every: 1; restart that engine",
    "router": "compare the engines' router with model.override_transformer_config.moe_router_dtype",
    "rounded": "compare rollout.dtype and quantization with model.dtype",
    "rotation": "compare rope scaling of the engines' config.json with the trainer's",
    "softmax": "compare the scale of attention of engines and ranks",
}


def _in_words(run: StoredRun, step: int, view: Mapping[str, Any]) -> str:
    kind = view["kind"]
    if kind == "temperature":
        return (
            f"engines sampled at temperature {view['value']:.3g}, and ranks compute with "
            f"{run.config.rollout.temperature:g}"
        )
    if kind == "version":
        model = " (the model's own, before any step)" if view["value"] == 0 else ""
        return f"generation had the weights of version {view['value']}{model}, and not of {step - 1}"
    if kind == "expert":
        return (
            f"expert {view['expert']} of layer {view['layer']} was stale in generation: it had the weights of version "
            f"{view['value']}, and the rest those of {step - 1}"
        )
    if kind == "router":
        return "generation's router computed in bfloat16, and the ranks' does not"
    if kind == "rounded":
        return "generation's weights were rounded to bfloat16"
    if kind == "softmax":
        return f"generation's attention had {view['value']:.3g} times the ranks' softmax scale"
    name, given = view["stretch"]
    return f"generation turned positions by {name} with factor {given['factor']:g}, of which the ranks know nothing"


def _surely_of_engines(found: Sequence[Break]) -> list[Break]:
    """Returns the breaks of a mismatch of engines and ranks that is none of chance."""
    return [each for each in found if _MISMATCH.match(each.name) and each.chance < _SURE]


def _of_transformers(
    run: StoredRun,
    step: int,
    found: Sequence[Break],
    limits: Limits,
    notes: list[str],
    work: Path | None = None,
    again: Replay | None = None,
    full: str = "",
) -> list[LikelyCause]:
    """Says whose log-probs are those of transformers with the weights that were served, and where an engine begins to
    differ. `work`, `again`: where ranks of a replay wrote these weights; `full`: why they did not.
    """
    if not _surely_of_engines(found):
        return []
    if fault := why_not(run.config):
        notes.append(fault)
        return []
    with tempfile.TemporaryDirectory(prefix="mrl-served-") as made:
        try:
            rows = stored_rows(run.folder.samples, step, again.log_probs if again else {})
            served = folder_of_weights(run, step, work or Path(made), again.served if again else ()) if rows else None
            if served is None:
                notes.extend([f"{_NOT_COMPARED}: {full}"] if full else [])
                return []
            against = against_transformers(run.config, served, rows, limits.left)
            if (said := verdict(against)) is None:
                notes.append(f"engines and ranks are about as far from transformers: {differences(against)}")
                return []
            return [LikelyCause(*said)]
        except (MrlError, OSError) as error:
            lines = str(error).strip().splitlines() or ["no reason"]
            notes.append(f"{_NOT_COMPARED}: {lines[-1]}")
            return []


def _of_engines(found: Sequence[Break], samples: StepSamples | None, ranks: str) -> list[LikelyCause]:
    """Says what generation did otherwise, where its log-probs left the band and the samples say how. `ranks`: whether
    the ranks' repeat. That all tokens differ alike says nothing of a break that may be one of chance.
    """
    if samples is None or not any(_MISMATCH.match(each.name) for each in found):
        return []
    is_sure = bool(_surely_of_engines(found))
    return [
        LikelyCause(
            "engines",
            f"generation computed other probabilities than the ranks, {ranks}: {told}",
            _size(samples),
            _COMPARE,
        )
        for told in of_mismatch(samples)
        if is_sure or told not in (EVERYWHERE, NOT_KEPT)
    ]


def _of_unknown(found: Sequence[Break], samples: StepSamples | None) -> list[LikelyCause]:
    """Says of a mismatch that nothing explains that it is there: it may have left its band by chance."""
    if samples is None or not any(_MISMATCH.match(each.name) for each in found):
        return []
    cause = "generation and ranks computed different probabilities; where, the samples do not say"
    return [LikelyCause("unknown", cause, _size(samples), _COMPARE)]


_NOT_COMPARED = "engines were not compared with transformers'"
_COMPARE = "compare rollout.* with model.*: dtype, quantization, rope scaling, temperature; and logs/engine-N.log"


def _size(samples: StepSamples) -> str:
    known = samples.gaps[np.isfinite(samples.gaps)]
    return f"mean difference {known.mean():.2g} nats a token" if len(known) else "differences of tokens were not kept"


def lines(found: Explanation) -> list[str]:
    """Returns the explanation as text."""
    if found.step is None:
        left, runs = MEASURED
        said = f"{found.run}: no step leaves the run's own band (of {runs} healthy runs, {left} had one that did)"
        if found.steps <= LEAST:
            said = f"{found.run}: {found.steps} steps, and a band takes more than {LEAST}: no step can be judged by one"
        return [said, *filter(None, [found.replayed])]
    said = [f"{found.run}: step {found.step}"]
    for each in found.breaks:
        said.append(f"  {each.name} {each.value:.4g}, {usual(each.low, each.high, each.chance)}: {each.words}")
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
