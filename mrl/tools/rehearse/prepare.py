"""Writes everything that a rehearsal reads into its work folder, and reports what replaces missing inputs."""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from mrl.config.load import ResolvedConfig, load_config
from mrl.config.rules import violations
from mrl.config.schema import RunConfig
from mrl.data.dataset import PromptParameters, load_tokenizer
from mrl.errors import InvalidConfig
from mrl.model import ModelSpec, known_name, model_spec, read_hf_config
from mrl.model.hub import cached_folder
from mrl.model.registry import known_hf_config
from mrl.reward.items import ONE_TURN, RewardItem, RewardSpec, check_failures
from mrl.reward.pool import RewardPool
from mrl.reward.resolve import check_data_sources
from mrl.tools.rehearse.compose import Rehearsal, WorkFolder, compose
from mrl.tools.rehearse.notes import OutOfReach
from mrl.tools.rehearse.rows import TRAIN_ROWS, VAL_ROWS, Rows, least_prompt, rows_of, synthetic_source, write_rows
from mrl.tools.rehearse.scoring import ROW, VALIDATION, ScoringSettings, write_scorer
from mrl.tools.rehearse.small_model import (
    copy_tokenizer,
    has_tokenizer,
    small_hf_config,
    vocabulary_size,
    write_checkpoint,
    write_tokenizer,
)
from mrl.train.assemble_data import offer_of
from mrl.vllm.requests import stop_token_ids, turns_spec

_TRIED = 4  # rows that are scored before anything starts
_PARTS = ("score", "reward")  # values by which groups may be compared that are no parts of the reward


@dataclass(frozen=True)
class Prepared:
    """A rehearsal that can be run, and its stand-ins for missing inputs."""

    rehearsal: Rehearsal
    model: str  # in words
    stand_ins: tuple[str, ...]


def prepare(original: RunConfig, work: WorkFolder, cpus: int) -> Prepared:
    """Writes model, tokenizer, rows, reward and configuration.

    Raises what `mrl train` raises for the user's own files: DataError for bad rows or a reward that fails, ConfigError
    for a tokenizer or reward that cannot be loaded. Raises ConfigError for a family without a small form.
    """
    original = original.model_copy(
        update={"model": original.model.model_copy(update={"path": cached_folder(original.model.path)})}
    )
    hf_config = original_hf_config(original.model.path)
    small_hf_config(hf_config, 2, 64, 64)  # raises before anything is written
    stand_ins = [_tokenizer(original, work)]
    tokenizer = load_tokenizer(str(work.model))
    turns = turns_spec(original.rollout.turns, original.data)
    has_tools = turns is None or (turns.tools.is_here and not original.rollout.endpoint)
    offer = None
    if turns and has_tools:
        offer = offer_of(turns.tools, original.reward)
    parameters = replace(_parameters(original), tools=offer)
    rehearsal = compose(original, work, cpus, least_prompt(tokenizer, parameters, offer), has_tools)
    model = _checkpoint(original, hf_config, tokenizer, rehearsal, work)
    limited = replace(parameters, max_prompt_length=rehearsal.config.data.max_prompt_length)
    stand_ins += _rows(original, work, tokenizer, limited)
    rehearsal, said = _reward(rehearsal, work)
    _write(rehearsal, work)
    return Prepared(rehearsal, model, (*filter(None, stand_ins), *said))


def original_hf_config(path: str) -> dict[str, Any]:
    """Returns the model's config.json, or the published one for its name, as `mrl plan` uses it."""
    if Path(path).is_dir() or (name := known_name(path)) is None:
        return read_hf_config(path)
    return known_hf_config(name)


def _tokenizer(original: RunConfig, work: WorkFolder) -> str:
    source = Path(original.model.path)
    if has_tokenizer(source):
        copy_tokenizer(source, work.model)
        return ""
    write_tokenizer(work.model, with_tools=original.rollout.turns is not None)
    return f"tokenizer: none at {source}, so ours, a token a byte, with a chat template"


def _parameters(config: RunConfig) -> PromptParameters:
    data = config.data
    return PromptParameters(
        prompt_key=data.prompt_key,
        max_prompt_length=data.max_prompt_length,
        apply_chat_template_kwargs=data.apply_chat_template_kwargs,
        enable_thinking=data.enable_thinking,
        reward_fn_key=data.reward_fn_key,
    )


def _checkpoint(
    original: RunConfig, hf_config: dict[str, Any], tokenizer: Any, rehearsal: Rehearsal, work: WorkFolder
) -> str:
    """Writes the weights, and describes the model."""
    data = rehearsal.config.data
    source = original.model.path
    ends = ()
    if has_tokenizer(source):
        ends = tuple(i for i in stop_token_ids(source) if i < len(tokenizer))
    ends = ends or (tokenizer.eos_token_id,)
    positions = -(-data.max_sample_length // 64) * 64
    small = small_hf_config(hf_config, rehearsal.layout.layers, vocabulary_size(tokenizer), positions)
    small |= {"eos_token_id": ends[0] if len(ends) == 1 else list(ends)}
    turns = rehearsal.config.rollout.turns
    turn = data.max_response_length if turns is None else data.max_response_length // (4 * turns.max_turns)
    model = write_checkpoint(work.model, small, ends, turn)
    return _in_words(model_spec(hf_config), model)


def _in_words(was: ModelSpec, model: ModelSpec) -> str:
    """Describes how the model was shrunk."""
    experts = ""
    if was.is_moe:
        experts = f", {was.num_experts} to {model.num_experts} experts"
    latents = ""
    if was.is_latent:
        latents = f", latents of {was.kv_lora_rank} to {model.kv_lora_rank}, the size of vLLM's CPU kernel"
    return (
        f"{model.family}: {was.num_layers} layers of {was.hidden_size} to {model.num_layers} of "
        f"{model.hidden_size}{experts}{latents}"
    )


def _rows(original: RunConfig, work: WorkFolder, tokenizer: Any, parameters: PromptParameters) -> list[str]:
    said = []
    source = synthetic_source(original)
    kinds = (
        ("train", original.data.train_files, TRAIN_ROWS, 0),
        ("val", original.data.val_files, VAL_ROWS, VALIDATION),
    )
    for kind, files, count, first in kinds:
        made = []
        if files or kind == "train":
            made = rows_of(files, count, tokenizer, parameters, source, first)
        for number, rows in enumerate(made):
            write_rows(work.rows(kind, number), rows.rows)
        said += [text for file, rows in zip(files or ("",), made, strict=False) if (text := _said_of(kind, file, rows))]
    return said


def _said_of(kind: str, file: str, rows: Rows) -> str:
    if rows.synthetic:
        return (
            f"data.{kind}_files: {f'{file} is not here' if file else 'names no file'}, so "
            f"{len(rows.rows)} synthetic rows"
        )
    if rows.cut:
        return f"data.{kind}_files: {rows.cut} of {len(rows.rows)} prompts of {file} are cut"
    return ""


def _reward(rehearsal: Rehearsal, work: WorkFolder) -> tuple[Rehearsal, list[str]]:
    """Writes a reward that calls the user's own. Before that it tries the user's own on a few answers."""
    original = rehearsal.original
    custom = rehearsal.original.reward.custom_reward_function
    algorithm = original.algorithm
    missing = custom is not None and not Path(custom.path).is_file()
    spec = None
    if not missing:
        spec = _spec(original)
    if spec is not None:
        _ask(spec, original, work)
    keys = {"acc", *algorithm.gdpo_reward_keys, algorithm.filter_groups.metric} - set(_PARTS)
    settings = ScoringSettings(
        reward=None if spec is None else asdict(spec),
        group=rehearsal.config.rollout.n,
        keys=tuple(sorted(keys)),
        metric=algorithm.filter_groups.metric if algorithm.filter_groups.enable else "score",
        leaves_uniform=algorithm.filter_groups.enable,
        seed=original.trainer.seed,
        turns=original.rollout.turns is not None,
    )
    write_scorer(work.reward, settings)
    if not missing:
        return rehearsal, []
    lost = OutOfReach("reward.custom_reward_function", f"{custom.path} is not here")
    said = f"reward: {custom.path} is not here, so seeded scores"
    return replace(rehearsal, out_of_reach=(*rehearsal.out_of_reach, lost)), [said]


def _spec(config: RunConfig) -> RewardSpec:
    """Returns the user's main function. The trainer adds bonus rules itself."""
    custom = config.reward.custom_reward_function
    if custom is None:
        return RewardSpec(config.reward.function)
    path = Path(custom.path).resolve()
    return RewardSpec(path=str(path), name=custom.name, kwargs=custom.reward_kwargs)


def _ask(spec: RewardSpec, config: RunConfig, work: WorkFolder) -> None:
    """Calls the user's function for the first rows, once with nonsense and once with the truth.

    Raises as a run would.
    """
    files = sorted(work.rows("train", 0).parent.glob("*.jsonl"))
    rows = [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()[:_TRIED]]
    check_data_sources(spec, {row["data_source"] for row in rows})
    truths = [row["reward_model"]["ground_truth"] for row in rows]
    answers = [("nonsense", row, truth) for row, truth in zip(rows, truths, strict=True)]
    answers += [(f"Answer: {truth}", row, truth) for row, truth in zip(rows, truths, strict=True)]
    for row in rows:
        row["extra_info"].pop(ROW)
        row["extra_info"] |= {} if config.rollout.turns is None else ONE_TURN
    items = [
        RewardItem(i, row["data_source"], text, truth, row["extra_info"])
        for i, (text, row, truth) in enumerate(answers)
    ]
    with RewardPool(spec, 1, config.reward.timeout_s, log_path=work.log("reward-tried")) as pool:
        check_failures(pool.score(items), config.reward.max_failure_share)


def _write(rehearsal: Rehearsal, work: WorkFolder) -> ResolvedConfig:
    """Writes the configuration and checks it.

    Raises InvalidConfig where the small configuration breaks a rule, which is a defect of mrl.
    """
    work.config.write_text(rehearsal.to_yaml(), encoding="utf-8")
    resolved = load_config(work.config)
    if broken := violations(resolved, model_spec(read_hf_config(work.model)), check_paths=True):
        raise InvalidConfig(broken)
    return resolved
