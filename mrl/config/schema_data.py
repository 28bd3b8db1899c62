"""Keys of the prompts and the rewards."""

from collections.abc import Sequence
from typing import Any, Literal

from mrl.config.section import Section, key, must_be
from mrl.data.template_date import ASKED, TemplateDate, is_date


def _are_shares(weights: Sequence[float]) -> bool:
    return not weights or (min(weights) >= 0 and sum(weights) != 0)


class DataConfig(Section):
    """The prompts, in verl's schema."""

    train_files: tuple[str, ...] = key(
        (), "Parquet or JSONL files in verl's schema.", verl="data.train_files", is_path=True
    )
    train_weights: tuple[float, ...] = key(
        (),
        "Share of each file in the prompts of an epoch; empty: each prompt once.",
        rule=must_be(_are_shares, "must be at least 0, and one of them more", "they are shares of an epoch's prompts"),
    )
    val_files: tuple[str, ...] = key((), "Validation files, in the same schema.", verl="data.val_files", is_path=True)
    prompt_key: str = key(
        "prompt",
        "Column that holds the chat.",
        advice="prompt, unless your files name it otherwise.",
        verl="data.prompt_key",
    )
    image_key: str = key(
        "images",
        "Column that holds a row's images, with model.vision: a list of bytes, {bytes, path}, paths, or URLs "
        "(file:, data:). Paths lie in the folder of the data file. The prompt has <image>, or a part of type image, "
        "for each.",
        advice="images, unless your files name it otherwise.",
    )
    max_image_pixels: int = key(
        16_777_216,
        "Most pixels of an image, width times height. A larger one is a bad row, before it is decoded. The model's "
        "preprocessor_config.json decides how many of them it sees.",
        ge=1,
        unit="pixels",
        advice="16,777,216 holds photographs of 4096 x 4096. One of that size takes 50 MB while it is read.",
    )
    reward_fn_key: str = key(
        "data_source",
        "Column that a reward function gets as data_source. Validation scores are reported for each of its values.",
        advice="data_source, unless your files name it otherwise.",
        verl="data.reward_fn_key",
    )
    train_batch_size: int = key(
        ...,
        "Prompts per step. A step has rollout.n times as many samples.",
        ge=1,
        le=1_000_000,
        unit="prompts",
        advice="A larger batch makes generation more efficient. At the same mini-batch size it makes training more "
        "off-policy.",
        verl="data.train_batch_size",
    )
    gen_batch_size: int | None = key(
        None,
        "Prompts that dynamic sampling generates at a time; left out: train_batch_size.",
        ge=1,
        le=1_000_000,
        unit="prompts",
        advice="More prompts save rounds where few groups differ, and discard more responses.",
    )
    train_max_samples: int | None = key(
        None,
        "Most training prompts from all train_files together; left out: all. trainer.seed draws the sample, "
        "from each file its share. With shuffle off the first prompts are taken.",
        ge=1,
        unit="prompts",
        advice="For a trial on less data. With another number or another seed the data differ, so such a run cannot "
        "be resumed.",
    )
    val_max_samples: int | None = key(
        None,
        "Most validation prompts from all val_files together; left out: all. The sample has each file's share "
        "and is the same in every run.",
        ge=1,
        unit="prompts",
        advice="The interval of a score shrinks with the root of this number. At a score of 50 %, 100 prompts leave "
        "10 points to both sides and 1,000 leave 3.",
    )
    max_prompt_length: int = key(
        1024,
        "Longest prompt.",
        ge=1,
        unit="tokens",
        advice="The longest prompt of your data. Less, with filter_overlong_prompts, where few are long.",
        verl="data.max_prompt_length",
    )
    max_response_length: int = key(
        1024,
        "Longest response.",
        ge=1,
        unit="tokens",
        advice="Raise it where response_length/clip_ratio is above 0.1: the model then needs longer responses.",
        verl="data.max_response_length",
    )
    filter_overlong_prompts: bool = key(
        True,
        "Leaves out prompts above max_prompt_length, and counts them.",
        verl="data.filter_overlong_prompts",
    )
    truncation: Literal["error", "left", "right", "middle"] = key(
        "error",
        "What happens to prompts above max_prompt_length that are not filtered. error: ends the run. left, "
        "right, middle: where tokens are cut out.",
        advice="error: a prompt without its end asks another question.",
        verl="data.truncation",
    )
    max_bad_row_share: float = key(0.01, "Largest share of bad rows in the data. Above it the run stops.", ge=0, le=1)
    shuffle: bool = key(
        True,
        "Shuffles the prompts anew in each epoch, by trainer.seed.",
        verl="data.shuffle",
    )
    drop_duplicates: bool = key(
        True,
        "Keeps only the first of several rows with the same prompt: over all training files, and within each "
        "validation file.",
    )
    enable_thinking: bool | None = key(None, "Switch of the chat template; left out: the template's default.")
    apply_chat_template_kwargs: dict[str, Any] = key(
        {},
        "Further arguments of the chat template. `chat_template`: the Jinja text of another template, for a checkpoint "
        "that has none or not yours. Exported folders keep the checkpoint's own.",
    )
    template_date: str | None = key(
        None,
        "Day that a chat template writes as today's (strftime_now), as YYYY-MM-DD; left out: that of the run's first "
        "start, which a resume keeps.",
        rule=must_be(is_date, "must be a date as YYYY-MM-DD", "", "2026-01-31"),
    )

    @property
    def template_arguments(self) -> dict[str, Any]:
        """Arguments of the chat template: apply_chat_template_kwargs, and the day."""
        if self.template_date is None:
            return self.apply_chat_template_kwargs
        return {**self.apply_chat_template_kwargs, ASKED: TemplateDate(self.template_date)}

    @property
    def max_sample_length(self) -> int:
        """Tokens of the longest prompt and the longest response together."""
        return self.max_prompt_length + self.max_response_length

    @property
    def prompts_at_a_time(self) -> int:
        """Prompts that generation takes from the data at a time."""
        return self.gen_batch_size or self.train_batch_size


class CustomRewardConfig(Section):
    """A reward function of your own: `name` in the file at `path`, with the signature of verl's compute_score."""

    path: str = key(
        ...,
        "Python file with your reward function.",
        verl=("custom_reward_function.path", "reward.custom_reward_function.path"),
        is_path=True,
    )
    name: str = key(
        "compute_score",
        "Name of the function in that file. Its signature is compute_score(data_source, solution_str, "
        "ground_truth, extra_info).",
        verl=("custom_reward_function.name", "reward.custom_reward_function.name"),
    )
    reward_kwargs: dict[str, Any] = key({}, "Further arguments that the function is given.")


class RewardConfig(Section):
    """Scoring of responses, in worker processes that are killed and replaced when they hang."""

    function: str = key("auto", "Name of a built-in rule; auto: the rule of each row's data_source.")
    reward_manager: Literal["naive", "dapo"] | None = key(
        None,
        "verl's name for whether the overlong penalty applies: dapo with algorithm.overlong_buffer, naive "
        "without; left out: as algorithm.overlong_buffer.enable says.",
    )
    bonus_rules: dict[str, float] = key({}, "Further built-in rules, each with its weight in the sum.")
    custom_reward_function: CustomRewardConfig | None = None
    num_workers: int = key(
        2,
        "Processes that score, over all nodes with engines.",
        ge=1,
        le=10_000,
        advice="Raise it until timing_s/reward is small. Scoring runs beside generation.",
        verl=("reward.num_workers", "reward_model.num_workers"),
    )
    timeout_s: float = key(
        10.0,
        "Longest time for scoring one sample. After it the process is killed and replaced.",
        gt=0,
        unit="s",
    )
    environment: tuple[str, ...] = key(
        (),
        "Environment variables that scoring processes get beside the usual ones (PATH, HOME, PYTHON*, ...), "
        "by name or pattern. One use is the key of a judge.",
    )
    network: bool = key(
        False,
        "Lets scoring processes open network sockets, to this host too, as a judge needs them. false needs Linux.",
    )
    folders: tuple[str, ...] = key(
        (),
        "Folders that scoring processes may write into beside temporary ones, such as a cache. The limit "
        "needs Linux with Landlock. Without it they can write wherever the user can, and their log says so.",
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
        "Score of a sample whose reward function raised, hung, returned NaN or died. null: the lowest score "
        "of its data source in the batch, at most 0.",
        ge=-1e30,
        le=1e30,
    )
    max_failure_share: float = key(
        0.2,
        "Largest share of a step whose scoring may fail. Above it the run stops. The same limit holds for "
        "responses whose log-probs are not numbers.",
        ge=0,
        le=1,
    )
