"""What a run reads, out of its configuration: prompts, and the reward that scores responses to them."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mrl.config.schema import RunConfig
from mrl.data.dataset import PromptDataset, PromptParameters
from mrl.data.order import PromptStream
from mrl.reward.items import RewardSpec
from mrl.reward.pool import RewardPool
from mrl.reward.resolve import check_data_sources


def prompt_parameters(config: RunConfig) -> PromptParameters:
    """How rows become prompts."""
    data = config.data
    return PromptParameters(
        data.prompt_key, data.max_prompt_length, data.filter_overlong_prompts, data.truncation, data.max_bad_row_share,
        data.apply_chat_template_kwargs, data.enable_thinking, data.drop_duplicates,
    )  # fmt: skip


def load_training(config: RunConfig, tokenizer: Any) -> PromptStream:
    """The training prompts in their order. Raises DataError."""
    data = config.data
    prompts = PromptDataset.load(data.train_files, tokenizer, prompt_parameters(config))
    print(f"training prompts: {prompts.report}")
    at_a_time = data.gen_batch_size or data.train_batch_size
    return PromptStream(prompts, at_a_time, config.trainer.seed, data.shuffle, prompts.sizes, data.train_weights)


def load_validation(config: RunConfig, tokenizer: Any) -> PromptDataset | None:
    """The held-out prompts of all files, `data.val_max_samples` at most; None where no file is given. Raises DataError."""
    data = config.data
    if not data.val_files:
        return None
    prompts = PromptDataset.load(data.val_files, tokenizer, prompt_parameters(config), data.val_max_samples, files_apart=True)
    print(f"validation prompts: {prompts.report}")
    return prompts


def reward_spec(config: RunConfig, data_sources: Iterable[str] = ()) -> RewardSpec:
    """Which function scores. Raises ConfigError where `auto` knows none for one of the data sources."""
    reward, custom = config.reward, config.reward.custom_reward_function
    shared = {"bonus_rules": reward.bonus_rules, "max_memory_gib": reward.max_memory_gib, "data_sources": tuple(sorted(data_sources))}
    if custom is None:
        spec = RewardSpec(reward.function, **shared)
    else:
        spec = RewardSpec(path=str(Path(custom.path).resolve()), name=custom.name, kwargs=custom.reward_kwargs, **shared)
    check_data_sources(spec, data_sources)
    return spec


def reward_pool(config: RunConfig, spec: RewardSpec, logs: Path) -> RewardPool:
    """The scoring processes; what the function prints goes to `logs/reward.log`."""
    reward = config.reward
    return RewardPool(spec, reward.num_workers, reward.timeout_s, reward.failure_score or 0.0, logs / "reward.log")
