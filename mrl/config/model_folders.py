"""Models that a configuration names by their name on the Hugging Face hub, brought to the node that asks."""

from pathlib import Path

from mrl.config.schema import RunConfig
from mrl.model.hub import hub_name, local_folder


def names_of_the_hub(config: RunConfig) -> list[str]:
    """Paths among model.path, ref.path and critic.path that are no folders of this node."""
    paths = (config.model.path, config.ref.path, config.critic.path)
    return [path for path in paths if path is not None and hub_name(path) is not None]


def with_model_folders(config: RunConfig) -> RunConfig:
    """The configuration with folders of this node in their place. Raises EnvironmentFault where one cannot be had."""
    if not names_of_the_hub(config):
        return config
    path = local_folder(config.model.path)
    reference = config.ref.path and local_folder(config.ref.path)
    model = config.model.model_copy(update={"path": path})
    ref = config.ref.model_copy(update={"path": reference})
    start = config.critic.path and local_folder(config.critic.path)
    critic = config.critic.model_copy(update={"path": start})
    return config.model_copy(update={"model": model, "ref": ref, "critic": critic})


def folders_of_weights(config: RunConfig) -> dict[str, Path]:
    """What a run loads weights from, by key, names on the hub left out: the model, a reference that is
    asked, and a critic's start.
    """
    named = {"model.path": config.model.path}
    if config.algorithm.needs_reference and config.ref.path is not None:
        named["ref.path"] = config.ref.path
    if config.algorithm.needs_critic and config.critic.path is not None:
        named["critic.path"] = config.critic.path
    return {key: Path(path) for key, path in named.items() if hub_name(path) is None}
