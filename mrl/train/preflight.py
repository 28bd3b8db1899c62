"""All that can be known to be wrong before anything is loaded, written or started. No torch, no Ray: it answers in a second."""

from pathlib import Path
from typing import Any

from mrl.checkpoint.conversions import step_folder
from mrl.checkpoint.disk_space import check_room, checkpoint_bytes, room_note
from mrl.checkpoint.manifest import Manifest, Newest, newest_checkpoint, read_manifest
from mrl.cluster.address import check_port_free, check_reachable, ray_address
from mrl.cluster.resources import check_size, own_cpus
from mrl.config.capabilities import missing_capabilities
from mrl.config.describe import describe_layout, describe_loss
from mrl.config.load import ResolvedConfig
from mrl.config.rules import check, notes
from mrl.config.run_rules import run_dir as run_dir_of
from mrl.config.schema import RunConfig, leaf
from mrl.errors import ConfigError
from mrl.model import ModelSpec, load_model_spec, model_spec
from mrl.model.hf_files import check_checkpoint
from mrl.plan.stored_plan import plan_report
from mrl.record.run_dir import RunDir
from mrl.record.sinks import check_packages

# what the order of the prompts and the samples of a step follow from: a resumed run keeps them
FIXED = ("trainer.seed", "data.shuffle", "data.train_weights", "data.train_batch_size", "data.gen_batch_size", "rollout.n")


def preflight(resolved: ResolvedConfig, resume: bool) -> ModelSpec:
    """The model that is to be trained. Raises ConfigError or EnvironmentFault, and leaves nothing behind."""
    config = resolved.config
    model = load_model_spec(config.model.path)
    check(resolved, model, check_paths=True)
    if missing := missing_capabilities(config):
        raise ConfigError("mrl train cannot do this yet: " + "; ".join(missing))
    check_packages(config.trainer.logger)
    folder = run_dir_path(config, resume)
    if resume:
        resume_point(config, folder, digests=False)
    check_checkpoint(config.model.path, model)
    check_room(folder, checkpoint_bytes(model, config.model.dtype))
    _check_cluster(config)
    return model


def preflight_evaluation(resolved: ResolvedConfig, checkpoint: str | None) -> Path | None:
    """The same for an evaluation, which has engines and no actor. `checkpoint`, a step or a run, stands in for model.path where one is
    given; the folder of its step is returned.
    """
    config = resolved.config
    if not config.data.val_files:
        raise ConfigError("data.val_files names no file, and there is nothing to evaluate on; --set data.val_files=[FILE, ...]")
    for file in config.data.val_files:
        if not Path(file).is_file():
            raise ConfigError(f"data.val_files: {file} is no file (working directory: {Path.cwd()})")
    if checkpoint is not None and not Path(checkpoint).is_dir():
        raise ConfigError(f"--checkpoint: {checkpoint} is no folder; give a step-N folder or a run directory")
    if checkpoint is None:
        folder, model = None, load_model_spec(config.model.path)
        check_checkpoint(config.model.path, model)
    else:
        folder = step_folder(Path(checkpoint))
        model = _model_of(folder, config)
    check(resolved, model)
    if missing := [m for m in missing_capabilities(config) if m.startswith(("rollout.", "cluster.device"))]:
        raise ConfigError("mrl eval cannot do this yet: " + "; ".join(missing))
    address = ray_address(config)
    if address is not None:
        check_reachable(address)
    else:
        check_size(config, {"CPU": float(own_cpus())}, names=("CPU",), actor=False)
    return folder


def _model_of(folder: Path, config: RunConfig) -> ModelSpec:
    """The model of a checkpoint of ours. Raises ConfigError where its dtype is not the configured one and none is set for engines."""
    manifest = read_manifest(folder)
    if config.rollout.dtype is None and manifest.dtype != config.model.dtype:
        raise ConfigError(
            f"model.dtype: {config.model.dtype}, and the weights in {folder} are {manifest.dtype}; set it to that, or rollout.dtype to "
            "what the engines are to compute in"
        )
    return model_spec(manifest.hf_config)


def start_lines(resolved: ResolvedConfig, model: ModelSpec) -> list[str]:
    """What a run says of itself before it starts."""
    config = resolved.config
    return [
        f"loss: {describe_loss(config)}",
        f"layout: {describe_layout(config, model)}",
        *(f"note: {n}" for n in notes(resolved, model)),
        *room_note(config, model, run_dir_of(config)),
        *plan_report(config, model, RunDir(run_dir_of(config)).plan),
    ]


def run_dir_path(config: RunConfig, resume: bool) -> Path:
    """The run directory, absolute. Raises ConfigError where another run stands, or none that could be resumed."""
    folder = RunDir(run_dir_of(config).resolve())
    if resume and not folder.config.is_file():
        raise ConfigError(f"trainer.run_dir: {folder.path} holds no run to resume; leave --resume out to start one there")
    if not resume:
        folder.refuse_another_run()
    return folder.path


def resume_point(config: RunConfig, run_dir: Path, digests: bool) -> Newest:
    """The newest complete checkpoint and what it says of itself, an empty one for a run that saved none, which starts anew.

    With `digests`, a checkpoint counts as complete only when every byte of it is what was written.
    Raises EnvironmentFault when all that there are are damaged, ConfigError when the newest is of another model than `config`'s or was
    trained with other values of FIXED.
    """
    newest = newest_checkpoint(RunDir(run_dir).checkpoints, digests)
    if newest.manifest is not None:
        _check_same_model(config, newest.manifest, newest.path)
        _check_same_values(config, newest.manifest, newest.path)
    elif newest.damaged:
        raise next(iter(newest.damaged.values()))
    return newest


def fixed_values(config: RunConfig) -> dict[str, Any]:
    """What a checkpoint keeps of FIXED, as JSON has it, to be compared when it is resumed."""
    values = {key: leaf(config, key) for key in FIXED}
    return {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}


def _check_same_values(config: RunConfig, manifest: Manifest, folder: Path) -> None:
    if manifest.weights_only:
        raise ConfigError(
            f"{folder} was converted from weights alone and belongs to no run: start a new one with the Hugging Face checkpoint as "
            "model.path (mrl convert megatron-to-hf writes one from this)"
        )
    then = manifest.trainer["fixed"]
    changed = [f"{key}: {now}, and {folder} was trained with {then[key]}" for key, now in fixed_values(config).items() if now != then[key]]
    if changed:
        raise ConfigError(
            f"{'; '.join(changed)}. The place in the data and the samples of a step follow from them: give the run's own values, "
            "or start a new run from an export of the checkpoint (mrl convert megatron-to-hf)"
        )


def _check_same_model(config: RunConfig, manifest: Manifest, folder: Path) -> None:
    if model_spec(manifest.hf_config) != load_model_spec(config.model.path):
        raise ConfigError(f"model.path: {config.model.path} is another model than the one in {folder}; give the run's own model.path")
    if manifest.dtype != config.model.dtype:
        raise ConfigError(f"model.dtype: {config.model.dtype}, and the weights in {folder} are {manifest.dtype}; set it to that")


def _check_cluster(config: RunConfig) -> None:
    address = ray_address(config)
    if address is not None:
        check_reachable(address)
    else:
        check_size(config, {"CPU": float(own_cpus())}, names=("CPU",))
    if config.cluster.port is not None:
        check_port_free(config.cluster.port)
