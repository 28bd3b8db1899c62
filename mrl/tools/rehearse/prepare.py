"""Writes everything that a rehearsal reads into its work folder, and reports what replaces missing inputs."""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

from mrl.acting.offer import ENVIRONMENT, Offer
from mrl.config.load import ResolvedConfig, load_config
from mrl.config.rules import violations
from mrl.config.schema import RunConfig
from mrl.config.speculation_rules import draft_positions
from mrl.data.dataset import ChatTokenizer, PromptParameters, load_chat_tokenizer, texts_of
from mrl.data.images import image_bytes
from mrl.data.row_files import BadRow
from mrl.driver.assemble_data import image_reader, offer_of, rule_in
from mrl.engine.requests import turns_spec
from mrl.errors import DataError, InvalidConfig
from mrl.model import ModelSpec, known_name, model_spec, read_hf_config
from mrl.model.hub import cached_folder
from mrl.model.registry import has_tokenizer, known_hf_config, stop_token_ids
from mrl.model.wrapped import with_text_config
from mrl.reward.items import ONE_TURN, RewardItem, RewardSpec, check_failures
from mrl.reward.pool import RewardPool
from mrl.reward.resolve import check_data_sources
from mrl.reward.truths import unmatched
from mrl.tools.rehearse.compose import Rehearsal, WorkFolder, compose
from mrl.tools.rehearse.notes import OutOfReach
from mrl.tools.rehearse.scoring import ROW, VALIDATION, ScoringSettings, write_scorer
from mrl.tools.rehearse.small_model import (
    copy_tokenizer,
    small_hf_config,
    vocabulary_size,
    write_checkpoint,
    write_tokenizer,
)
from mrl.tools.rehearse.small_tower import TOKENS, ids_of, write_processor

TRAIN_ROWS = 32
VAL_ROWS = 8
_AFTER_TEMPLATE = 16  # tokens for a prompt's own words
Row = dict[str, Any]
_TRIED = 4  # rows that are scored before anything starts
_PARTS = ("score", "reward")  # values by which groups may be compared that are no parts of the reward


@dataclass(frozen=True)
class Prepared:
    """A rehearsal that can be run, and its substitutes for missing inputs."""

    rehearsal: Rehearsal
    model: str  # in words
    substitutes: tuple[str, ...]


def prepare(original: RunConfig, work: WorkFolder, cpus: int) -> Prepared:
    """Writes model, tokenizer, rows, reward and configuration.

    Raises what `mrl train` raises for the user's own files: DataError for bad rows or a reward that fails, ConfigError
    for a tokenizer or reward that cannot be loaded. Raises ConfigError for a family without a small form.
    """
    original = original.model_copy(
        update={"model": original.model.model_copy(update={"path": cached_folder(original.model.path)})}
    )
    hf_config = original_hf_config(original.model.path)
    sees = original.model.vision is not None
    small_hf_config(hf_config, 2, 64, 64, sees)  # raises before anything is written
    substitutes = [_tokenizer(original, work)]
    tokenizer = load_chat_tokenizer(str(work.model), original.data.apply_chat_template_kwargs)
    turns = turns_spec(original.rollout.turns, original.data)
    has_tools = turns is None or (turns.tools.is_here and not original.rollout.endpoint)
    offer = None
    if turns and has_tools:
        offer = offer_of(turns.tools, original.reward)
    parameters = replace(_parameters(original), tools=offer)
    least = least_prompt(tokenizer, parameters, offer)
    if sees:
        substitutes.append(_processor(original, hf_config, work))
        _begin_to_see(original, hf_config, tokenizer, work)
        parameters = replace(parameters, images=image_reader(str(work.model), original.data))
        least = max(least, _longest_shown(original, tokenizer, parameters))
    rehearsal = compose(original, work, cpus, least, has_tools)
    model = _checkpoint(original, hf_config, tokenizer, rehearsal, work)
    limited = replace(parameters, max_prompt_length=rehearsal.config.data.max_prompt_length)
    substitutes += _rows(original, work, tokenizer, limited)
    rehearsal, said = _reward(rehearsal, work)
    _write(rehearsal, work)
    return Prepared(rehearsal, model, (*filter(None, substitutes), *said))


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
    sees = original.model.vision is not None
    write_tokenizer(work.model, with_tools=original.rollout.turns is not None, sees=sees)
    return f"tokenizer: none at {source}, so ours, a token a byte, with a chat template"


def _processor(original: RunConfig, hf_config: dict[str, Any], work: WorkFolder) -> str:
    is_own = write_processor(Path(original.model.path), work.model, hf_config["vision_config"])
    whose = "the model's own image processor" if is_own else f"no image processor at {original.model.path}, so Qwen's"
    return f"images: {whose}, which makes at most about {TOKENS} tokens of each here"


def _begin_to_see(original: RunConfig, hf_config: dict[str, Any], tokenizer: Any, work: WorkFolder) -> None:
    """Writes a first config.json, by which images are read before the model's sizes are known."""
    small = _seen_by(original, tokenizer, small_hf_config(hf_config, 2, vocabulary_size(tokenizer), 64, sees=True))
    (work.model / "config.json").write_text(json.dumps(small), encoding="utf-8")


def _seen_by(original: RunConfig, tokenizer: Any, small: dict[str, Any]) -> dict[str, Any]:
    """Returns the small configuration with the ids of images' tokens: the model's own, or those of our tokenizer."""
    if has_tokenizer(original.model.path):
        return small
    return small | ids_of(tokenizer)


def _parameters(config: RunConfig) -> PromptParameters:
    data = config.data
    rule = rule_in(config.reward)
    return PromptParameters(
        prompt_key=data.prompt_key,
        max_prompt_length=data.max_prompt_length,
        apply_chat_template_kwargs=data.template_arguments,
        enable_thinking=data.enable_thinking,
        reward_fn_key=data.reward_fn_key,
        image_key=data.image_key,
        unmatched=None if rule is None else partial(unmatched, rule),
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
    positions = -(-(data.max_sample_length + draft_positions(rehearsal.config.rollout)) // 64) * 64
    sees = original.model.vision is not None
    small = small_hf_config(hf_config, rehearsal.layout.layers, vocabulary_size(tokenizer), positions, sees)
    small = with_text_config(small, {"eos_token_id": ends[0] if len(ends) == 1 else list(ends)})
    if sees:
        small = _seen_by(original, tokenizer, small)
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
    tower = ""
    if was.tower is not None and model.tower is not None:
        tower = (
            f", a vision tower of {was.tower.layers} layers of {was.tower.hidden_size} to {model.tower.layers} of "
            f"{model.tower.hidden_size}"
        )
    return (
        f"{model.family}: {was.num_layers} layers of {was.hidden_size} to {model.num_layers} of "
        f"{model.hidden_size}{experts}{latents}{tower}"
    )


@dataclass(frozen=True)
class Rows:
    """Rows of one file in verl's schema, and their origin."""

    rows: tuple[Row, ...]
    synthetic: bool
    cut: int  # number of rows whose text was shortened


def least_prompt(tokenizer: ChatTokenizer, parameters: PromptParameters, offer: Offer | None = None) -> int:
    """Returns the tokens of a prompt of a few words under the chat template, with all that may be called."""
    arguments = replace(parameters, tools=None).template_arguments()
    if offer is not None:
        arguments["tools"] = list(offer.all_schemas)
    return len(_ids([{"role": "user", "content": ""}], tokenizer, arguments)) + _AFTER_TEMPLATE


def rows_of(
    files: Sequence[str],
    count: int,
    tokenizer: ChatTokenizer,
    parameters: PromptParameters,
    data_source: str,
    first: int = 0,
) -> list[Rows]:
    """Returns rows for each file, about `count` / files of them, whose prompts fit `parameters.max_prompt_length`.

    `data_source` is that of synthetic rows, `first` the number of the first row. Raises DataError as `mrl train` does.
    """
    each = -(-count // max(len(files), 1))
    starts = range(first, first + each * max(len(files), 1), each)
    return [
        _of_file(file, start, each, tokenizer, parameters, data_source)
        for file, start in zip(files or ("",), starts, strict=True)
    ]


def _of_file(
    file: str, start: int, count: int, tokenizer: ChatTokenizer, parameters: PromptParameters, data_source: str
) -> Rows:
    synthetic = not Path(file).is_file()
    made = _synthetic(start, count, data_source, parameters)
    if not synthetic:
        made = _read(file, count, tokenizer, parameters)
    conversations = list(made)
    if not conversations:
        raise DataError(f"{file}: no row of it can be used; mrl train says why of each")
    rows = []
    cut = 0
    for number, made in enumerate(conversations, start):
        fitting = _fitted(made, number, tokenizer, parameters)
        cut += fitting is not made.messages
        rows.append(_row(fitting, made, number, parameters))
    return Rows(tuple(rows), synthetic, cut)


@dataclass(frozen=True)
class _Made:
    """A usable row."""

    messages: list[dict[str, Any]]
    rest: Row
    images: tuple[bytes, ...] = ()  # encoded


def _read(file: str, count: int, tokenizer: ChatTokenizer, parameters: PromptParameters) -> Iterator[_Made]:
    """Yields usable rows from the beginning of a file. `mrl train` reports faults of the others."""
    for raw in parameters.rows(file):
        if not count:
            return
        try:
            messages, rest = parameters.parsed(raw)
            parameters.template_arguments(rest["extra_info"])
            parameters.check_truth(rest)
            messages, entries = parameters.shown(raw, messages)
            folder = Path(raw.file).parent
            encoded = tuple(image_bytes(entry, number, folder) for number, entry in enumerate(entries, 1))
            made = _Made(messages, rest, encoded)
            if encoded:
                _length_of(made, tokenizer, parameters)  # a text may have a token that stands for an image
                if _length_shown(made, tokenizer, parameters) > parameters.max_prompt_length:
                    continue
        except BadRow:
            continue
        count -= 1
        yield made


def _synthetic(start: int, count: int, data_source: str, parameters: PromptParameters) -> Iterator[_Made]:
    """Makes up rows. The environments take turns. Of four rows for a model that sees, three show an image."""
    environments = []
    if parameters.tools is not None:
        environments = list(parameters.tools.environments)
    for number in range(start, start + count):
        extra_info = {}
        if environments:
            extra_info = {ENVIRONMENT: environments[number % len(environments)]}
        content: Any = f"What is {number} + {2 * number + 1}?"
        rest = {"data_source": data_source, "ground_truth": str(3 * number + 1), "extra_info": extra_info}
        images: tuple[bytes, ...] = ()
        if parameters.images is not None and number % 4 != 3:
            content = [{"type": "image"}, {"type": "text", "text": content}]
            images = (_drawn(number),)
        yield _Made([{"role": "user", "content": content}], rest, images)


def _drawn(number: int) -> bytes:
    """Returns an image, encoded: a number has its own colour and size."""
    from PIL import Image

    out = BytesIO()
    colour = (number * 37 % 256, number * 91 % 256, number * 53 % 256)
    Image.new("RGB", (32 + 8 * (number % 5), 32 + 8 * (number % 3)), colour).save(out, "PNG")
    return out.getvalue()


def _row(messages: list[dict[str, Any]], made: _Made, number: int, parameters: PromptParameters) -> Row:
    row = {
        parameters.reward_fn_key: made.rest["data_source"],
        parameters.prompt_key: messages,
        "reward_model": {"style": "rule", "ground_truth": made.rest["ground_truth"]},
        "extra_info": {**made.rest["extra_info"], ROW: number},
    }
    if parameters.images is not None:
        row[parameters.image_key] = made.images
    return row


def _fitted(made: _Made, number: int, tokenizer: ChatTokenizer, parameters: PromptParameters) -> list[dict[str, Any]]:
    """Cuts the longest texts from their beginning until the prompt fits.

    A cut prompt begins with its row's number, so that prompts stay different.
    """
    longest_prompt = parameters.max_prompt_length
    excess = _length_of(made, tokenizer, parameters) - longest_prompt
    if excess <= 0:
        return made.messages
    texts = [text for message in made.messages for text in texts_of(message["content"])]
    mark = f"{number}: "
    while excess > 0:
        longest = max(range(len(texts)), key=lambda i: len(texts[i]), default=None)
        if longest is None or not texts[longest]:
            raise DataError(f"the chat template alone takes more than {longest_prompt} tokens (data.max_prompt_length)")
        texts[longest] = texts[longest][max(excess, 1) :]
        cut = _with_texts(made.messages, [*texts[:-1], mark + texts[-1]])
        excess = _length_of(replace(made, messages=cut), tokenizer, parameters) - longest_prompt
    return cut


def _with_texts(messages: list[dict[str, Any]], texts: Sequence[str]) -> list[dict[str, Any]]:
    """Returns the messages with other texts, in their order."""
    left = iter(texts)

    def other(content: Any) -> Any:
        if isinstance(content, str):
            return next(left)
        return [part | {"text": next(left)} if part["type"] == "text" else part for part in content]

    return [{**message, "content": other(message["content"])} for message in messages]


def _length_of(made: _Made, tokenizer: ChatTokenizer, parameters: PromptParameters) -> int:
    """Returns the tokens of a prompt, those of its images included. Raises BadRow for images that cannot be shown."""
    arguments = parameters.template_arguments(made.rest["extra_info"])
    ids = _ids(made.messages, tokenizer, arguments)
    if made.images:
        ids, _ = parameters.images.expanded(ids, parameters.images.read_images(made.images, Path()))
    return len(ids)


def _length_shown(made: _Made, tokenizer: ChatTokenizer, parameters: PromptParameters) -> int:
    """Returns the tokens of a prompt's images with few words beside them."""
    texts = [text for message in made.messages for text in texts_of(message["content"])]
    bare = replace(made, messages=_with_texts(made.messages, [""] * len(texts)))
    return _length_of(bare, tokenizer, parameters) + _AFTER_TEMPLATE


def _longest_shown(original: RunConfig, tokenizer: ChatTokenizer, parameters: PromptParameters) -> int:
    """Returns the tokens that the images of the first rows need, with few words beside them.

    Raises DataError for a chat template that has no form for an image.
    """
    made = list(_synthetic(0, 1, "", parameters))
    for files, count in ((original.data.train_files, TRAIN_ROWS), (original.data.val_files, VAL_ROWS)):
        for file in filter(os.path.isfile, files):
            made += _read(file, count, tokenizer, parameters)
    try:
        return max(_length_shown(row, tokenizer, parameters) for row in made)
    except BadRow as problem:
        raise DataError(f"no row with an image can be a prompt of this model: {problem}") from None


def _ids(messages: list[dict[str, Any]], tokenizer: ChatTokenizer, arguments: Row) -> list[int]:
    out = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False, **arguments
    )
    return list(out["input_ids"] if isinstance(out, Mapping) else out)


def write_rows(file: Path, rows: Sequence[Row], image_key: str = "") -> None:
    """Writes rows as a JSONL file, and the encoded images of their column `image_key` as files beside it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    if image_key:
        rows = [row | {image_key: [_kept(file.parent, image) for image in row[image_key]]} for row in rows]
    file.write_text("".join(json.dumps(row, default=str) + "\n" for row in rows), encoding="utf-8")


def _kept(folder: Path, image: bytes) -> str:
    """Writes an image and returns its path in the folder."""
    name = Path("images") / hashlib.blake2b(image, digest_size=16).hexdigest()
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(image)
    return str(name)


def synthetic_source(config: RunConfig) -> str:
    """Returns a data source that `reward.function: auto` has a rule for.

    It has parts where the configuration asks for parts.
    """
    asks_for_parts = (
        config.algorithm.filter_groups.metric not in ("score", "reward") or config.algorithm.gdpo_reward_keys
    )
    if asks_for_parts:
        return "math_dapo"
    return "openai/gsm8k"


def _rows(original: RunConfig, work: WorkFolder, tokenizer: Any, parameters: PromptParameters) -> list[str]:
    said = []
    source = synthetic_source(original)
    shown = "" if parameters.images is None else parameters.image_key
    kinds = (
        ("train", original.data.train_files, TRAIN_ROWS, 0),
        ("val", original.data.val_files, VAL_ROWS, VALIDATION),
    )
    for kind, files, count, first in kinds:
        made = []
        if files or kind == "train":
            made = rows_of(files, count, tokenizer, parameters, source, first)
        for number, rows in enumerate(made):
            write_rows(work.rows(kind, number), rows.rows, shown)
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
