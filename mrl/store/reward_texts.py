"""Keeps long texts that a reward function returns, such as a judge's reasons, on the node where they were made.

    scorer                        driver                            whoever writes them down
    parts of a response --split--> numbers, and where texts are --> with_texts: fetched, parts as they were given

Short texts travel with the result. So do numbers, which filters and metrics need, and the answer that validation votes
on. Texts of one call are one object on the scorer's node. The driver owns it, and it is deleted with the last result
that refers to it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mrl.record.validation_metrics import PRED
from mrl.reward.items import RewardResult
from mrl.store.response_store import ResponseStore

SHORT = 256  # most characters in all texts of a response that travel with the result

Texts = dict[str, str]  # parts of a response, by name


@dataclass(frozen=True)
class KeptTexts:
    """Where a result's texts are stored: the call that returned them and their index there."""

    call: Any  # reference to the texts of a call, list[Texts]
    index: int


def split(results: Sequence[RewardResult]) -> tuple[list[RewardResult], list[Texts]]:
    """Returns the results without long texts, and these texts. `texts` of a result is the index of its own."""
    light = []
    kept = []
    for result in results:
        texts = {name: part for name, part in result.parts.items() if isinstance(part, str) and name != PRED}
        if sum(map(len, texts.values())) > SHORT:
            numbers = {name: part for name, part in result.parts.items() if name not in texts}
            result = replace(result, parts=numbers, texts=len(kept))
            kept.append(texts)
        light.append(result)
    return light, kept


def named(results: Sequence[RewardResult], call: Any) -> list[RewardResult]:
    """Adds to the results of a call the reference to their texts."""
    return [each if each.texts is None else replace(each, texts=KeptTexts(call, each.texts)) for each in results]


def with_texts(
    results: Sequence[RewardResult], fetched: Callable[[Sequence[Any]], list[Any]] = ResponseStore.fetched
) -> list[RewardResult]:
    """Returns the results with all of their parts. Raises Interrupted when a node is gone that held some."""
    calls = {id(each.texts.call): each.texts.call for each in results if each.texts is not None}
    if not calls:
        return list(results)
    texts = dict(zip(calls, fetched(list(calls.values())), strict=True))
    return [each if each.texts is None else _whole(each, texts[id(each.texts.call)]) for each in results]


def _whole(result: RewardResult, texts: Sequence[Texts]) -> RewardResult:
    return replace(result, parts=result.parts | texts[result.texts.index], texts=None)
