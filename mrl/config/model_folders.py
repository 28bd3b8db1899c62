"""Models that a configuration names by their name on the Hugging Face hub, brought to the node that asks."""

from pathlib import Path

from mrl.config.schema import DistillationConfig, RunConfig
from mrl.model import ModelSpec, load_model_spec
from mrl.model.hub import hub_name, local_folder

TEACHER = "distillation.teacher_model.model_path"


def names_of_the_hub(config: RunConfig) -> list[str]:
    """Paths among those of the model, the reference, the teacher and the critic that are no folders of this node."""
    paths = [config.model.path, config.ref.path, config.critic.path]
    if config.distillation.enabled:
        paths.append(config.distillation.teacher_model.model_path)
    return [path for path in paths if path is not None and hub_name(path) is not None]


def with_model_folders(config: RunConfig) -> RunConfig:
    """The configuration with folders of this node in their place. Raises EnvironmentFault where one cannot be had."""
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
    """What a run loads weights from, by key, names on the hub left out: the model, a reference and a teacher where
    they are asked, and a critic's start.
    """
    named = {"model.path": config.model.path}
    if config.algorithm.needs_reference and config.ref.path is not None:
        named["ref.path"] = config.ref.path
    if config.distillation.enabled and config.distillation.teacher_model.model_path is not None:
        named[TEACHER] = config.distillation.teacher_model.model_path
    if config.algorithm.needs_critic and config.critic.path is not None:
        named["critic.path"] = config.critic.path
    return {key: Path(path) for key, path in named.items() if hub_name(path) is None}


def model_in(key: str, folder: Path, model: ModelSpec) -> ModelSpec:
    """What the weights in `folder`, which `key` names, are to be of: the teacher is a model of its own, all others are
    `model`.
    """
    if key == TEACHER:
        return load_model_spec(folder)
    return model
