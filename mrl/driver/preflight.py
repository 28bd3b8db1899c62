"""Finds all errors that can be known before anything is loaded or started. It uses no torch and no Ray, and takes about
a second.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mrl.checkpoint.disk_space import (
    check_disk_space,
    checkpoint_bytes,
    disk_space_note,
    groups_ahead_bytes,
    replay_bytes,
    route_bytes,
)
from mrl.checkpoint.hf_folder import MODEL_FILE_BYTES
from mrl.checkpoint.manifest import Manifest, check_files, facts_of, read_manifest
from mrl.checkpoint.open_checkpoint import step_folder
from mrl.checkpoint.vision_tower import check_same_tower
from mrl.cluster.prerequisites import (
    check_devices_here,
    check_port_free,
    check_reachable,
    check_size,
    follow_head,
    ray_address,
)
from mrl.config.deployment import Deployment
from mrl.config.describe import describe_layout, describe_loss, describe_settings
from mrl.config.load import ResolvedConfig
from mrl.config.model_folders import folders_of_weights, model_in, names_of_the_hub, with_model_folders
from mrl.config.rules import check, notes
from mrl.config.run_rules import run_dir as run_dir_of
from mrl.config.schedule_rules import schedule_of
from mrl.config.schema import ModelConfig, RolloutConfig, RunConfig, TrainerConfig, with_values
from mrl.driver.first_look import look
from mrl.driver.resume import (
    RunIdentity,
    check_same_prompts,
    find_resume_point,
    without_first_adapter,
)
from mrl.errors import ConfigError, InvalidConfig, shortened
from mrl.model import ModelSpec, known_name, load_model_spec, model_spec, planning_model_spec, read_hf_config
from mrl.model.hf_config import without_quantization
from mrl.model.hf_files import check_checkpoint, hf_files
from mrl.model.peft_files import tower_digest
from mrl.plain_files import TEXT_BYTES, read_bytes, reason
from mrl.plan.plan_rules import accelerator_violations, share_violations
from mrl.plan.run_plan import plan_report
from mrl.process.own import own_cpus
from mrl.record.run_dir import RunDir
from mrl.record.sinks import check_packages


@dataclass(frozen=True)
class RunInputs:
    """A configuration with its model. `preflight` returns one that has passed all checks before a start."""

    resolved: ResolvedConfig
    model: ModelSpec

    @classmethod
    def of(cls, resolved: ResolvedConfig) -> "RunInputs":
        """Reads the model. Raises ConfigError for an unreadable one."""
        model = resolved.config.model
        return cls(resolved, load_model_spec(model.path, model.vision))

    @property
    def config(self) -> RunConfig:
        """The configuration without the origins of its values."""
        return self.resolved.config


def with_models_at_hand(
    resolved: ResolvedConfig, check_paths: bool = True, resume: bool = False, devices: bool = False
) -> ResolvedConfig:
    """Returns the configuration with folders instead of names on the hub. Fetches models that the cache lacks.

    A download takes long, so all rules are checked first if the model is known by its name. `resume`: the run continues
    an earlier one. `devices`: the run computes, so nothing is fetched if its devices are missing. Raises InvalidConfig
    and EnvironmentFault.
    """
    config = resolved.config
    if not (names := names_of_the_hub(config)):
        return resolved
    if known_name(config.model.path) is not None:
        check(without_first_adapter(resolved, resume), planning_model_spec(config.model.path)[0], check_paths)
    if devices:
        check_devices_here(config.cluster)
    print(f"{', '.join(names)}: from the Hugging Face hub, or its cache on this machine", flush=True)
    return replace(resolved, config=with_model_folders(config))


def preflight(resolved: ResolvedConfig, resume: bool) -> RunInputs:
    """Checks a configuration before training, and leaves nothing behind. Raises ConfigError or EnvironmentFault."""
    inputs = RunInputs.of(resolved)
    config = inputs.config
    model = inputs.model
    check(without_first_adapter(resolved, resume), model, check_paths=True)
    if broken := accelerator_violations(resolved) or share_violations(resolved, model):
        raise InvalidConfig(broken)
    check_packages(config.trainer.logger)
    folder = run_dir_path(config.trainer, resume)
    point = find_resume_point(config.trainer, RunIdentity.of(config), folder, resume)
    own = point is not None and point.path is not None and point.path.resolve().is_relative_to(folder.resolve())
    if config.trainer.val_only and own:
        raise ConfigError(
            f"trainer.val_only: {folder} has a run of its own, which this start would resume: `mrl eval --checkpoint "
            f"{point.path}` validates it; or give another trainer.run_dir, or trainer.val_only=false"
        )
    for key, path in folders_of_weights(config).items():
        check_checkpoint(path, model_in(key, path, model, config.rollout), key)
    check_disk_space(folder, _bytes_of_a_checkpoint(config, model))
    _check_cluster(Deployment.of(config))
    if config.cluster.port is not None:
        check_port_free(config.cluster.port)
    return inputs


def check_inputs(config: RunConfig, resume: bool) -> None:
    """Checks data and reward, and that a resume continues with the same prompts. Raises DataError and ConfigError."""
    looked = look(config)
    if looked.reward is not None:
        print(f"warning: {shortened(looked.reward)}", flush=True)
    fingerprint = looked.fingerprint
    if fingerprint is None:
        return
    identity = RunIdentity.of(config)
    point = find_resume_point(config.trainer, identity, run_dir_path(config.trainer, resume), resume)
    if point is not None and point.manifest is not None:
        check_same_prompts(identity, point, fingerprint)


def preflight_evaluation(resolved: ResolvedConfig, checkpoint: str | None) -> Path | None:
    """Checks an evaluation, which has engines and no actor, before it starts.

    `checkpoint`, a step or a run, replaces model.path if it is given. Returns the folder of its step.
    """
    config = resolved.config
    if not config.data.val_files:
        raise ConfigError(
            "data.val_files names no file, and there is nothing to evaluate on; --set data.val_files=[FILE, ...]"
        )
    for file in config.data.val_files:
        if not Path(file).is_file():
            raise ConfigError(f"data.val_files: {file} is no file (working directory: {Path.cwd()})")
    if checkpoint is not None and not Path(checkpoint).is_dir():
        raise ConfigError(f"--checkpoint: {checkpoint} is no folder; give a step-N folder or a run directory")
    if checkpoint is None:
        folder = None
        model = load_model_spec(config.model.path)
        check_checkpoint(config.model.path, model)
    else:
        folder = step_folder(Path(checkpoint))
        model = _model_of(folder, config.model, config.rollout)
    check(_without_teacher(resolved), model)
    _check_cluster(Deployment.of(config), actor=False)
    return folder


def _without_teacher(resolved: ResolvedConfig) -> ResolvedConfig:
    """Returns the configuration with the model as its teacher: an evaluation loads none, whose folder may be gone."""
    if not resolved.config.distillation.enabled:
        return resolved
    model_alone = {"distillation.teacher_model": {"model_path": resolved.config.model.path}}
    return replace(resolved, config=with_values(resolved.config, model_alone))


def _model_of(folder: Path, model: ModelConfig, rollout: RolloutConfig) -> ModelSpec:
    """Returns the model of one of mrl's checkpoints.

    Raises ConfigError if its dtype differs from the configured one and none is set for engines. Raises EnvironmentFault
    if its tokenizer differs from the saved one.
    """
    manifest = read_manifest(folder)
    check_files(folder, manifest.files_for_others(), threads=1)
    if rollout.dtype is None and manifest.dtype != model.dtype:
        raise ConfigError(
            f"model.dtype: {model.dtype}, and the weights in {folder} are {manifest.dtype}; set it to that, or "
            "rollout.dtype to what the engines are to compute in"
        )
    if manifest.vision is not None and model.vision is None:
        raise ConfigError(f"{folder}: its vision tower was trained, too; set model.vision as the run did")
    if model.vision is not None:
        _check_same_whole(Path(model.path), manifest, folder)
    return model_spec(manifest.hf_config)


def _check_same_whole(whole: Path, manifest: Manifest, folder: Path) -> None:
    """Raises ConfigError unless `whole`, from which engines read the vision tower and images, is the model that the
    checkpoint's text model was trained in: its tower, configuration, processor and tokenizer.
    """
    check_same_tower(f"model.path: {whole}", tower_digest(whole), manifest, folder)
    config = without_quantization(read_hf_config(whole))
    other = ["config.json"] if config != manifest.hf_config else []
    known = [file for file in hf_files(whole) if file.name in manifest.hf_files and file.name != "config.json"]
    other += [
        file.name for file in known if facts_of(read_bytes(file, MODEL_FILE_BYTES)) != manifest.hf_files[file.name]
    ]
    if other:
        raise ConfigError(
            f"model.path: {whole} is another model than the one that {folder} was trained in (other: "
            f"{', '.join(other)}), and its vision tower would be evaluated with the checkpoint's text model; give the "
            "run's own model.path"
        )


def start_lines(inputs: RunInputs) -> list[str]:
    """Returns the lines that a run prints before it starts."""
    config = inputs.config
    model = inputs.model
    run_dir = RunDir(run_dir_of(config.trainer))
    return [
        f"loss: {describe_loss(config)}",
        f"layout: {describe_layout(config, model)}",
        f"settings: {describe_settings(config)}",
        *(f"note: {n}" for n in notes(inputs.resolved, model)),
        *disk_space_note(
            run_dir.path,
            _bytes_of_a_checkpoint(config, model),
            config.trainer.max_actor_ckpt_to_keep,
            replay_bytes(schedule_of(config), config.data, route_bytes(config.actor, model), config.trainer.async_save),
        ),
        *plan_report(config, model, run_dir.plan),
        f"logs: {run_dir.logs}/ (actor-rank-N.log, engine-N.log, reward.log); metrics: {run_dir.metrics}",
    ]


def plug_in_lines(found: Sequence[Mapping[str, str]]) -> list[str]:
    """Returns the lines about `plug_ins` that a run prints before any of their code runs."""
    return [f"plug-in: {each['key']} {each['path']}, SHA-256 {each['sha256']}" for each in found]


def plug_ins(config: RunConfig) -> list[dict[str, str]]:
    """Returns the user's files whose code will run: the key that names one, its path, and the SHA-256 of its content.

    Raises ConfigError for an unreadable file.
    """
    named = {
        "reward.custom_reward_function.path": config.reward.custom_reward_function,
        "algorithm.policy_loss.custom.path": config.algorithm.policy_loss.custom,
        "algorithm.custom_advantage.path": config.algorithm.custom_advantage,
        "rollout.turns.path": config.rollout.turns,
        "rollout.agent.path": config.rollout.agent,
    }
    files = [(key, Path(each.path)) for key, each in named.items() if each is not None and each.path is not None]
    if config.rollout.agent is not None:
        files += [("rollout.agent.command", file) for file in map(Path, config.rollout.agent.command) if _is_text(file)]
    turns = config.rollout.turns
    if turns is not None and turns.tool_config_path is not None:
        from mrl.acting.verl_tool_config import CONFIG_KEY, files_of

        files += [(CONFIG_KEY, file) for file in files_of(Path(turns.tool_config_path))]
    found = []
    for key, file in files:
        path = file.resolve()
        try:
            digest = hashlib.sha256(read_bytes(path, TEXT_BYTES)).hexdigest()
        except (OSError, ValueError) as error:
            raise ConfigError(f"{key}: {path} cannot be read: {reason(error)}") from None
        found.append({"key": key, "path": str(path), "sha256": digest})
    return found


def _is_text(file: Path) -> bool:
    """Tells whether a word of a command names a file that may be a user's program."""
    return file.is_file() and file.stat().st_size <= TEXT_BYTES


def _bytes_of_a_checkpoint(config: RunConfig, model: ModelSpec) -> int:
    """Returns the bytes of a checkpoint, including live groups of generation ahead of training."""
    ahead = groups_ahead_bytes(schedule_of(config), config.data, route_bytes(config.actor, model))
    has_critic = config.algorithm.needs_critic
    model = model.holding(config.actor.mtp.train)
    return checkpoint_bytes(model, config.model.dtype, config.actor.lora.adapters, has_critic) + ahead


def run_dir_path(trainer: TrainerConfig, resume: bool) -> Path:
    """Returns the absolute run directory. Raises ConfigError if it has another run, or no run to resume."""
    folder = RunDir(run_dir_of(trainer).resolve())
    if resume and not folder.config.is_file():
        raise ConfigError(
            f"trainer.run_dir: {folder.path} holds no run to resume; leave --resume out to start one there"
        )
    if not resume:
        folder.refuse_another_run()
    return folder.path


def _check_cluster(deployment: Deployment, actor: bool = True) -> None:
    address = ray_address(deployment.cluster)
    if address is not None:
        check_reachable(address)
        follow_head(address)
    else:
        check_devices_here(deployment.cluster)
        check_size(deployment, {"CPU": float(own_cpus())}, names=("CPU",), actor=actor)
