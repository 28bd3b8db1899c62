"""Prompts to the engines, responses to the reward pool as they arrive: what training, validation and `mrl eval` share."""

from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

from mrl.cluster.rollout_group import RolloutGroup
from mrl.config.schema import RunConfig
from mrl.data.batch import Prompt, Sample
from mrl.reward.items import RewardItem, RewardResult, check_failures, failures_at_the_bottom
from mrl.reward.pool import RewardPool
from mrl.train.stop import StopFlag
from mrl.vllm.requests import Completion, Request, Sampling

AGAIN = 1_000_000  # added to the index of a prompt's responses when it comes again in one call, so that it is not answered alike


class Progress(Protocol):
    """Who shows how far a phase is."""

    def progress(self, phase: str, done: int, total: int) -> None: ...


class Answering(Protocol):
    """What it takes to answer prompts and score the answers; a Run, or an evaluation."""

    config: RunConfig
    tokenizer: Any
    record: Progress
    rewards: RewardPool
    engines: RolloutGroup
    stop: StopFlag


def respond(
    who: Answering, prompts: list[Prompt], n: int, sampling: Sampling, seed: Callable[[Prompt, int], int], label: str
) -> list[Sample]:
    """`n` responses a prompt, ordered by prompt; each is handed to the reward pool as it arrives. `seed(prompt, k)` is that of its k-th."""
    wanted = [(group, prompt, k) for group, (prompt, first) in enumerate(_indexed(prompts)) for k in range(first, first + n)]
    requests = [Request(i, prompt.token_ids, seed(prompt, k)) for i, (_, prompt, k) in enumerate(wanted)]
    arrived = 0

    def score(batch: list[Completion]) -> None:
        nonlocal arrived
        arrived += len(batch)
        who.record.progress(f"{label} responses", arrived, len(requests))
        for completion in batch:
            who.rewards.submit(_reward_item(who.tokenizer, wanted[completion.sample_id][1], completion))

    done = who.engines.generate(requests, sampling, score)
    return [
        Sample(
            prompt_id=prompt.prompt_id, group_id=group, sample_id=i, seed=request.seed, prompt_ids=prompt.token_ids,
            response_ids=answer.token_ids, rollout_log_probs=answer.log_probs, stop_reason=answer.stop_reason,
            weight_version=answer.weight_version, routes=answer.routes,
        )
        for i, ((group, prompt, _), request, answer) in enumerate(zip(wanted, requests, done, strict=True))
    ]  # fmt: skip


def _indexed(prompts: list[Prompt]) -> list[tuple[Prompt, int]]:
    """Each prompt with the index of its first response: 0, and further on where files mixed by weight bring it again."""
    times: Counter = Counter()
    found = []
    for prompt in prompts:
        found.append((prompt, times[prompt.prompt_id] * AGAIN))
        times[prompt.prompt_id] += 1
    return found


def _reward_item(tokenizer: Any, prompt: Prompt, completion: Completion) -> RewardItem:
    text = tokenizer.decode(completion.token_ids, skip_special_tokens=True)
    return RewardItem(completion.sample_id, prompt.data_source, text, prompt.ground_truth, prompt.extra_info)


def collect_rewards(who: Answering, samples: list[Sample]) -> list[RewardResult]:
    """Results in the order of `samples`, failed ones at the bottom of their data source where reward.failure_score is not set.

    Raises DataError when too many failed.
    """
    share = who.config.reward.max_failure_share
    results = who.rewards.drain(who.stop.raise_if_set, int(share * len(samples)))
    check_failures(results, share)
    if who.config.reward.failure_score is None:
        results = failures_at_the_bottom(results)
    by_id = {result.sample_id: result for result in results}
    return [by_id[s.sample_id] for s in samples]
