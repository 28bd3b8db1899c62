"""Describes the outcome of a run, and what to do next. Judges numbers, independent of pages."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from mrl.errors import EnvironmentFault, Interrupted, NumericAbort
from mrl.tools.explain.band import breaks
from mrl.tools.explain.signs import signs
from mrl.tools.report.paired_tests import Difference, differences
from mrl.tools.report.run_record import RunRecord

Tone = Literal["good", "plain", "warn", "bad"]
CUT_OFF = 0.2
UNIFORM = 0.5
FLAT_ENTROPY = 0.1
TOLD = 5  # ranges of missing steps
JUDGED = 300  # newest steps that are searched for one that leaves the run's own band
_OF_OTHER_LINES = (
    "This page uses only the existing lines: restore metrics.jsonl from a copy, and find out what shortened it."
)
FIRST_SHARE = 10  # start and end of a curve: a tenth of it each, at least one point


@dataclass(frozen=True)
class Verdict:
    """One line, its tone, further sentences, and next steps."""

    tone: Tone
    headline: str
    sentences: tuple[str, ...]
    next_steps: tuple[str, ...]


@dataclass(frozen=True)
class _State:
    tone: Tone
    words: str
    next_step: str = ""


def verdict(run: RunRecord) -> Verdict:
    """Judges a run from its whole directory."""
    state = _state(run)
    learnt = validation_changes(run)
    next_steps = [step for step in (state.next_step, *_cures(run)) if step]
    if not next_steps:
        next_steps = [_when_all_is_well(run, bool(learnt), any(map(_rose, learnt.values())))]
    tone = _tone(state, list(learnt.values()), len(next_steps))
    return Verdict(tone, f"{state.words}. {_learnt_words(run, learnt)}", tuple(_facts(run, learnt)), tuple(next_steps))


def _rose(change: Difference) -> bool:
    return change.significant() and change.mean > 0


def _fell(change: Difference) -> bool:
    return change.significant() and change.mean < 0


def _tone(state: _State, changes: Sequence[Difference], things_to_do: int) -> Tone:
    """Chooses the tone: first by how the run ended, then by what fell or needs attention, then by what was learnt."""
    if state.tone != "plain":
        return state.tone
    if any(map(_fell, changes)) or things_to_do > 1:
        return "warn"
    if any(map(_rose, changes)):
        return "good"
    return "plain"


def validation_changes(run: RunRecord) -> dict[str, Difference]:
    """Returns changes from the first to the last validation by data source; nothing if there are not two."""
    steps = run.validation_steps
    if len(steps) > 1:
        return differences(run.responses(steps[0]), run.responses(steps[-1]))
    return {}


def _state(run: RunRecord) -> _State:
    done = f"{run.last_step} of {run.total_steps} steps" if run.total_steps else f"{run.last_step} steps"
    if run.running:
        return _State("plain", f"Running, {done}")
    if run.finished and run.missing_steps:
        lines = f"metrics.jsonl has no line of {_steps_words(run.missing_steps)}"
        return _State("bad", f"Ended with exit code 0, but {lines}", _OF_OTHER_LINES)
    if run.finished:
        return _State("plain", f"Finished, {done}")
    return _ended_state(run, done)


def _ended_state(run: RunRecord, done: str) -> _State:
    """Describes what ended an incomplete run, and how to continue. `done` describes its steps."""
    resume = f"mrl train CONFIG --resume --run-dir {run.path} goes on from {_newest(run)}"
    if not run.attempts:
        return _State("bad", f"Ended after {done}; why is not recorded", f"See logs/ in the run directory; {resume}.")
    last = run.attempts[-1]
    match last.exit_code:
        case None:
            return _State(
                "bad",
                f"Ended after {done} without saying why: it was killed",
                f"See logs/ in the run directory; {resume}.",
            )
        case Interrupted.exit_code:
            return _State("warn", f"Stopped after {done}, resumable: {last.message}", f"{resume}.")
        case NumericAbort.exit_code:
            return _State(
                "bad",
                f"A numerical failure ended it after {done}: {last.message}",
                f"Solve what the message names first; then {resume}.",
            )
        case EnvironmentFault.exit_code:
            return _State(
                "bad",
                f"The machine ended it after {done}: {last.message}",
                f"mrl doctor looks for causes; then {resume}.",
            )
        case code:
            return _State(
                "bad", f"Failed after {done}, exit code {code}: {last.message}", f"See Incidents below; {resume}."
            )


def _steps_words(steps: Sequence[int]) -> str:
    """Describes steps as `step 3`, or `steps 3, 5 to 9 and 11`."""
    ranges: list[list[int]] = []
    for step in steps:
        if ranges and step == ranges[-1][-1] + 1:
            ranges[-1] = [ranges[-1][0], step]
        else:
            ranges.append([step])
    words = [" to ".join(map(str, each)) for each in ranges]
    if len(words) > TOLD:
        words[TOLD - 1 :] = [f"{sum(step >= ranges[TOLD - 1][0] for step in steps)} others"]
    listed = " and ".join(part for part in (", ".join(words[:-1]), words[-1]) if part)
    return f"step{'s' if len(steps) > 1 else ''} {listed}"


def _newest(run: RunRecord) -> str:
    if run.checkpoints:
        return f"the checkpoint of step {run.checkpoints[-1]}"
    return "the start, as there is no checkpoint"


def _learnt_words(run: RunRecord, learnt: dict[str, Difference]) -> str:
    damaged = run.damaged_validations
    if not learnt and damaged:
        return f"Validation scores say nothing: validation/ is damaged at {_steps_words(list(damaged))}."
    if learnt:
        if any(map(_rose, learnt.values())):
            return "Validation scores rose by more than chance."
        if any(map(_fell, learnt.values())):
            return "Validation scores fell by more than chance."
        return "Validation scores have not moved by more than chance."
    change = _start_and_end(run, "critic/score/mean")
    if change is None:
        return "There is no validation, and there are too few steps to say what was learnt."
    return f"There is no validation to compare; the training score went from {change[0]:.3g} to {change[1]:.3g}."


def _facts(run: RunRecord, learnt: dict[str, Difference]) -> Iterator[str]:
    for source, change in learnt.items():
        steps = run.validation_steps
        yield f"{source}: validation, from step {steps[0]} to {steps[-1]}: {change.words()}."
    if learnt and (change := _start_and_end(run, "critic/score/mean")):
        part = max(1, len(run.curves["critic/score/mean"]) // FIRST_SHARE)
        over = f"{part} steps" if part > 1 else "step"
        yield f"Training score: {change[0]:.3g} over the first {over}, {change[1]:.3g} over the last."
    if (time := run.curves.get("timing_s/step")) is not None:
        steps = f"steps took {_duration(time.values.sum())}, a step {_duration(np.median(time.values))} (median)"
        yield f"{len(time)} {steps}." if len(time) > 1 else f"The step took {_duration(time.values[0])}."
        if run.running and run.total_steps:
            left = (run.total_steps - run.last_step) * float(np.median(time.values[-20:]))
            yield f"About {_duration(left)} of steps are left."
    if (spent := run.goodput) is not None and spent.useful:
        yield f"{str(spent).capitalize()}."


def _duration(seconds: float) -> str:
    """Describes seconds in the largest unit that gives at least two."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


def _start_and_end(run: RunRecord, name: str) -> tuple[float, float] | None:
    curve = run.curves.get(name)
    if curve is None or len(curve) < 2:
        return None
    part = max(1, len(curve) // FIRST_SHARE)
    return float(curve.values[:part].mean()), float(curve.values[-part:].mean())


def _cures(run: RunRecord) -> Iterator[str]:
    """Yields cures for missing lines and for numbers of the last steps, the most serious first."""
    if run.missing_steps and not run.finished:
        yield f"metrics.jsonl has no line of {_steps_words(run.missing_steps)}. {_OF_OTHER_LINES}"
    for step, lines in run.damaged_validations.items():
        yield (
            f"validation/step-{step}.jsonl has {lines} damaged lines (no responses with scores), which count nowhere: "
            "compare other steps, or restore the file."
        )
    verified = run.curves.get("reshard/verified")
    if run.settings.text("reshard.verify_every") == "1" and verified is not None and (verified.values < 1).any():
        yield (
            "A weight sync was not proved (reshard/verified below 1): see The weight sync's proof, and logs/ of the "
            "engines."
        )
    for advice in run.advice:
        yield f"Step {advice.step}: {advice.text}"
    newest = list(run.by_step.values())[-JUDGED:]
    if left := breaks(newest)[:1]:
        yield (
            f"Step {left[0].step}: {left[0].words} left the run's own band ({left[0].name} {left[0].value:.3g}; by "
            f"chance: {left[0].chance:.1g}): mrl explain {run.path} says why."
        )
    for sign in signs(newest):
        yield f"Early sign: {sign}."
    cut = _recent(run, "response_length/clip_ratio")
    longest = run.settings.text("data.max_response_length")
    if cut is not None and cut > CUT_OFF:
        yield (
            f"{cut:.0%} of the responses are cut off at data.max_response_length ({longest}): raise it, or "
            "find out why responses do not end."
        )
    uniform = _recent(run, "train/uniform_group_share")
    if uniform is not None and uniform > UNIFORM and run.compares_responses:
        yield (
            f"{uniform:.0%} of the groups have one score for all responses and teach nothing: take other prompts or "
            "a larger rollout.n."
        )
    entropy = _start_and_end(run, "actor/entropy")
    if entropy and entropy[1] < FLAT_ENTROPY * entropy[0]:
        yield (
            f"Entropy fell from {entropy[0]:.3g} to {entropy[1]:.3g} nats a token: little is left to explore. Lower "
            "actor.optim.lr."
        )
    failed = _recent(run, "reward/failure_share")
    if failed:
        yield f"{failed:.1%} of the rewards failed: logs/reward.log says why."
    saves = run.curves.get("training/failed_saves")
    if saves is not None and saves.last:
        yield f"{saves.last:.0f} checkpoints were not saved: make room on the disk."


def _recent(run: RunRecord, name: str) -> float | None:
    curve = run.curves.get(name)
    if curve is None:
        return None
    return float(curve.values[-max(1, len(curve) // FIRST_SHARE) :].mean())


def _when_all_is_well(run: RunRecord, held_out: bool, better: bool) -> str:
    if run.running:
        return "Nothing asks for attention."
    if not held_out:
        return "Give data.val_files and trainer.test_freq, so that the next run shows what it learnt."
    if better:
        return (
            f"mrl convert megatron-to-hf {run.path} -o OUT gives a Hugging Face checkpoint; mrl eval measures it on "
            "other data."
        )
    return (
        "More steps, a higher actor.optim.lr or more prompts: nothing is broken, but the validation score "
        "shows no learning."
    )
