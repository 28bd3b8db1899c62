"""Resolves models that a configuration names by their name on the Hugging Face hub to folders on this node."""

from pathlib import Path

from mrl.config.schema import DistillationConfig, RolloutConfig, RunConfig
from mrl.model import ModelSpec, load_model_spec
from mrl.model.hub import hub_name, local_folder

POLICY = "model.path"
TEACHER = "distillation.teacher_model.model_path"


def names_of_the_hub(config: RunConfig) -> list[str]:
    """Returns the paths of model, reference, teacher and critic that are names on the hub."""
    paths = [config.model.path, config.ref.path, config.critic.path]
    if config.distillation.enabled:
        paths.append(config.distillation.teacher_model.model_path)
    return [path for path in paths if path is not None and hub_name(path) is not None]


def with_model_folders(config: RunConfig) -> RunConfig:
    """Replaces names on the hub by folders of this node. Raises EnvironmentFault where a model cannot be fetched."""
    if not names_of_the_hub(config):
        return config
    path = local_folder(config.model.path)
    reference = config.ref.path and local_folder(config.ref.path)
    model = config.model.model_copy(update={"path": path})
    ref = config.ref.model_copy(update={"path": reference})
    distillation = _with_teacher_folder(config.distillation)
    start = config.critic.path and local_folder(config.critic.path)
    critic = config.critic.model_copy(update={"path": start})
    return config.model_copy(update={"model": model, "ref": ref, "critic": critic, "distillation": distillation})


def _with_teacher_folder(distillation: DistillationConfig) -> DistillationConfig:
    teacher = distillation.teacher_model
    if not distillation.enabled or teacher.model_path is None:
        return distillation
    here = teacher.model_copy(update={"model_path": local_folder(teacher.model_path)})
    return distillation.model_copy(update={"teacher_model": here})


def folders_of_weights(config: RunConfig) -> dict[str, Path]:
    """Returns the folders that a run loads weights from, by key. Names on the hub are left out.

    These are the model, a reference and a teacher where they are used, and a critic's start.
    """
    named = {POLICY: config.model.path}
    if config.algorithm.needs_reference and config.ref.path is not None:
        named["ref.path"] = config.ref.path
    if config.distillation.enabled and config.distillation.teacher_model.model_path is not None:
        named[TEACHER] = config.distillation.teacher_model.model_path
    if config.algorithm.needs_critic and config.critic.path is not None:
        named["critic.path"] = config.critic.path
    return {key: Path(path) for key, path in named.items() if hub_name(path) is None}


def model_in(key: str, folder: Path, model: ModelSpec, rollout: RolloutConfig) -> ModelSpec:
    """Returns the model that the weights in `folder` must belong to. It is `model`, except for a teacher's folder, with
    its predicting layers in the folder of the policy if they draft.
    """
    if key == TEACHER:
        return load_model_spec(folder)
    return model.holding(key == POLICY and rollout.drafts_with_model)
