"""Shrinks lengths, token budgets and batches: all are divided by one factor, rounded up, with a minimum.

The factor is the smallest sufficient power of two. It brings the longest sample to 192 tokens and a step to 96 samples.
Group size and updates a step stay, within limits that are reported where they apply.

An example: 2,048 + 8,192 tokens, 256 prompts of 16 responses, mini-batches of 64 prompts. The factor is 64. Prompts
have 48 tokens (the minimum) and responses 128. Mini-batches have 1 prompt, and a step has 4 of them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, lcm
from typing import Any

from mrl.config.schema import RunConfig, leaf
from mrl.tools.rehearse.notes import Change

# most tokens of a sample, most samples of a step
LONGEST = 192
SAMPLES = 96
# minimum of a prompt (a chat template and a few words), and of a response
PROMPT = 48
RESPONSE = 32
CONVERSATION = 256  # minimum of a response with answers of tools in it
# most responses a prompt, most updates a step
GROUP = 16
UPDATES = 8
SEQUENCES = 32  # fewest sequences that an engine computes at once
_UNIT = "divided by {factor}"
# token budgets; each must hold at least the longest sample (on one device)
_BUDGETS = (
    "actor.ppo_max_token_len_per_gpu",
    "actor.log_prob_max_token_len_per_gpu",
    "ref.log_prob_max_token_len_per_gpu",
    "distillation.teacher_model.log_prob_max_token_len_per_gpu",
    "critic.ppo_max_token_len_per_gpu",
    "critic.forward_max_token_len_per_gpu",
    "rollout.max_num_batched_tokens",
)
_MICRO = (
    "actor.ppo_micro_batch_size_per_gpu",
    "actor.log_prob_micro_batch_size_per_gpu",
    "ref.log_prob_micro_batch_size_per_gpu",
    "distillation.teacher_model.log_prob_micro_batch_size_per_gpu",
    "critic.ppo_micro_batch_size_per_gpu",
    "critic.forward_micro_batch_size_per_gpu",
)


@dataclass(frozen=True)
class SmallBatch:
    """The factor, and every key that it changed."""

    factor: int
    changes: tuple[Change, ...]

    def __getitem__(self, key: str) -> Any:
        return next(change.now for change in self.changes if change.key == key)


def small_batch(config: RunConfig, data_parallel: int, sequence_parts: int, least_prompt: int = PROMPT) -> SmallBatch:
    """Shrinks the batch of a configuration.

    `data_parallel` and `sequence_parts` belong to the small layout. Samples must divide by the first, padded lengths by
    the second. `least_prompt` is the tokens of a prompt of a few words.
    """
    data = config.data
    n = min(config.rollout.n, GROUP)
    factor = shrink_factor(data.max_sample_length, data.train_batch_size * n)
    prompt = _length(data.max_prompt_length, factor, max(PROMPT, least_prompt))
    if config.rollout.turns is not None:  # mrl's own tokenizer takes a token a byte for the functions' schemas
        prompt = max(prompt, least_prompt)
    response = _length(data.max_response_length, factor, RESPONSE if config.rollout.turns is None else CONVERSATION)
    longest = ceil((prompt + response) / sequence_parts) * sequence_parts
    values = {
        "data.max_prompt_length": prompt,
        "data.max_response_length": response,
        "rollout.n": n,
        **_prompts(config, factor, n, data_parallel),
        **{key: max(1, ceil(leaf(config, key) / factor)) for key in _MICRO if leaf(config, key)},
        **{key: max(longest, ceil(leaf(config, key) / factor)) for key in _BUDGETS if leaf(config, key)},
        "rollout.max_num_seqs": min(_length(config.rollout.max_num_seqs, factor, SEQUENCES), longest),
        "reshard.budget_mb": max(1, config.reshard.budget_mb // factor),
        **_of_response_length(config, factor, response),
    }
    changes = (Change(key, leaf(config, key), value, _why(config, key, value, factor)) for key, value in values.items())
    return SmallBatch(factor, tuple(change for change in changes if change.now != change.was or change.key in _ALWAYS))


_ALWAYS = (
    "data.train_batch_size",
    "actor.ppo_mini_batch_size",
    "data.max_prompt_length",
    "data.max_response_length",
    "rollout.n",
)


def shrink_factor(longest: int, samples: int) -> int:
    """Returns the smallest power of two that brings both to the size of a rehearsal."""
    factor = 1
    while longest > LONGEST * factor or samples > SAMPLES * factor:
        factor *= 2
    return factor


def _length(value: int, factor: int, least: int) -> int:
    return max(min(value, least), ceil(value / factor))


def _prompts(config: RunConfig, factor: int, n: int, data_parallel: int) -> dict[str, int]:
    """Returns prompts of a mini-batch, of a step, and of one round of dynamic sampling.

    Every data-parallel rank gets the same number of samples.
    """
    data = config.data
    mini = config.actor.ppo_mini_batch_size
    step = lcm(n, data_parallel) // n  # prompts that give every rank as many samples
    small_mini = ceil(ceil(mini / factor) / step) * step
    updates = min(config.mini_batches, UPDATES, max(2, SAMPLES // (small_mini * n)))
    values = {"actor.ppo_mini_batch_size": small_mini, "data.train_batch_size": small_mini * updates}
    if data.gen_batch_size is not None:
        values["data.gen_batch_size"] = ceil(small_mini * updates * data.gen_batch_size / data.train_batch_size)
    return values


def _of_response_length(config: RunConfig, factor: int, response: int) -> dict[str, Any]:
    """Returns values that are given as the longest response or a part of it."""
    values: dict[str, Any] = {}
    buffer = config.algorithm.overlong_buffer
    divisor = config.algorithm.policy_loss.loss_scale_factor
    if buffer.len is not None:
        values["algorithm.overlong_buffer.len"] = min(response, max(1, ceil(buffer.len / factor)))
    if divisor is not None:
        is_whole = divisor == config.data.max_response_length
        values["algorithm.policy_loss.loss_scale_factor"] = float(response) if is_whole else max(1.0, divisor / factor)
    if config.trainer.segment_tokens is not None:
        values["trainer.segment_tokens"] = max(1, ceil(config.trainer.segment_tokens / factor))
    return values


def _why(config: RunConfig, key: str, value: Any, factor: int) -> str:
    was = leaf(config, key)
    if value == was:
        return "kept"
    if key == "rollout.n":
        return f"at most {GROUP}"
    if isinstance(was, int) and value != ceil(was / factor):
        if value > was / factor:
            return f"divided by {factor}, and what a run needs at least"
        return "no more than there is time for"
    return _UNIT.format(factor=factor)


def updates_changed(config: RunConfig, small: SmallBatch) -> Iterator[str]:
    """Reports where a step has fewer mini-batches than in the configuration."""
    now = small["data.train_batch_size"] // small["actor.ppo_mini_batch_size"]
    if now != config.mini_batches:
        yield f"{config.mini_batches} mini-batches a step there, {now} here"
