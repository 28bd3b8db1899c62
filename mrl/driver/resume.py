"""Finds the point from which a run continues, checks that its checkpoint agrees, and rewinds the run directory to it.

No torch, no Ray.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mrl.checkpoint.manifest import HF_FOLDER, MANIFEST, Manifest, changed_files, facts_of, read_manifest
from mrl.checkpoint.open_checkpoint import step_folder
from mrl.checkpoint.step_folders import Newest, finish_replacements, newest_checkpoint, set_aside
from mrl.checkpoint.vision_tower import check_same_tower
from mrl.config.load import ResolvedConfig, load_config
from mrl.config.run_rules import run_dir as run_dir_of
from mrl.config.run_rules import writes_date
from mrl.config.schedule_rules import schedule_of
from mrl.config.schema import ModelConfig, RunConfig, TrainerConfig, leaf, with_values
from mrl.config.schema_actor import LoraConfig
from mrl.config.schema_algorithm import KlControlConfig
from mrl.data.order import DataCursor
from mrl.errors import ConfigError, DataError, EnvironmentFault, MrlError, NothingToDo
from mrl.generate.sampled_by import new_name
from mrl.generate.train_state import TrainState
from mrl.model import load_model_spec, model_spec
from mrl.model.adapters import adapted_modules
from mrl.model.peft_files import WEIGHTS, adapter_digest, base_digest, tower_digest
from mrl.model.trained_tower import PROJECTOR, TRAINED
from mrl.model.vocabularies import TOKENIZER, differing_tokens, vocabulary
from mrl.plain_files import read_json
from mrl.record.attempts import AttemptNotes, generated_after
from mrl.record.run_dir import RunDir, read_metrics
from mrl.record.sinks import JsonlSink
from mrl.schedule.ledger import Ledger, check_goes_on
from mrl.schedule.staleness import Schedule

# the order of prompts and the samples of a step depend on these, so a resumed run keeps them
FIXED = (
    "trainer.seed",
    "trainer.schedule",
    "data.shuffle",
    "data.train_weights",
    "data.template_date",
    "data.train_batch_size",
    "data.gen_batch_size",
    "rollout.n",
)


# also decide which weights generate which token, if generation runs ahead
FIXED_AHEAD = (
    "trainer.order",
    "algorithm.filter_groups.enable",
    "trainer.max_staleness",
    "trainer.partial_rollouts",
    "trainer.segment_tokens",
    "data.max_response_length",
)


@dataclass(frozen=True)
class RunIdentity:
    """The properties that a checkpoint and the run continuing from it must have in common."""

    model: ModelConfig
    fixed: Mapping[str, Any]  # values of FIXED by key, as in JSON
    schedule: Schedule
    adapters: Mapping[str, Any] = field(default_factory=dict)  # as in a manifest; empty if weights are trained
    has_critic: bool = False
    tower: str | None = None  # digest of a frozen vision tower in model.path
    trains_predicting: bool = False  # a predicting layer is trained along, which the checkpoint has among the weights

    @classmethod
    def of(cls, config: RunConfig) -> "RunIdentity":
        """Returns the identity of a run with this configuration. Raises EnvironmentFault if the adapters' base, or
        a frozen vision tower, is unreadable.
        """
        keys = FIXED if config.trainer.schedule == "sync" else (*FIXED, *FIXED_AHEAD)
        values = {key: leaf(config, key) for key in keys}
        fixed = {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
        return cls(
            config.model,
            fixed,
            schedule_of(config),
            _adapters_of(config.actor.lora, config.model.path),
            config.algorithm.needs_critic,
            tower_digest(config.model.path) if config.model.vision == "frozen" else None,
            config.actor.mtp.train,
        )

    def going_on(self, point: Newest | None) -> "RunIdentity":
        """Returns the identity of the run that continues from `point`, with the initial adapters of `point`."""
        if not self.adapters or point is None or point.manifest is None or not point.manifest.adapters:
            return self
        return replace(self, adapters={**self.adapters, "start": point.manifest.adapters["start"]})


def _adapters_of(given: LoraConfig, model: str) -> dict[str, Any]:
    lora = given.adapters
    if lora is None:
        return {}
    base = {"path": str(Path(model).resolve()), "digest": base_digest(model)}
    return {
        "rank": lora.rank,
        "alpha": lora.alpha,
        "target_modules": list(adapted_modules(load_model_spec(model), lora)),
        "dropout": given.dropout,
        "base": base,
        "start": _start_of(given.path),
    }


def _start_of(path: str | None) -> dict[str, str] | None:
    """Returns path and digest of the initial adapter; None without one, or if its folder no longer exists."""
    if path is None or not (Path(path) / WEIGHTS).is_file():
        return None
    return {"path": str(Path(path).resolve()), "digest": adapter_digest(path)}


def goes_on(trainer: TrainerConfig, asked: bool) -> bool:
    """Tells whether the run in the run directory is continued.

    It is if `asked`, or if resume_mode is auto and the directory has a run.
    """
    return asked or (trainer.resume_mode == "auto" and RunDir(run_dir_of(trainer)).config.is_file())


def without_first_adapter(resolved: ResolvedConfig, resume: bool) -> ResolvedConfig:
    """Returns the configuration without actor.lora.path if a checkpoint has the adapters to continue with."""
    trainer = resolved.config.trainer
    if resolved.config.actor.lora.path is None:
        return resolved
    begins_with_one = trainer.resume_mode == "resume_path"
    if resume and not begins_with_one:
        begins_with_one = newest_checkpoint(RunDir(run_dir_of(trainer)).checkpoints).manifest is not None
    if begins_with_one:
        return replace(resolved, config=with_values(resolved.config, {"actor.lora.path": None}))
    return resolved


def begun_in(trainer: TrainerConfig, resume: bool) -> str | Path | None:
    """Returns the folder of the run or the checkpoint that this start continues; None for a new run."""
    return run_dir_of(trainer) if resume else trainer.resume_from_path


def with_template_date(resolved: ResolvedConfig, begun: str | Path | None) -> ResolvedConfig:
    """Returns the configuration with the day that a chat template writes, where none is given.

    It is the day of `begun`, a run directory or a checkpoint, wherever it lies and whatever template is at hand. For a
    new run it is today, if the template asks for one.
    """
    if resolved.config.data.template_date is not None:
        return resolved
    day = begun and _recorded_date(Path(begun).absolute())
    if not day:
        if not writes_date(resolved.config):
            return resolved
        day = date.today().isoformat()
    return replace(resolved, config=with_values(resolved.config, {"data.template_date": day}))


def _recorded_date(begun: Path) -> str | None:
    """Returns None for a folder that no run has recorded, a run without a date, or files of another version."""
    with suppress(OSError, ValueError, LookupError, TypeError):
        return read_json(begun / MANIFEST)["trainer"]["fixed"]["data.template_date"]
    with suppress(MrlError):
        return load_config(RunDir(begun).config).config.data.template_date
    return None


def resume_note(trainer: TrainerConfig, resume: bool) -> list[str]:
    """Returns lines about the effect of resume_mode on this start, if it is unusual."""
    folder = run_dir_of(trainer)
    if trainer.resume_mode == "auto":
        return [
            f"trainer.resume_mode auto: {folder} holds "
            + ("a run, which goes on" if resume else "no run; a new one begins")
        ]
    if trainer.resume_mode == "resume_path" and not resume:
        return [f"trainer.resume_mode resume_path: a new run in {folder} begins from {trainer.resume_from_path}"]
    return []


def find_resume_point(
    trainer: TrainerConfig,
    identity: RunIdentity,
    run_dir: Path,
    resume: bool,
    damaged: Mapping[Path, EnvironmentFault] = MappingProxyType({}),
) -> Newest | None:
    """Returns the newest complete checkpoint with its manifest; without a manifest for a run that saved none and
    restarts.

    Without `resume`, or if the run has none of its own, this is the checkpoint of resume_mode: resume_path. Returns
    None for a new run. Manifests and sizes are checked here, and all bytes by the ranks that load them. `damaged`:
    faults that ranks found at an earlier attempt.

    Raises EnvironmentFault if all checkpoints are damaged. Raises ConfigError if the newest one has another model than
    `identity`, or other values of FIXED.
    """
    names_one = trainer.resume_mode == "resume_path"
    if not resume and not names_one:
        return None
    newest = newest_checkpoint(RunDir(run_dir).checkpoints, damaged) if resume else _named(trainer.resume_from_path)
    if names_one and newest.manifest is None and not newest.damaged:  # the run has not saved anything of its own
        newest = _named(trainer.resume_from_path)
    if newest.manifest is not None:
        _check_same_model(identity, newest.manifest, newest.path)
        check_same_tower(f"model.path: {identity.model.path}", identity.tower, newest.manifest, newest.path)
        _check_same_adapters(identity, newest.manifest, newest.path)
        _check_same_critic(identity, newest.manifest, newest.path)
        _check_same_values(identity.fixed, newest.manifest, newest.path)
        _check_same_tokenizer(Path(identity.model.path), newest.manifest, newest.path)
    elif newest.damaged:
        raise next(iter(newest.damaged.values()))
    return newest


def _named(path: str) -> Newest:
    """Returns the checkpoint that a configuration names.

    Raises EnvironmentFault for another kind of folder, or if files are missing.
    """
    folder = step_folder(Path(path)).resolve()
    return Newest(folder, read_manifest(folder), {})


def new_run(manifest: Manifest) -> str:
    """Describes the alternative if a run cannot continue from a checkpoint: what it keeps and loses.

    No option forces such a run.
    """
    lost = ["the optimizer's moments", f"the count of steps ({manifest.step}) that learning rates follow"]
    if manifest.trainer.get("cursor"):
        lost.append(f"the place in the data (epoch {manifest.trainer['cursor']['epoch']})")
    if manifest.critic:
        lost.append("the critic")
    if "ahead" in manifest.trainer:
        lost.append("the responses on their way")
    return (
        "start a new run from an export of the checkpoint (mrl convert megatron-to-hf), which keeps its weights and "
        f"loses {', '.join(lost)}"
    )


def _check_same_values(fixed: Mapping[str, Any], manifest: Manifest, folder: Path) -> None:
    if manifest.weights_only:
        raise ConfigError(
            f"{folder} was converted from weights alone and belongs to no run: start a new one with the Hugging Face "
            "checkpoint as model.path (mrl convert megatron-to-hf writes one from this)"
        )
    then = {"trainer.schedule": "sync"} | manifest.trainer["fixed"]  # a checkpoint may be older than a key
    differing = [(key, now) for key, now in fixed.items() if now != then.get(key, now)]
    changed = [f"{key}: {now}, and {folder} was trained with {then[key]}" for key, now in differing]
    if changed:
        raise ConfigError(
            f"{'; '.join(changed)}. The place in the data and the samples of a step follow from them: give the run's "
            f"own values, or {new_run(manifest)}"
        )


def _check_same_model(identity: RunIdentity, manifest: Manifest, folder: Path) -> None:
    model = identity.model
    then = model_spec(manifest.hf_config)
    if bool(then.predicting_layers) != identity.trains_predicting:
        if manifest.weights_only:
            raise ConfigError(
                f"actor.mtp.train: {identity.trains_predicting}, and {folder} was converted from weights alone, "
                "without a predicting layer: start anew with the Hugging Face checkpoint as model.path, which has one"
            )
        has = "has" if then.predicting_layers else "lacks"
        raise ConfigError(
            f"actor.mtp.train: {identity.trains_predicting}, and {folder} {has} a predicting layer with its optimizer: "
            f"give the run's own actor.mtp.train, or {new_run(manifest)}"
        )
    if (model.vision in (TRAINED, PROJECTOR)) != (manifest.vision is not None):
        had = "a vision tower among its weights" if manifest.vision else "the text model's weights alone"
        raise ConfigError(
            f"model.vision: {model.vision}, and {folder} has {had}; set it to {manifest.vision or 'frozen, or null'}"
        )
    if then.holding(False) != load_model_spec(model.path):
        raise ConfigError(
            f"model.path: {model.path} is another model than the one in {folder}; give the run's own model.path"
        )
    if manifest.dtype != model.dtype:
        raise ConfigError(
            f"model.dtype: {model.dtype}, and the weights in {folder} are {manifest.dtype}; set it to that"
        )


def _check_same_adapters(identity: RunIdentity, manifest: Manifest, folder: Path) -> None:
    """Raises ConfigError if the adapters differ from the checkpoint's, or belong to another model."""
    now = identity.adapters
    then = manifest.adapters
    if bool(now) != bool(then):
        what = (
            "has adapters alone and actor.lora.rank is 0" if then else "has whole weights and actor.lora.rank is not 0"
        )
        raise ConfigError(f"{folder} {what}: give the run's own actor.lora, or {new_run(manifest)}")
    for name in ("rank", "alpha", "target_modules"):
        if now and now[name] != then.get(name):
            raise ConfigError(
                f"actor.lora.{name}: {now[name]}, and the adapters in {folder} have {then.get(name)}; set it to that"
            )
    if now and now["start"] and not _same_start(now["start"], then["start"]):
        raise ConfigError(
            f"actor.lora.path: {now['start']['path']} is not the adapter that training began with in {folder}, whose "
            "adapters go on as they are; leave the key out"
        )
    if now and now["base"]["digest"] != then["base"]["digest"]:
        raise ConfigError(
            f"model.path: {now['base']['path']} has other weights than the model that the adapters in {folder} were "
            f"trained on, by its digest; give the weights that {then['base']['path']} had then"
        )


def _same_start(now: Mapping[str, str], then: Mapping[str, str] | None) -> bool:
    return then is not None and now["digest"] == then["digest"]


def _check_same_critic(identity: RunIdentity, manifest: Manifest, folder: Path) -> None:
    """Raises ConfigError if only one of checkpoint and run has a critic."""
    if identity.has_critic == bool(manifest.critic):
        return
    now = "has no critic and algorithm.adv_estimator needs one"
    if manifest.critic:
        now = "has a critic and algorithm.adv_estimator reads none"
    raise ConfigError(f"{folder} {now}: give the run's own algorithm.adv_estimator, or {new_run(manifest)}")


def _check_same_tokenizer(model: Path, manifest: Manifest, folder: Path) -> None:
    """Raises ConfigError if the model's tokens differ from those that the checkpoint was trained on."""
    then = folder / HF_FOLDER / TOKENIZER
    now = model / TOKENIZER
    written = manifest.hf_files.get(TOKENIZER)
    if not (then.is_file() and now.is_file()) or facts_of(now.read_bytes()) == written:
        return
    if written is not None and facts_of(then.read_bytes()) != written:  # damaged later, which another check reports
        return
    if differing := differing_tokens(vocabulary(then), vocabulary(now)):
        raise ConfigError(
            f"model.path: the tokenizer in {model} has other tokens than the one that {folder} was trained with: "
            f"{differing}. What the model has learned of a number would be read as another token: give the run's own "
            f"tokenizer, or {new_run(manifest)}"
        )


def resume_point(
    trainer: TrainerConfig,
    identity: RunIdentity,
    path: Path,
    resume: bool,
    damaged: Mapping[Path, EnvironmentFault],
    data_fingerprint: str,
) -> Newest | None:
    """Finds the checkpoint to resume from and checks that the data is the same. Writes nothing.

    Raises NothingToDo if the run in `path` has finished its last step, by its record and its checkpoint's manifest.
    """
    point = find_resume_point(trainer, identity, path, resume, damaged)
    if point is None or point.manifest is None:
        return point
    check_same_prompts(identity, point, data_fingerprint)
    total = trainer.total_training_steps
    lines = read_metrics(RunDir(path).metrics)
    if point.manifest.step >= total and lines and lines[-1]["training/global_step"] >= point.manifest.step:
        raise NothingToDo(
            f"{path} has {point.manifest.step} steps already, of the {total} of "
            "trainer.total_training_steps; raise it to train on"
        )
    return point


def check_same_prompts(identity: RunIdentity, point: Newest, data_fingerprint: str) -> None:
    """Raises DataError if a checkpoint was trained on other prompts, or has live groups of another schedule.

    Raises ConfigError if live groups are missing.
    """
    _check_same_data(point.manifest, data_fingerprint, point.path)
    _check_same_groups(identity, point.manifest, point.path)


def resumed_state(point: Newest | None, control: KlControlConfig) -> TrainState:
    """Returns the state from which the run continues; the initial state without a checkpoint.

    The checkpoint's weight of a KL in the reward goes on only where `control` is adaptive.
    """
    if point is None or point.manifest is None:
        return TrainState()
    trainer = point.manifest.trainer
    weights = trainer.get("weights") or new_name()  # converted weights have none
    cursor = DataCursor(**trainer["cursor"])
    kl_coef = trainer.get("kl_coef") if control.type == "adaptive" else None
    return TrainState(point.manifest.step, cursor, weights=weights, kl_coef=kl_coef)


def rewind(run_dir: RunDir, point: Newest | None) -> None:
    """Removes records after the checkpoint, and moves damaged checkpoints aside.

    `point`: None for a new run; without a manifest the run starts again.
    """
    if point is None:
        return
    if point.manifest is None:
        print(f"{run_dir.path} has no checkpoint yet: it starts anew")
        run_dir.truncate_metrics(-1)
        return
    run_dir.check_lock()
    for damaged, reason in point.damaged.items():
        print(f"not resumed from {damaged.name}, which is kept as {set_aside(damaged).name}: {reason}")
    for name in changed_files(point.path, point.manifest.files_for_others()):
        print(
            f"warning: {point.path / name} is not what was saved: training, which does not read it, goes on; mrl "
            "convert and mrl eval refuse this checkpoint"
        )
    finish_replacements(run_dir.checkpoints)
    run_dir.truncate_metrics(point.manifest.step)
    _restore_line(point.manifest, run_dir)


def generated_again(schedule: Schedule, run_dir: RunDir, point: Newest | None, left: int = 0) -> int:
    """Returns the number of lost responses that are generated again, and prints it if there are some.

    `left`: responses that are not lost, because a spool has them. If generation runs ahead of training, finished groups
    are kept. Then losses are those in lost_engines.jsonl.
    """
    if point is None or not schedule.is_synchronous:
        return 0
    step = 0
    if point.manifest is not None:
        step = point.manifest.step
    lost = max(0, generated_after(run_dir.path, step, schedule.responses) - left)
    if lost:
        print(f"{lost} responses of steps after {step} are lost with the earlier start, and generated again")
    return lost


def groups_again(schedule: Schedule, notes: AttemptNotes) -> Callable[[int], None]:
    """Returns what counts groups that a start found and does not use, after `generated_again` took them for not lost.

    Where generation runs ahead, that counted none of them as lost, and lost_engines.jsonl has the losses.
    """

    def note(groups: int) -> None:
        if schedule.is_synchronous:
            notes.generated_again(groups * schedule.responses)

    return note


def _check_same_data(manifest: Manifest, data_fingerprint: str, folder: Path) -> None:
    if manifest.trainer["data_fingerprint"] != data_fingerprint:
        raise DataError(
            f"{folder} was trained on other prompts than data.train_files gives now, so its place in the data means "
            "nothing here; give the same files, tokenizer and limits (and as data.template_date the day of the run's "
            f"first start, if its chat template writes one), or {new_run(manifest)}"
        )


def _check_same_groups(identity: RunIdentity, manifest: Manifest, folder: Path) -> None:
    """Raises DataError if live groups were issued by other rules, ConfigError if the checkpoint has none."""
    if identity.schedule.is_synchronous:
        return
    if "ahead" not in manifest.trainer:
        raise ConfigError(
            f"trainer.schedule: {identity.fixed['trainer.schedule']}, and {folder} has no groups on their way: "
            f"{new_run(manifest)}"
        )
    ledger = Ledger.from_json(manifest.trainer["ahead"]["ledger"])
    check_goes_on(ledger, identity.schedule)


def what_is_left(folder: Path, command: str) -> str:
    """Returns a line for a stopped run: its newest checkpoint, and the command that continues.

    `command`: the command that started it.
    """
    run_dir = RunDir(folder)
    if not run_dir.config.is_file():
        return f"nothing of the run is there yet; it begins with: {command}"
    goes_on = f"{command} --resume" if " --resume" not in command else command
    newest = newest_checkpoint(run_dir.checkpoints)
    if newest.manifest is None:
        return f"nothing is saved yet; the run begins anew in its folder with: {goes_on}"
    return f"saved: step {newest.manifest.step} in {newest.path}; it goes on with: {goes_on}"


def _restore_line(manifest: Manifest, run_dir: RunDir) -> None:
    """Restores a step's line from its checkpoint. A run that is killed between the save and the line loses the line."""
    rows = read_metrics(run_dir.metrics)
    line = manifest.trainer["metrics"]
    if line and (not rows or rows[-1]["training/global_step"] < manifest.step):
        sink = JsonlSink(run_dir.metrics, run_dir.check_lock)
        sink.write(manifest.step, line)
        sink.close()
