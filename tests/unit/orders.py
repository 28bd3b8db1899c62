"""Orders of a run's steps for tests that need few of their fields."""

from mrl.config.deployment import Deployment
from mrl.config.schema import RunConfig
from mrl.driver.assemble_files import FilesOrder
from mrl.driver.resume import RunIdentity
from mrl.generate.sampled_by import UNKNOWN


def files_order(config: RunConfig) -> FilesOrder:
    """Files of a configuration whose samples have no routes, with nothing planned."""
    identity = RunIdentity.of(config)
    return FilesOrder(
        config.trainer,
        Deployment.of(config),
        identity,
        "data",
        0,
        "",
        lambda file: {},
        (),
        UNKNOWN,
        config.algorithm.kl_ctrl,
    )
