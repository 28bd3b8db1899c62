"""Models that a configuration names by their name on the Hugging Face hub, brought to the node that asks."""

from mrl.config.schema import RunConfig
from mrl.model.hub import hub_name, local_folder


def names_of_the_hub(config: RunConfig) -> list[str]:
    """Paths among model.path and ref.path that are no folders of this node."""
    return [path for path in (config.model.path, config.ref.path) if path is not None and hub_name(path) is not None]


def with_model_folders(config: RunConfig) -> RunConfig:
    """The configuration with folders of this node in their place. Raises EnvironmentFault where one cannot be had."""
    if not names_of_the_hub(config):
        return config
    path = local_folder(config.model.path)
    reference = config.ref.path and local_folder(config.ref.path)
    model = config.model.model_copy(update={"path": path})
    ref = config.ref.model_copy(update={"path": reference})
    return config.model_copy(update={"model": model, "ref": ref})
