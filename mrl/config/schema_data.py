"""Keys of the prompts and of the rewards."""

from collections.abc import Sequence
from typing import Any, Literal

from mrl.config.section import Section, key, must_be


def _are_shares(weights: Sequence[float]) -> bool:
    return not weights or (min(weights) >= 0 and sum(weights) != 0)


class DataConfig(Section):
    """Prompts, in verl's schema."""

    train_files: tuple[str, ...] = key(
        (), "Parquet or JSONL files in verl's schema.", verl="data.train_files", is_path=True
    )
    train_weights: tuple[float, ...] = key(
        (),
        "Share of each file in an epoch's prompts; none given: every prompt once.",
        rule=must_be(_are_shares, "must be at least 0, and one of them more", "they are shares of an epoch's prompts"),
    )
    val_files: tuple[str, ...] = key((), "Validation files, in the same schema.", verl="data.val_files", is_path=True)
    prompt_key: str = key(
        "prompt",
        "Column with the chat.",
        advice="prompt, unless your files say otherwise.",
        verl="data.prompt_key",
    )
    reward_fn_key: str = key(
        "data_source",
        "Column that a reward function is given as data_source, and by which held-out scores are told apart.",
        advice="data_source, unless your files say otherwise.",
        verl="data.reward_fn_key",
    )
    train_batch_size: int = key(
        ...,
        "Prompts per step; x rollout.n samples.",
        ge=1,
        le=1_000_000,
        unit="prompts",
        advice="More makes generation more efficient and, at the same mini-batch size, training more off-policy.",
        verl="data.train_batch_size",
    )
    gen_batch_size: int | None = key(
        None,
        "Prompts that dynamic sampling generates at a time; left out: train_batch_size.",
        ge=1,
        le=1_000_000,
        unit="prompts",
        advice="More saves rounds where few groups differ, and throws more responses away.",
    )
    train_max_samples: int | None = key(
        None,
        "Training prompts of all train_files together: a sample drawn by trainer.seed, of each file its share; with "
        "shuffle off the first ones; left out: all.",
        ge=1,
        unit="prompts",
        advice="For a trial on less data. Another number, or another seed, is other data: such a run is not resumed.",
    )
    val_max_samples: int | None = key(
        None,
        "Validation prompts of all val_files together: a sample, of each file its share, the same one in "
        "every run; left out: all.",
        ge=1,
        unit="prompts",
        advice="The interval of a score shrinks with its root: 100 prompts of 50 % leave 10 points to "
        "both sides, 1,000 leave 3.",
    )
    max_prompt_length: int = key(
        1024,
        "Longest prompt.",
        ge=1,
        unit="tokens",
        advice="That of your data; less, with filter_overlong_prompts, when few are long.",
        verl="data.max_prompt_length",
    )
    max_response_length: int = key(
        1024,
        "Longest response.",
        ge=1,
        unit="tokens",
        advice="response_length/clip_ratio above 0.1 says that it is too short for what the model wants to say.",
        verl="data.max_response_length",
    )
    filter_overlong_prompts: bool = key(
        True,
        "Prompts over the limit are left out, and counted.",
        verl="data.filter_overlong_prompts",
    )
    truncation: Literal["error", "left", "right", "middle"] = key(
        "error",
        "What happens to those that are not filtered.",
        advice="error: a prompt without its end asks another question.",
        verl="data.truncation",
    )
    max_bad_row_share: float = key(0.01, "More bad rows than this share stop the run.", ge=0, le=1)
    shuffle: bool = key(
        True,
        "Another order of prompts each epoch, the same for the same seed.",
        verl="data.shuffle",
    )
    drop_duplicates: bool = key(
        True,
        "Of rows with the same prompt only the first is kept: over all training files, and in each validation file.",
    )
    enable_thinking: bool | None = key(None, "The chat template's switch; left out: as the template has it.")
    apply_chat_template_kwargs: dict[str, Any] = key({}, "Further arguments of the chat template.")

    @property
    def max_sample_length(self) -> int:
        """Tokens of the longest prompt and the longest response together."""
        return self.max_prompt_length + self.max_response_length

    @property
    def prompts_at_a_time(self) -> int:
        """Prompts that generation takes from the data at a time."""
        return self.gen_batch_size or self.train_batch_size


class CustomRewardConfig(Section):
    """A user's reward function: `name` in the Python file at `path`, with verl's compute_score signature."""

    path: str = key(
        ...,
        "Python file with a reward function of your own.",
        verl=("custom_reward_function.path", "reward.custom_reward_function.path"),
        is_path=True,
    )
    name: str = key(
        "compute_score",
        "The function in it: compute_score(data_source, solution_str, ground_truth, extra_info).",
        verl=("custom_reward_function.name", "reward.custom_reward_function.name"),
    )
    reward_kwargs: dict[str, Any] = key({}, "Further arguments for it.")


class RewardConfig(Section):
    """Scoring of responses, in worker processes that are killed and replaced when they hang."""

    function: str = key("auto", "A built-in rule by name; auto: by each row's data_source.")
    reward_manager: Literal["naive", "dapo"] | None = key(
        None,
        "verl's name for whether the overlong penalty applies: dapo with algorithm.overlong_buffer, naive "
        "without; left out: as that says.",
    )
    bonus_rules: dict[str, float] = key({}, "Further built-in rules, and the weight of each in the sum.")
    custom_reward_function: CustomRewardConfig | None = None
    num_workers: int = key(
        2,
        "Processes that score, over all nodes with engines.",
        ge=1,
        le=10_000,
        advice="Until timing_s/reward is small: scoring runs beside generation.",
        verl=("reward.num_workers", "reward_model.num_workers"),
    )
    timeout_s: float = key(
        10.0,
        "Deadline for the whole scoring of one sample; the process is then killed and replaced.",
        gt=0,
        unit="s",
    )
    environment: tuple[str, ...] = key(
        (),
        "Variables that scoring processes are given beside the usual ones (PATH, HOME, PYTHON*, ...), by name or "
        "pattern: the keys of a judge, say.",
    )
    network: bool = key(
        False,
        "Whether scoring processes may reach beyond the machine, as a judge must. Off needs Linux.",
    )
    folders: tuple[str, ...] = key(
        (),
        "Folders that scoring processes may write into, beside temporary ones: a cache, say. Needs Linux with "
        "Landlock; without it they write wherever the user may, and their log says so.",
        is_path=True,
    )
    max_memory_gib: float | None = key(
        16.0,
        "Address space of one scoring process; left out: unlimited.",
        gt=0,
        unit="GiB",
    )
    failure_score: float | None = key(
        None,
        "Score of a sample whose reward raised, hung, returned NaN or died; null: the lowest of its data source "
        "in the batch, at most 0.",
    )
    max_failure_share: float = key(
        0.2,
        "More failures than this share of a step stop the run, and so do more responses without numbers as log-probs.",
        ge=0,
        le=1,
    )
