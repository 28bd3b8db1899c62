"""Scores stored responses again, and says what the run's scores follow where they are others.

The reward function is the run's own, called in processes of its own as the trainer calls it, twice for each response.
Sources of which it does not answer all alike are left out, as are responses that it failed on. Scores of the network's
judges are not asked for again.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from mrl.data.batch import Prompt
from mrl.data.dataset import load_tokenizer
from mrl.data.quick_tokenizer import quick_decoder
from mrl.errors import DataError, MrlError
from mrl.model.hub import local_folder
from mrl.record.sample_files import read_samples, readable
from mrl.reward.items import OK, RewardItem
from mrl.reward.pool import RewardPool
from mrl.tools.explain.replay import StoredRun, data_of

_SAME = 1e-6
_FOLLOWS = 0.8  # share of the variance of scores, and correlation, at which they are said to follow something
_ALIKE = 0.9  # share of responses that another truth must explain
_SEVERAL = 8  # responses that got other scores, and as many that did not, of which a difference may follow a form
_WORKERS = 2
_KEPT = 8  # scored steps: a step, and those before it that say what is usual


@dataclass(frozen=True)
class ScoredResponses:
    """A step's responses. `scores` are the run's and `again` those of now, NaN where they are not compared; [rows]."""

    scores: np.ndarray
    again: np.ndarray
    lengths: np.ndarray
    sources: np.ndarray
    responses: list[list[int]]
    prompts: list[Prompt]
    texts: list[str]

    @cached_property
    def unlike(self) -> np.ndarray:
        """Tells which scores are others now, bool [rows]."""
        return np.abs(self.again - self.scores) > _SAME


class Rescorer:
    """Reads a run's prompts and reward function once, and scores steps again. Use it as a context manager."""

    def __init__(self, run: StoredRun, end: float = math.inf):
        """`end`: when nothing is scored any more, by time.monotonic()."""
        config = run.config
        self._end = end
        self._run = run
        self._data = data_of(config)
        folder = local_folder(config.model.path)
        self._tokenizer = quick_decoder(Path(folder)) or load_tokenizer(folder)
        self._by_id = {prompt.prompt_id: prompt for prompt in self._data.stream.prompts}
        of_sources: dict[str, list[Prompt]] = {}
        for prompt in self._by_id.values():
            of_sources.setdefault(prompt.data_source, []).append(prompt)
        self._of_sources = of_sources
        self._scored: dict[int, ScoredResponses] = {}
        self._pool: RewardPool | None = None

    def __enter__(self) -> "Rescorer":
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.close()

    @property
    def sources(self) -> list[str]:
        """The sources of the run's prompts."""
        return list(self._of_sources)

    def step(self, step: int) -> ScoredResponses:
        """Scores a step's responses. Raises FileNotFoundError without its samples, and DataError where they are damaged
        or their prompts are not among the run's data any more.
        """
        if step not in self._scored:
            self._scored[step] = self._step(step)
            self._scored = dict(list(self._scored.items())[-_KEPT:])
        return self._scored[step]

    def _step(self, step: int) -> ScoredResponses:
        folder = self._run.folder.samples
        with readable(folder, step):
            rows = read_samples(folder, step)
        if lost := {row["prompt_id"] for row in rows} - self._by_id.keys():
            raise DataError(
                f"{folder}: prompt {min(lost)} of step {step} is not in data.train_files any more ({len(lost)} of "
                "them), so the step's responses are not scored again"
            )
        prompts = [self._by_id[row["prompt_id"]] for row in rows]
        responses = [list(row["response_ids"]) for row in rows]
        texts = [self._tokenizer.decode(ids, skip_special_tokens=True) for ids in responses]
        sources = np.array([prompt.data_source for prompt in prompts])
        judged = np.array([row["reward"].get("reason", OK) == OK for row in rows])
        twice = self._scores(2 * prompts, 2 * texts, 2 * [prompt.ground_truth for prompt in prompts])
        first, second = np.split(twice, 2)
        unlike = (np.abs(first - second) > _SAME) | (np.isfinite(first) != np.isfinite(second))
        repeats = ~np.isin(sources, sources[unlike])  # what is drawn may be alike by chance in single responses
        return ScoredResponses(
            scores=np.array([float(row["reward"]["score"]) for row in rows]),
            again=np.where(judged & repeats, first, np.nan),
            lengths=np.array([len(ids) for ids in responses]),
            sources=sources,
            responses=responses,
            prompts=prompts,
            texts=texts,
        )

    def _scores(self, prompts: Sequence[Prompt], texts: Sequence[str], truths: Sequence[Any]) -> np.ndarray:
        """Returns scores, float64 [rows]; NaN where the function failed."""
        self._check_time()
        if self._pool is None:
            self._pool = RewardPool(self._data.reward, _WORKERS, self._run.config.reward.timeout_s)
        for number, (prompt, text, truth) in enumerate(zip(prompts, texts, truths, strict=True)):
            self._pool.submit(RewardItem(number, prompt.data_source, text, truth, prompt.extra_info))
        try:
            results = self._pool.drain(self._check_time)
        except DataError:
            self._pool.close()  # with what waits
            self._pool = None
            raise
        return np.array([each.score if each.reason == OK else np.nan for each in results])

    def _check_time(self) -> None:
        if time.monotonic() > self._end:
            raise DataError("not all responses could be scored again in their share of the time (--minutes)")

    def shifted(self, step: ScoredResponses, source: str) -> dict[str, np.ndarray]:
        """Returns scores of a source's responses by the truths of other rows, by words for these: neighbours in the
        data, of the source or of all, and prompts that came before in the step.
        """
        rows = np.flatnonzero(step.sources == source)
        prompts = [step.prompts[row] for row in rows]
        texts = [step.texts[row] for row in rows]
        orders = {
            "": self._of_sources[source],
            " in the data": list(self._by_id.values()),
            " in the step": list({prompt.prompt_id: prompt for prompt in prompts}.values()),
            " of the step": list({prompt.prompt_id: prompt for prompt in step.prompts}.values()),
        }
        found = {}
        for words, order in orders.items():
            place = {prompt.prompt_id: number for number, prompt in enumerate(order)}
            for far, way in ((-1, "before"), (1, "after")):
                truths = [order[(place[prompt.prompt_id] + far) % len(order)].ground_truth for prompt in prompts]
                found[f"{way}{words}"] = self._scores(prompts, texts, truths)
        return found


def rescorer(run: StoredRun, end: float = math.inf) -> "Rescorer | str":
    """Returns what scores a run's steps again until `end` of time.monotonic(), or why nothing can."""
    config = run.config
    if config.reward.network:
        return "reward.network: judges in the network are not asked again"
    if config.rollout.turns is not None or config.rollout.agent is not None:
        return "rollout.turns: rewards of several turns are not computed again"
    try:
        return Rescorer(run, end)
    except MrlError as error:
        return f"scores are not computed again: {str(error).splitlines()[0]}"


def of_rewards(step: ScoredResponses, again: Rescorer | None = None) -> tuple[str, str] | None:
    """Returns a cause and its evidence where scores are not what the reward function gives now; None if they are."""
    rows = np.flatnonzero(step.unlike)
    if not len(rows):
        return None
    sources = np.unique(step.sources[rows])
    where = ""
    whole = np.isfinite(step.again)
    if len(sources) == 1 and len(np.unique(step.sources)) > 1:
        where = f" of source {sources[0]}"
        whole &= step.sources == sources[0]
    evidence = (
        f"{len(rows)} of {len(step.scores)} responses{where} got other scores than the reward function gives now (mean "
        f"{step.scores[rows].mean():.3g}, now {step.again[rows].mean():.3g})"
    )
    own, now = step.scores[whole], step.again[whole]
    if line := _line(own, now):
        times, plus = line
        way = "had the other sign" if times < 0 else "were scaled"
        beside = f", and {plus:.3g}" if abs(plus) > _SAME else ""
        return f"scores{where} {way}", f"{evidence}: {times:.3g} times what it gives{beside}"
    off = own - now  # follows what is paid beside the function's own score
    several = _SEVERAL <= len(rows) <= len(off) - _SEVERAL or len(np.unique(off)) > 2
    for scores in (own, off) if several else ():
        length = _correlation(scores, step.lengths[whole])
        if abs(length) > _FOLLOWS > abs(_correlation(now, step.lengths[whole])):
            return f"the reward{where} paid length", f"{evidence}; they follow the length, correlation {length:.2f}"
        for name, values in _forms(step):
            share = _explained(scores, values[whole])
            if share > _FOLLOWS > _explained(now, values[whole]):
                words = f"{evidence}; {name} explains {share:.0%} of their variance, whatever the response says"
                return f"the reward{where} paid a form of the response: {name}", words
    if again is not None and len(sources) == 1:
        of_source = step.scores[step.sources == sources[0]]
        # any wrong truth pays little: only answers that were paid tell one from another
        paid = of_source > of_source.min() + _SAME
        for way, scores in again.shifted(step, str(sources[0])).items():
            if paid.any() and (np.abs(scores - of_source) <= _SAME)[paid].mean() >= _ALIKE:
                return f"responses{where} were judged by the truth of the row {way}", evidence
    if (step.scores[rows] <= step.scores.min() + _SAME).mean() > _ALIKE:
        return f"right answers{where} were not paid: they were judged by another truth", evidence
    return f"the reward function{where} gave other scores than it gives now", evidence


def of_sources(
    now: ScoredResponses, before: Sequence[ScoredResponses], again: Rescorer, searched: bool = False
) -> tuple[str, str] | None:
    """Returns a cause and its evidence where scores repeat, and those of one source are far from what they were.

    Compared are means of prompts, since responses to one prompt are alike. With `searched` only what can be explained
    is a cause: among many steps of a healthy run some are far.
    """
    found = []
    for source in np.unique(now.sources):
        own = _of_prompts(now, source)
        usual = np.concatenate([_of_prompts(step, source) for step in before] or [own[:0]])
        if len(usual) < 2 * len(own) or len(own) < 8:
            continue
        spread = max(usual.std(), 1e-9) * (1 / len(own) + 1 / len(usual)) ** 0.5
        if abs(own.mean() - usual.mean()) > 4 * spread:
            found.append((str(source), float(own.mean()), float(usual.mean())))
    if len(found) != 1 or len(np.unique(now.sources)) < 2:
        return None
    source, mean, usual = found[0]
    evidence = f"mean score of source {source} is {mean:.3g}, and was {usual:.3g}; other sources are as they were"
    if mean * usual < 0 and abs(mean + usual) < 0.5 * abs(usual):
        return f"scores of source {source} have the other sign", evidence
    for way, scores in again.shifted(now, source).items():
        if np.nanmean(scores) > mean + 0.5 * (usual - mean):
            return (
                f"truths of source {source} are shifted by a row",
                f"{evidence}; by the truth of the row {way} it is {np.nanmean(scores):.3g}",
            )
    return None if searched else (f"rewards of source {source} changed", evidence)


def _of_prompts(step: ScoredResponses, source: str) -> np.ndarray:
    """Returns the mean score of each prompt of a source."""
    of_prompt: dict[str, list[float]] = {}
    for prompt, score, own in zip(step.prompts, step.scores, step.sources, strict=True):
        if own == source:
            of_prompt.setdefault(prompt.prompt_id, []).append(score)
    return np.array([np.mean(scores) for scores in of_prompt.values()])


def _line(scores: np.ndarray, now: np.ndarray) -> tuple[float, float] | None:
    """Returns by what factor and what summand scores are made of those of now; None where they are not, or constant."""
    if len(now) < 3 or np.ptp(now) == 0 or np.ptp(scores) == 0:
        return None
    times = float(np.cov(now, scores, bias=True)[0, 1] / now.var())
    plus = float(scores.mean() - times * now.mean())
    is_line = np.abs(times * now + plus - scores).max() <= _SAME * max(1.0, np.abs(scores).max())
    return (times, plus) if is_line and abs(times) > _SAME else None


def _correlation(a: np.ndarray, b: np.ndarray) -> float:
    if len(a) < 3 or np.std(a) == 0 or np.std(b) == 0:
        return 0.0
    return float(np.corrcoef(a, b)[0, 1])


def _forms(step: ScoredResponses) -> list[tuple[str, np.ndarray]]:
    """Returns forms of responses by name, int [rows]: one of them may be what is paid."""
    found = [
        ("the first token", np.array([ids[0] if ids else -1 for ids in step.responses])),
        ("the last token", np.array([ids[-1] if ids else -1 for ids in step.responses])),
        ("the number of tokens", step.lengths),
    ]
    kinds = {
        "a digit": str.isdigit, "a letter": str.isalpha, "a space": str.isspace,
        "a sign that is neither": lambda sign: not (sign.isalnum() or sign.isspace()),
    }  # fmt: skip
    for name, is_kind in kinds.items():
        found.append((f"whether it has {name}", np.array([any(map(is_kind, text)) for text in step.texts], int)))
    common = {sign for text in step.texts for sign in text}
    for sign in sorted(common)[:200]:
        found.append((f"whether it has {sign!r}", np.array([sign in text for text in step.texts], int)))
    return found


def _explained(scores: np.ndarray, groups: np.ndarray) -> float:
    """Returns the share of the variance of scores that lies between groups, less what as many explain of noise."""
    total = float(((scores - scores.mean()) ** 2).sum()) if len(scores) else 0.0
    names = np.unique(groups)
    if total == 0 or len(names) < 2 or len(names) > len(scores) / 2:
        return 0.0
    within = sum(float(((scores[groups == name] - scores[groups == name].mean()) ** 2).sum()) for name in names)
    return 1 - within / (len(scores) - len(names)) / (total / (len(scores) - 1))
