"""Rules of the loop, learning rate schedules, names of rewards and loggers, and of files that a configuration names.

Files are checked only where the run is to start: a preset is legal on a machine without its data.
"""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path

from mrl.algo.own_functions import registered_names
from mrl.config.distillation_rules import DISTILLATION_PATH_RULES
from mrl.config.lora_rules import LORA_PATH_RULES
from mrl.config.rule_row import Rule, RuleRow, on_only_where
from mrl.config.schema import RunConfig, TrainerConfig
from mrl.config.speculation_rules import SPECULATION_PATH_RULES
from mrl.config.vision_rules import VISION_PATH_RULES
from mrl.data.template_date import ASKED
from mrl.errors import MrlError, Violation, did_you_mean
from mrl.model import ModelSpec
from mrl.model.hf_files import other_architecture
from mrl.model.hub import hub_name
from mrl.model.registry import has_tokenizer, stop_token_ids
from mrl.plain_files import read_text
from mrl.platforms.hosting import get_hosting
from mrl.record.redact import HIDDEN
from mrl.record.sinks import VIEWS
from mrl.reward.builtin_rules import RULES
from mrl.reward.resolve import AUTO
from mrl.units import MIB

_REWARDS = (AUTO, *RULES)
_LOGGERS = ("jsonl", *VIEWS)
_LOSS = "algorithm.policy_loss.custom.path"
_ADVANTAGE = "algorithm.custom_advantage.path"


def _rewards(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    if config.reward.custom_reward_function is None and config.reward.function not in _REWARDS:
        rule = f"is no built-in reward; {did_you_mean(config.reward.function, _REWARDS)}"
        yield Violation(
            "reward.function", rule, "a function of your own goes under reward.custom_reward_function", _REWARDS
        )


def _bonus(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    for name in config.reward.bonus_rules:
        if name not in RULES:
            yield Violation(
                "reward.bonus_rules",
                f"{name} is no built-in rule; {did_you_mean(name, tuple(RULES))}",
                "",
                tuple(RULES),
            )


def _loggers(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    for name in config.trainer.logger:
        if name not in _LOGGERS:
            rule = f"{name} is no logger; {did_you_mean(name, _LOGGERS)}"
            yield Violation("trainer.logger", rule, "each is a view of the metrics", _LOGGERS)


def _left_out(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    custom = config.reward.custom_reward_function
    for name, value in (custom.reward_kwargs if custom else {}).items():
        if value == HIDDEN:
            rule = f"{name} is the placeholder that a run stores in place of a secret"
            why = "give it again, or better a variable that reward.environment names and the function reads"
            yield Violation("reward.custom_reward_function.reward_kwargs", rule, why)


def _mixing(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    weights = config.data.train_weights
    files = config.data.train_files
    if weights and len(weights) != len(files):
        rule = f"has {len(weights)} weights for {len(files)} train_files"
        yield Violation("data.train_weights", rule, "each file needs one weight, in the same order")


def _warmup(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    optim = config.actor.optim
    if optim.lr_decay_steps is not None or optim.lr_decay_style == "constant":
        return
    total = config.total_updates
    if total is not None and optim.lr_warmup_steps >= total:
        why = f"the rate decays over all {total} updates of the run, and warm-up is part of them"
        yield Violation("actor.optim.lr_warmup_steps", f"must be less than {total}", why, (0, total - 1))


# rules of the actor's learning rate schedule, which critic_rules.py applies to the critic's too
OPTIM_RULES = (
    RuleRow(
        "actor.optim.min_lr",
        lambda c, m: c.actor.optim.min_lr > c.actor.optim.lr,
        "must be at most actor.optim.lr = {c.actor.optim.lr:g}",
        "the rate decays towards it",
        lambda c, m: (0.0, c.actor.optim.lr),
    ),
    RuleRow(
        "actor.optim.lr_warmup_init",
        lambda c, m: (
            c.actor.optim.lr_warmup_init > 0
            and not (c.actor.optim.lr_warmup_steps or c.actor.optim.lr_warmup_steps_ratio)
        ),
        "must be 0 without actor.optim.lr_warmup_steps",
        "there is no warm-up that would begin with it",
        (0.0,),
    ),
    RuleRow(
        "actor.optim.lr_warmup_init",
        lambda c, m: c.actor.optim.lr_warmup_init > c.actor.optim.lr,
        "must be at most actor.optim.lr = {c.actor.optim.lr:g}",
        "the rate rises from it",
        lambda c, m: (0.0, c.actor.optim.lr),
    ),
    RuleRow(
        "actor.optim.lr_warmup_steps_ratio",
        lambda c, m: c.actor.optim.lr_warmup_steps_ratio > 0 and c.actor.optim.lr_warmup_steps > 0,
        "must be 0 beside actor.optim.lr_warmup_steps = {c.actor.optim.lr_warmup_steps}",
        "there is one warm-up",
        (0.0,),
    ),
    RuleRow(
        "actor.optim.lr_decay_steps",
        lambda c, m: (
            c.actor.optim.lr_decay_steps is not None and c.actor.optim.lr_decay_steps <= c.actor.optim.lr_warmup_steps
        ),
        "must be more than lr_warmup_steps = {c.actor.optim.lr_warmup_steps}",
        "warm-up counts as part of the decay",
        lambda c, m: (c.actor.optim.lr_warmup_steps + 1,),
    ),
    _warmup,
)
_PROFILE = "record.profile"


def _profiler(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    """Refuses a profiler that is not started on the device."""
    profile, device = config.record.profile, config.cluster.device
    if not profile.steps or profile.tool in (tools := get_hosting(device).profilers):
        return
    why = "no other profiler is started on this device"
    if tools:
        yield Violation(f"{_PROFILE}.tool", f"must be {' or '.join(tools)} with cluster.device {device}", why, tools)
    else:
        yield Violation(f"{_PROFILE}.steps", f"must be empty with cluster.device {device}", why, ((),))


RUN_RULES = (
    *OPTIM_RULES,
    on_only_where(
        "trainer.val_only",
        lambda c, m: c.trainer.val_before_train and bool(c.data.val_files),
        "needs trainer.val_before_train: true and data.val_files",
        "the run would end without having done anything",
    ),
    on_only_where(
        "record.routes",
        lambda c, m: c.actor.router_replay == "R3" and c.record.samples != "none",
        "needs actor.router_replay: R3 and record.samples",
        "engines return routes only for that, and they are kept beside the samples",
    ),
    on_only_where(
        "record.trainer_log_probs",
        lambda c, m: c.record.samples != "none",
        "needs record.samples",
        "they are kept beside the samples",
    ),
    _profiler,
    RuleRow(
        f"{_PROFILE}.ranks",
        lambda c, m: bool(c.record.profile.ranks) and max(c.record.profile.ranks) >= c.actor.layout.world_size,
        "must be below actor.layout.world_size = {c.actor.layout.world_size}",
        "there are no other ranks",
        lambda c, m: (0, c.actor.layout.world_size - 1),
    ),
    RuleRow(
        "data.val_files",
        lambda c, m: c.trainer.test_freq >= 1 and not c.data.val_files,
        "must name a file with trainer.test_freq = {c.trainer.test_freq}",
        "there is nothing to validate on",
    ),
    _rewards,
    _bonus,
    _left_out,
    RuleRow(
        "reward.reward_manager",
        lambda c, m: c.reward.reward_manager == "naive" and c.algorithm.overlong_buffer.enable,
        "must not be naive with algorithm.overlong_buffer",
        "verl's naive manager pays no overlong penalty; leave reward_manager out to have both",
        ("dapo", None),
    ),
    _mixing,
    RuleRow(
        "data.train_max_samples",
        lambda c, m: c.data.train_max_samples is not None and c.data.train_max_samples < c.data.prompts_at_a_time,
        "must be at least the prompts of a step = {c.data.prompts_at_a_time}",
        "those are data.gen_batch_size, or data.train_batch_size",
        lambda c, m: (c.data.prompts_at_a_time,),
    ),
    _loggers,
    RuleRow(
        "trainer.resume_from_path",
        lambda c, m: c.trainer.resume_mode == "resume_path" and c.trainer.resume_from_path is None,
        "must be set with trainer.resume_mode: resume_path",
        "there is no checkpoint to begin from",
    ),
    RuleRow(
        "trainer.resume_mode",
        lambda c, m: c.trainer.resume_mode != "resume_path" and c.trainer.resume_from_path is not None,
        "must be resume_path with trainer.resume_from_path",
        "the named checkpoint would be ignored silently",
        ("resume_path",),
    ),
)


def run_dir(trainer: TrainerConfig) -> Path:
    """Returns the folder that the run writes into: trainer.run_dir, or else runs/<experiment_name>."""
    return Path(trainer.run_dir or Path("runs") / trainer.experiment_name)


def _reward_file(config: RunConfig) -> tuple[str, ...]:
    custom = config.reward.custom_reward_function
    if custom is None:
        return ()
    return (custom.path,)


def _loss_file(config: RunConfig) -> tuple[str, ...]:
    custom = config.algorithm.policy_loss.custom
    if custom is None:
        return ()
    return (custom.path,)


def _advantage_file(config: RunConfig) -> tuple[str, ...]:
    custom = config.algorithm.custom_advantage
    if custom is None:
        return ()
    return (custom.path,)


def _tools_file(config: RunConfig) -> tuple[str, ...]:
    turns = config.rollout.turns
    if turns is None or turns.path is None:
        return ()
    return (turns.path,)


def _agent_file(config: RunConfig) -> tuple[str, ...]:
    agent = config.rollout.agent
    if agent is None or agent.path is None:
        return ()
    return (agent.path,)


def _index_file(config: RunConfig) -> tuple[str, ...]:
    turns = config.rollout.turns
    if turns is None or turns.index is None:
        return ()
    return (turns.index,)


def _tool_config_file(config: RunConfig) -> tuple[str, ...]:
    turns = config.rollout.turns
    if turns is None or turns.tool_config_path is None:
        return ()
    return (turns.tool_config_path,)


def _reference_folder(config: RunConfig) -> tuple[str, ...]:
    """Returns the reference model's folder where it is used and is no name on the hub."""
    path = None
    if config.algorithm.needs_reference:
        path = config.ref.path
    if path is None or hub_name(path) is not None:
        return ()
    return (path,)


def _teacher_folder(config: RunConfig) -> tuple[str, ...]:
    """Returns the teacher's folder where there is one and it is no name on the hub."""
    path = None
    if config.distillation.enabled:
        path = config.distillation.teacher_model.model_path
    if path is None or hub_name(path) is not None:
        return ()
    return (path,)


def _critic_folder(config: RunConfig) -> tuple[str, ...]:
    """Returns the folder that a critic starts from, where it is given and is no name on the hub."""
    path = config.critic.path
    if not config.algorithm.needs_critic or path is None or hub_name(path) is not None:
        return ()
    return (path,)


def _adapter_folder(config: RunConfig) -> tuple[str, ...]:
    """Returns the folder of the adapter that training starts from."""
    lora = config.actor.lora
    if not lora.rank or lora.path is None:
        return ()
    return (lora.path,)


def _tuned_folder(config: RunConfig) -> tuple[str, ...]:
    folder = config.rollout.tuned_experts
    return () if folder is None else (folder,)


def _head_folder(config: RunConfig) -> tuple[str, ...]:
    speculation = config.rollout.speculation
    if speculation is None or speculation.head is None:
        return ()
    return (speculation.method,)


def _first_checkpoint(config: RunConfig) -> tuple[str, ...]:
    folder = config.trainer.resume_from_path
    if folder is None:
        return ()
    return (folder,)


# the user's files that a run reads at its start, by key
_FILES: dict[str, Callable[[RunConfig], tuple[str, ...]]] = {
    "data.train_files": lambda c: c.data.train_files,
    "data.val_files": lambda c: c.data.val_files,
    "reward.custom_reward_function.path": _reward_file,
    _LOSS: _loss_file,
    _ADVANTAGE: _advantage_file,
    "rollout.turns.path": _tools_file,
    "rollout.turns.index": _index_file,
    "rollout.turns.tool_config_path": _tool_config_file,
    "rollout.agent.path": _agent_file,
}
# the folders that it reads, except model.path
_FOLDERS: dict[str, Callable[[RunConfig], tuple[str, ...]]] = {
    "ref.path": _reference_folder,
    "distillation.teacher_model.model_path": _teacher_folder,
    "critic.path": _critic_folder,
    "actor.lora.path": _adapter_folder,
    "rollout.tuned_experts": _tuned_folder,
    "rollout.speculation.method": _head_folder,
    "trainer.resume_from_path": _first_checkpoint,
}
_PATHS = _FILES | _FOLDERS
_TEMPLATES = ("chat_template.jinja", "tokenizer_config.json")
_TEMPLATE_BYTES = 64 * MIB
_DATE_ARGUMENT = "date_string"  # of Llama's templates, which ask the function only without it


def _missing(field: str, config: RunConfig, seen: bool | None) -> Iterator[Violation]:
    """Yields a violation for each path of a key that cannot be read.

    With `seen` only those are judged whose parent folder is (True) or is not (False) on this host.
    """
    for path in _PATHS[field](config):
        meant = _meant(path)
        unread = _unread(path)
        judged = _has_folder_here(path) or meant is not None or unread is not None
        if _is_there(field, path) or seen not in (None, judged):
            continue
        named = ""
        if field.startswith("data."):
            named = f"{path} "
        what = "is not a file that can be read"
        if field in _FOLDERS:
            what = "is no folder"
        why = ""
        if not Path(path).is_absolute():
            why = f"a relative path starts at the current directory, {Path.cwd()}"
        if meant is not None:
            why = f"did you mean {meant}?"
        yield Violation(field, f"{named}{what}", unread or why)


def _unread(path: str) -> str | None:
    """Returns why what is written in place of a path is none on any host; None where it may be one."""
    if re.search(r"(^|/)\$[A-Za-z_{(]", path):
        return (
            "variables of a shell are not read in a file: write the path, or give it by --set, where a shell reads it"
        )
    if re.match(r"\s*\[\s*['\"]", path):
        return "it is a list in quotes: leave out those around the whole"
    if re.match(r"[A-Za-z][\w+.-]*://", path):
        return "it is a URL, and none but a model's (hf://ORG/NAME) is read: give the path of a copy or mounted folder"
    return None


def _is_there(field: str, path: str) -> bool:
    if field in _FOLDERS:
        return os.path.isdir(path)
    return _readable(path)


def _has_folder_here(path: str) -> bool:
    return Path(path).absolute().parent.is_dir()


def _meant(path: str) -> Path | None:
    """Returns the path that is here where the name of one folder in `path` is misspelt, else None.

    A folder that is on no host but the run's has no such neighbour.
    """
    whole = Path(path)
    here = next(folder for folder in whole.absolute().parents if folder.is_dir())
    wrong, *rest = whole.absolute().relative_to(here).parts
    if not rest:
        return None
    with suppress(OSError):
        beside = get_close_matches(wrong, [entry.name for entry in here.iterdir()], 3, 0.7)
        return next((found for name in beside if (found := here.joinpath(name, *rest)).exists()), None)
    return None


def named_paths(config: RunConfig) -> list[tuple[str, str]]:
    """Returns (key, path) of each file and folder that a run reads at its start, except model.path."""
    return [(field, path) for field, paths in _PATHS.items() for path in paths(config)]


def _path_rule(field: str, seen: bool | None) -> Rule:
    return lambda config, _: _missing(field, config, seen)


def unseen_files(config: RunConfig) -> list[str]:
    """Returns lines about paths whose folders are not on this host, so that they could not be checked.

    One more line says so where no file of prompts is named.
    """
    lines = []
    if not config.data.train_files:
        lines = ["data.train_files names no file, and mrl train wants prompts"]
    lost = [(field, path) for field, path in named_paths(config) if not _is_there(field, path)]
    unseen = [
        f"{field}: {path}" for field, path in lost if not (_has_folder_here(path) or _meant(path) or _unread(path))
    ]
    if unseen:
        lines.append(f"not looked at, as their folders are not on this host: {', '.join(unseen)}")
    return lines


def writes_date(config: RunConfig) -> bool:
    """Tells whether the chat template writes the day's date, as those of gpt-oss and Llama-3.2 do."""
    given = config.data.apply_chat_template_kwargs
    text = _template(config)
    return ASKED in text and not (_DATE_ARGUMENT in text and _DATE_ARGUMENT in given)


def _template(config: RunConfig) -> str:
    """Returns the text of the chat template; empty where none is at hand."""
    folder = Path(config.model.path)
    given = config.data.apply_chat_template_kwargs.get("chat_template")
    return str(given or next(filter(None, map(_text, map(folder.joinpath, _TEMPLATES))), ""))


def template_notes(config: RunConfig) -> Iterator[str]:
    """Yields a note where prompts differ between runs that began on different days, or a given day is not read."""
    if config.data.template_date is not None:
        if _template(config) and not writes_date(config):
            yield f"data.template_date = {config.data.template_date} is not read: the chat template writes no date"
    elif writes_date(config):
        yield (
            f"data.template_date: the chat template writes a date into prompts ({ASKED}), and a run keeps that of its "
            "first start; give one to compare runs of several days"
        )


def _text(file: Path) -> str:
    try:
        return read_text(file, _TEMPLATE_BYTES, errors="replace")
    except (OSError, ValueError):
        return ""


def _readable(file: str) -> bool:
    return os.path.isfile(file) and os.access(file, os.R_OK)


def _registered_loss(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    loss = config.algorithm.policy_loss
    if loss.custom is not None and _readable(loss.custom.path):
        yield from _registered(_LOSS, loss.custom.path, "register_loss", loss.loss_mode)


def _registered_advantage(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    custom = config.algorithm.custom_advantage
    if custom is not None and _readable(custom.path):
        yield from _registered(_ADVANTAGE, custom.path, "register_advantage", config.algorithm.adv_estimator)


def _registered(field: str, file: str, decorator: str, wanted: str) -> Iterator[Violation]:
    """Refuses a file that is no Python, or whose text registers other names than the wanted one."""
    try:
        names = registered_names(Path(file), decorator)
    except SyntaxError as error:
        yield Violation(field, f"is no Python: {error.msg} (line {error.lineno})")
        return
    if names is not None and wanted not in names:
        why = f'put @{decorator}("{wanted}") on the function'
        yield Violation(field, f"registers {', '.join(names) or 'nothing'}, not {wanted}", why)


def _same_architecture(field: str) -> Rule:
    """Builds the rule that a model's folder on this host has the actor's architecture."""

    def judge(config: RunConfig, model: ModelSpec) -> Iterator[Violation]:
        for folder in filter(os.path.isdir, _FOLDERS[field](config)):
            try:
                differing = other_architecture(folder, model)
            except MrlError as error:
                yield Violation(field, f"cannot be used: {error}")
                return
            if differing:
                rule = f"is another architecture than model.path's ({differing})"
                yield Violation(field, rule, "give a checkpoint of the same one")

    return judge


def _ends(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    """Refuses what ends no response."""
    if os.path.isdir(config.model.path):
        try:
            stop_token_ids(config.model.path)
        except MrlError as error:
            yield Violation("model.path", f"cannot be used: {error}")


def _writable(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    folder = run_dir(config.trainer).absolute()
    why = "the run writes its checkpoints and metrics there"
    existing = next(p for p in (folder, *folder.parents) if os.path.exists(p))
    if unread := _unread(config.trainer.run_dir or str(run_dir(config.trainer))):
        yield Violation("trainer.run_dir", "is no folder", unread)
    elif not existing.is_dir():
        yield Violation("trainer.run_dir", f"cannot be made: {existing} is a file", why)
    elif not os.access(existing, os.W_OK | os.X_OK):
        yield Violation("trainer.run_dir", f"cannot be written: no permission in {existing}", why)


_HERE = (
    _ends,
    _registered_loss,
    _registered_advantage,
    *map(_same_architecture, ("ref.path", "critic.path")),
    *LORA_PATH_RULES,
    *DISTILLATION_PATH_RULES,
    *SPECULATION_PATH_RULES,
    *VISION_PATH_RULES,
    _writable,
)
# Rules of files and folders that a configuration names: PATH_RULES hold where the run is to start, SEEN_RULES on any
# host, where parent folders may be missing.
PATH_RULES = (
    RuleRow(
        "data.train_files",
        lambda c, m: not c.data.train_files,
        "must name a file",
        "training needs prompts; --set data.train_files=[FILE, ...]",
    ),
    RuleRow(
        "model.path",
        lambda c, m: os.path.isdir(c.model.path) and not has_tokenizer(c.model.path),
        "must have a tokenizer",
        "put tokenizer.json there, as it came with the model",
    ),
    *(_path_rule(field, None) for field in _PATHS),
    *_HERE,
)
SEEN_RULES = (*(_path_rule(field, True) for field in _PATHS), *_HERE)
