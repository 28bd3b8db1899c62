"""Where a run goes on: what a checkpoint must agree with; the run directory brought back to its step.

No torch, no Ray.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from mrl.checkpoint.manifest import Manifest, read_manifest
from mrl.checkpoint.open_checkpoint import step_folder
from mrl.checkpoint.step_folders import Newest, newest_checkpoint, set_aside
from mrl.config.run_rules import run_dir as run_dir_of
from mrl.config.schedule_rules import schedule_of
from mrl.config.schema import RunConfig, leaf
from mrl.data.order import DataCursor
from mrl.errors import ConfigError, DataError, EnvironmentFault, NothingToDo
from mrl.model import load_model_spec, model_spec, read_hf_config
from mrl.record.attempts import generated_after
from mrl.record.run_dir import RunDir, read_metrics
from mrl.record.sinks import JsonlSink
from mrl.schedule.ledger import Fingerprint, Ledger, check_goes_on

if TYPE_CHECKING:
    from mrl.train.kept_groups import KeptGroups

# what the order of the prompts and the samples of a step follow from: a resumed run keeps them
FIXED = (
    "trainer.seed", "trainer.schedule", "data.shuffle", "data.train_weights", "data.train_batch_size",
    "data.gen_batch_size", "rollout.n",
)  # fmt: skip


@dataclass(frozen=True)
class TrainState:
    """What a finished step leaves behind, weights aside. It is in every checkpoint."""

    step: int = 0  # steps finished; also the version of the weights
    cursor: DataCursor = field(default_factory=DataCursor)
    # groups on their way, where generation runs ahead
    ahead: "KeptGroups | None" = field(default=None, compare=False, repr=False)

    def advanced(self, cursor: DataCursor) -> "TrainState":
        """After one more update; what is on its way then, generation says."""
        return replace(self, step=self.step + 1, cursor=cursor, ahead=None)


# and the same of which weights make which token, where generation runs ahead
FIXED_AHEAD = (
    "trainer.order",
    "algorithm.filter_groups.enable",
    "trainer.max_staleness",
    "trainer.partial_rollouts",
    "trainer.segment_tokens",
    "data.max_response_length",
)


def goes_on(config: RunConfig, asked: bool) -> bool:
    """Whether the run in the run directory is continued: that is `asked` for,
    or resume_mode is auto and there is one.
    """
    return asked or (config.trainer.resume_mode == "auto" and RunDir(run_dir_of(config)).config.is_file())


def resume_note(config: RunConfig, resume: bool) -> list[str]:
    """What resume_mode made of this start, where it is not the usual one."""
    trainer, folder = config.trainer, run_dir_of(config)
    if trainer.resume_mode == "auto":
        return [
            f"trainer.resume_mode auto: {folder} holds "
            + ("a run, which goes on" if resume else "no run; a new one begins")
        ]
    if trainer.resume_mode == "resume_path" and not resume:
        return [f"trainer.resume_mode resume_path: a new run in {folder} begins from {trainer.resume_from_path}"]
    return []


def find_resume_point(
    config: RunConfig, run_dir: Path, resume: bool, damaged: Mapping[Path, EnvironmentFault] = MappingProxyType({})
) -> Newest | None:
    """The newest complete checkpoint and what it says of itself, an empty one for a run that saved none, which starts
    anew.

    Without `resume` the one that resume_mode: resume_path names; None for a run from the beginning. Manifests and
    sizes are looked at here, every byte by the ranks that load it; `damaged`: what they found at an earlier try.
    Raises EnvironmentFault when all that there are are damaged, ConfigError when the newest is of another model than
    `config`'s or was trained with other values of FIXED.
    """
    if not resume and config.trainer.resume_mode != "resume_path":
        return None
    newest = (
        newest_checkpoint(RunDir(run_dir).checkpoints, damaged) if resume else _named(config.trainer.resume_from_path)
    )
    if newest.manifest is not None:
        _check_same_model(config, newest.manifest, newest.path)
        _check_same_values(config, newest.manifest, newest.path)
    elif newest.damaged:
        raise next(iter(newest.damaged.values()))
    return newest


def _named(path: str) -> Newest:
    """The checkpoint that a configuration names. Raises EnvironmentFault where it is none, or files are missing."""
    folder = step_folder(Path(path)).resolve()
    return Newest(folder, read_manifest(folder), {})


def fixed_values(config: RunConfig) -> dict[str, Any]:
    """What a checkpoint keeps of FIXED, as JSON has it, to be compared when it is resumed."""
    keys = FIXED if config.trainer.schedule == "sync" else (*FIXED, *FIXED_AHEAD)
    values = {key: leaf(config, key) for key in keys}
    return {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}


def _check_same_values(config: RunConfig, manifest: Manifest, folder: Path) -> None:
    if manifest.weights_only:
        raise ConfigError(
            f"{folder} was converted from weights alone and belongs to no run: start a new one with the Hugging Face "
            "checkpoint as model.path (mrl convert megatron-to-hf writes one from this)"
        )
    then = {"trainer.schedule": "sync"} | manifest.trainer["fixed"]  # a checkpoint may be older than a key
    differing = [(key, now) for key, now in fixed_values(config).items() if now != then.get(key, now)]
    changed = [f"{key}: {now}, and {folder} was trained with {then[key]}" for key, now in differing]
    if changed:
        raise ConfigError(
            f"{'; '.join(changed)}. The place in the data and the samples of a step follow from them: give the run's "
            "own values, or start a new run from an export of the checkpoint (mrl convert megatron-to-hf)"
        )


def _check_same_model(config: RunConfig, manifest: Manifest, folder: Path) -> None:
    if model_spec(manifest.hf_config) != load_model_spec(config.model.path):
        raise ConfigError(
            f"model.path: {config.model.path} is another model than the one in {folder}; give the run's own model.path"
        )
    if manifest.dtype != config.model.dtype:
        raise ConfigError(
            f"model.dtype: {config.model.dtype}, and the weights in {folder} are {manifest.dtype}; set it to that"
        )


def resume_point(
    config: RunConfig, path: Path, resume: bool, damaged: Mapping[Path, EnvironmentFault], data_fingerprint: str
) -> Newest | None:
    """As `find_resume_point`, the data compared too. Writes nothing.

    Raises NothingToDo when the last step of the run in `path` is done, by its record and its checkpoint's manifest.
    """
    point = find_resume_point(config, path, resume, damaged)
    if point is None or point.manifest is None:
        return point
    _check_same_data(point.manifest, data_fingerprint, point.path)
    _check_same_groups(config, point.manifest, data_fingerprint, point.path)
    total, lines = config.trainer.total_training_steps, read_metrics(RunDir(path).metrics)
    if point.manifest.step >= total and lines and lines[-1]["training/global_step"] >= point.manifest.step:
        raise NothingToDo(
            f"{path} has {point.manifest.step} steps already, of the {total} of "
            "trainer.total_training_steps; raise it to train on"
        )
    return point


def resumed_state(point: Newest | None) -> TrainState:
    """What the run goes on from; the beginning where there is no checkpoint."""
    if point is None or point.manifest is None:
        return TrainState()
    return TrainState(point.manifest.step, DataCursor(**point.manifest.trainer["cursor"]))


def rewind(run_dir: RunDir, point: Newest | None) -> None:
    """Removes what was recorded past the checkpoint, and keeps damaged ones aside.

    `point`: None of a new run; without a manifest it starts anew.
    """
    if point is None:
        return
    if point.manifest is None:
        print(f"{run_dir.path} has no checkpoint yet: it starts anew")
        run_dir.truncate_metrics(-1)
        return
    for damaged, reason in point.damaged.items():
        print(f"not resumed from {damaged.name}, which is kept as {set_aside(damaged).name}: {reason}")
    run_dir.truncate_metrics(point.manifest.step)
    _restore_line(point.manifest, run_dir)


def generated_again(config: RunConfig, run_dir: RunDir, point: Newest | None) -> int:
    """Responses that were lost with the starts before this one, and are generated again; says so where there are some.

    Where generation runs ahead of training finished groups are kept, and what is lost is in lost_engines.jsonl.
    """
    if point is None or config.trainer.schedule != "sync":
        return 0
    step = 0 if point.manifest is None else point.manifest.step
    lost = generated_after(run_dir.path, step, config.rollout.n)
    if lost:
        print(f"{lost} responses of steps after {step} are lost with the start before, and generated again")
    return lost


def _check_same_data(manifest: Manifest, data_fingerprint: str, folder: Path) -> None:
    if manifest.trainer["data_fingerprint"] != data_fingerprint:
        raise DataError(
            f"{folder} was trained on other prompts than data.train_files gives now, so its place in the data means "
            "nothing here; give the same files, tokenizer and limits, or start a new run from an export of the "
            "checkpoint (mrl convert megatron-to-hf)"
        )


def _check_same_groups(config: RunConfig, manifest: Manifest, data_fingerprint: str, folder: Path) -> None:
    """Where generation runs ahead: raises DataError for groups on their way that were made with something else."""
    schedule = schedule_of(config)
    if schedule is None:
        return
    if "ahead" not in manifest.trainer:
        raise ConfigError(
            f"trainer.schedule: {config.trainer.schedule}, and {folder} has no groups on their way: start a new run "
            "from an export of the checkpoint (mrl convert megatron-to-hf)"
        )
    ledger = Ledger.from_json(manifest.trainer["ahead"]["ledger"])
    check_goes_on(ledger, schedule, made_by(config, data_fingerprint))


def made_by(config: RunConfig, data_fingerprint: str) -> Fingerprint:
    """What kept tokens are made with. `data_fingerprint`: of the prompts' tokens, and so of the template."""
    model = json.dumps(read_hf_config(config.model.path), sort_keys=True)
    return Fingerprint(data_fingerprint, hashlib.sha256(model.encode()).hexdigest())


def _restore_line(manifest: Manifest, run_dir: RunDir) -> None:
    """A run killed between saving and writing the step's line lost that line; the checkpoint has it."""
    rows = read_metrics(run_dir.metrics)
    line = manifest.trainer["metrics"]
    if line and (not rows or rows[-1]["training/global_step"] < manifest.step):
        sink = JsonlSink(run_dir.metrics)
        sink.write(manifest.step, line)
        sink.close()
