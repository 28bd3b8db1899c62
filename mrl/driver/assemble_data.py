"""The first step of assembling a run: reads and checks prompts and reward. It writes nothing."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mrl.acting.offer import Offer
from mrl.acting.tool import ToolsSpec
from mrl.config.schema import DataConfig, ModelConfig, RewardConfig, RolloutConfig, TrainerConfig
from mrl.config.schema_rollout import AgentConfig, TurnsConfig
from mrl.data.dataset import PromptDataset, PromptParameters, SetAside, load_chat_tokenizer
from mrl.data.order import PromptStream
from mrl.data.quick_tokenizer import quick_tokenizer
from mrl.data.row_files import BadRow, images_of
from mrl.data.samples import ImageStore
from mrl.engine.requests import turns_spec
from mrl.errors import ConfigError
from mrl.model.registry import stop_token_ids
from mrl.reward.builtin_rules import ENVIRONMENT, LEAST_SCORE, rule_name
from mrl.reward.items import RewardSpec
from mrl.reward.pool import check_function
from mrl.reward.resolve import AUTO, check_data_sources
from mrl.reward.truths import unmatched

if TYPE_CHECKING:  # what few runs need is imported by the line that reads its key
    from mrl.acting.dialects import Dialect
    from mrl.data.image_reader import ImageReader

VALIDATION_SAMPLE = 0  # seed for the sample of validation prompts


@dataclass(frozen=True)
class Data:
    """The data of a run and its length."""

    stream: PromptStream
    val_prompts: PromptDataset | None  # None without a file of them
    reward: RewardSpec
    total_steps: int
    images: "ImageReader | None" = None  # None: the run sees none

    @property
    def bad_rows(self) -> tuple[SetAside, ...]:
        """Returns the unusable rows of all files."""
        bad_validation_rows = ()
        if self.val_prompts:
            bad_validation_rows = self.val_prompts.report.bad_rows
        return (*self.stream.prompts.report.bad_rows, *bad_validation_rows)

    @property
    def fingerprint(self) -> str:
        """Returns a digest of the training prompts' tokens, which a resume compares."""
        return self.stream.prompts.fingerprint

    @property
    def rows_digest(self) -> str:
        """Returns the digest of all that the training rows have beside tokens."""
        return self.stream.prompts.rows_digest


def read_data(
    model: ModelConfig, data: DataConfig, rollout: RolloutConfig, reward: RewardConfig, trainer: TrainerConfig
) -> Data:
    """Reads all prompts and the reward function.

    Raises DataError, and ConfigError for a reward function, tools or an image processor that cannot be loaded.
    """
    tokenizer = prompt_tokenizer(model.path, data)
    tools = checked_tools(rollout.turns, data, reward, model.path, tokenizer, rollout.agent)
    check_goes_on(tools, trainer)
    rule = rule_in(reward)
    images = None
    if model.vision is not None:
        images = image_reader(model.path, data)
    stream = load_training(data, trainer.seed, tokenizer, tools, rule, images)
    val_prompts = load_validation(data, tokenizer, tools, rule, images)
    validation_sources = val_prompts.data_sources if val_prompts else frozenset()
    scoring = reward_spec(reward, stream.prompts.data_sources | validation_sources)
    check_function(scoring)
    total_steps = trainer.total_training_steps or trainer.total_epochs * stream.steps_per_epoch
    return Data(stream, val_prompts, scoring, total_steps, images)


def image_reader(model_path: str, data: DataConfig) -> "ImageReader":
    """Returns what reads the images of rows.

    Raises ConfigError for a model without an image processor, or with one of another model.
    """
    from mrl.data.image_reader import ImageReader

    return ImageReader.of(model_path, ImageStore("", data.max_image_pixels))


def keep_images(
    images: "ImageReader | None", datasets: Iterable[PromptDataset | None], config: DataConfig, store: Path
) -> None:
    """Writes the images of the prompts of `datasets` into `store`, unless they are there. `config`: names the files
    that `images` has read, and their columns.

    Raises DataError for files that have changed since, EnvironmentFault if an image cannot be written.
    """
    if images is None:
        return
    names = names_of_images(datasets)
    images.keep(_entries(prompt_parameters(config, images=images), config), store, names)


def names_of_images(datasets: Iterable[PromptDataset | None]) -> set[str]:
    """Returns the names of the images of all prompts."""
    return {image.name for prompts in datasets for prompt in prompts or () for image in prompt.images}


def _entries(parameters: PromptParameters, config: DataConfig) -> Iterator[tuple[list[Any], Path]]:
    for file in (*config.train_files, *config.val_files):
        for raw in parameters.rows(file):
            with suppress(BadRow):  # told when it was read
                if raw.problem is None:
                    yield images_of(raw, config.image_key), Path(raw.file).parent


def prompt_tokenizer(model_path: str, data: DataConfig) -> Any:
    """Returns the tokenizer for prompts: without transformers if that gives the same tokens.

    Raises the errors of `load_chat_tokenizer`.
    """
    arguments = data.apply_chat_template_kwargs
    return quick_tokenizer(Path(model_path), arguments) or load_chat_tokenizer(model_path, arguments)


def checked_tools(
    turns: TurnsConfig | None,
    data: DataConfig,
    reward: RewardConfig,
    model_path: str,
    tokenizer: Any,
    agent: AgentConfig | None = None,
) -> Offer | None:
    """Returns the tools, loaded in a process that has ended; None if responses have one turn.

    Raises ConfigError if they cannot be loaded, or if the form of calls is unknown for the model's family.
    """
    spec = turns_spec(turns, data, agent)
    if spec is None:
        return None
    offer = offer_of(spec.tools, reward)
    dialect = checked_dialect(spec.template_arguments, offer, model_path, tokenizer)
    if offer.agent:
        named = spec.tools.harness or spec.tools.agent or " ".join(spec.tools.command)
        print(f"agent: {named}; tools are called in the form of {dialect.name}")
    for kind, names in (("tools", spec.tools.names), ("environments", spec.tools.environments)):
        if names:
            print(f"{kind}: {', '.join(names)}, called in the form of {dialect.name}")
    return offer


def checked_dialect(template_arguments: Mapping[str, Any], offer: Offer, model_path: str, tokenizer: Any) -> "Dialect":
    """Returns how the model's family writes calls.

    Raises ConfigError if that is unknown, or its turns would not end.
    """
    from mrl.acting.dialects import dialect_of

    dialect = dialect_of(tokenizer, {**template_arguments, "tools": list(offer.all_schemas)})
    if dialect.end not in stop_token_ids(model_path):
        raise ConfigError(
            f"rollout.turns: the model's turns would not end with {dialect.family.frame.end}, as those of "
            f"{dialect.name} do: its id {dialect.end} is no eos_token_id of config.json or generation_config.json in "
            f"{model_path}; add it there"
        )
    return dialect


def offer_of(tools: ToolsSpec, reward: RewardConfig) -> Offer:
    """Returns the tools and whether rows need an environment.

    Raises ConfigError if they cannot be loaded, EnvironmentFault if no process for them starts.
    """
    from mrl.acting.environment_pool import check_tools

    own = reward.custom_reward_function
    return replace(check_tools(tools), rewards=own is None and reward.function == ENVIRONMENT)


def check_goes_on(tools: Offer | None, trainer: TrainerConfig) -> None:
    """Raises ConfigError if a conversation would continue elsewhere but its environment cannot be restarted."""
    if tools is None or not trainer.partial_rollouts or not tools.unrepeatable:
        return
    raise ConfigError(
        f"rollout.turns.environments: {tools.unrepeatable[0]!r} is not repeatable; with trainer.partial_rollouts a "
        "response goes on elsewhere, in an environment that repeats the same actions; set "
        "partial_rollouts to false, or make its replies follow from row, seed and actions alone (`repeatable = True`)"
    )


def rule_in(reward: RewardConfig) -> str | None:
    """Returns `reward.function`; None where the reward is a function of the user's."""
    if reward.custom_reward_function is not None:
        return None
    return reward.function


def prompt_parameters(
    data: DataConfig, tools: Offer | None = None, rule: str | None = None, images: "ImageReader | None" = None
) -> PromptParameters:
    """Returns the parameters that turn rows into prompts. `rule`: see `rule_in`."""
    return PromptParameters(
        data.prompt_key,
        data.max_prompt_length,
        data.filter_overlong_prompts,
        data.truncation,
        data.max_bad_row_share,
        data.template_arguments,
        data.enable_thinking,
        data.drop_duplicates,
        data.reward_fn_key,
        tools,
        unmatched=None if rule is None else partial(unmatched, rule),
        images=images,
        image_key=data.image_key,
    )


def load_training(
    data: DataConfig,
    seed: int,
    tokenizer: Any,
    tools: Offer | None = None,
    rule: str | None = None,
    images: "ImageReader | None" = None,
) -> PromptStream:
    """Returns the training prompts in order, sampled by `data.train_max_samples` if that is set. Raises DataError."""
    usable = PromptDataset.load(data.train_files, tokenizer, prompt_parameters(data, tools, rule, images))
    prompts = usable.sample(data.train_max_samples, seed if data.shuffle else None)
    print(f"training prompts: {_read_and_used(usable, prompts)}")
    return PromptStream(prompts, data.prompts_at_a_time, seed, data.shuffle, prompts.sizes, data.train_weights)


def load_validation(
    data: DataConfig,
    tokenizer: Any,
    tools: Offer | None = None,
    rule: str | None = None,
    images: "ImageReader | None" = None,
) -> PromptDataset | None:
    """Returns the validation prompts of all files, sampled by `data.val_max_samples` if that is set.

    Returns None without files. The sample does not depend on `trainer.seed`, so that runs of different seeds are
    compared on the same prompts. Raises DataError.
    """
    if not data.val_files:
        return None
    parameters = prompt_parameters(data, tools, rule, images)
    usable = PromptDataset.load(data.val_files, tokenizer, parameters, files_apart=True)
    prompts = usable.sample(data.val_max_samples, VALIDATION_SAMPLE)
    print(f"validation prompts: {_read_and_used(usable, prompts)}")
    return prompts


def _read_and_used(usable: PromptDataset, used: PromptDataset) -> str:
    if used is usable:
        return str(usable.report)
    return f"{len(used)} of {len(usable)}; {usable.report}"


def check_least_scores(estimator: str, reward: RewardConfig, data_sources: Iterable[str]) -> None:
    """Raises ConfigError where a built-in rule scores below 0 what maxrl is trained on. `data_sources`: of training."""
    if estimator != "maxrl" or reward.custom_reward_function is not None:
        return
    named = [reward.function] if reward.function != AUTO else map(rule_name, data_sources)
    if below := sorted(set(named) & LEAST_SCORE.keys()):
        raise ConfigError(
            f"algorithm.adv_estimator: maxrl divides by the mean score of a group and needs scores of at least 0, and "
            f"the rule {below[0]} gives a wrong response {LEAST_SCORE[below[0]]:g}; set reward.function: math, which "
            "gives 0 and 1, or algorithm.adv_estimator: grpo, which takes any score"
        )


def reward_spec(reward: RewardConfig, data_sources: Iterable[str] = ()) -> RewardSpec:
    """Returns the specification of the scoring function. Raises ConfigError if `auto` has none for a data source."""
    custom = reward.custom_reward_function
    shared = {
        "bonus_rules": reward.bonus_rules,
        "environment": reward.environment,
        "network": reward.network,
        "folders": tuple(str(Path(folder).resolve()) for folder in reward.folders),
        "max_memory_gib": reward.max_memory_gib,
        "data_sources": tuple(sorted(data_sources)),
    }
    if custom is None:
        spec = RewardSpec(reward.function, **shared)
    else:
        spec = RewardSpec(
            path=str(Path(custom.path).resolve()), name=custom.name, kwargs=custom.reward_kwargs, **shared
        )
    check_data_sources(spec, data_sources)
    return spec
