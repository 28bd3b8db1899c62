"""The only room that knows a device by name: cpu, cuda or npu. Everything else asks a `Platform`."""

from collections.abc import Mapping
from typing import Any

from mrl.errors import ConfigError
from mrl.platforms.base import Platform

PLATFORMS = ("cpu", "cuda", "npu")


def get_platform(name: str) -> Platform:
    """The platform called `name`. Raises ConfigError for an unknown name, EnvironmentFault where it cannot work."""
    if name == "cpu":
        from mrl.platforms.cpu import CpuPlatform

        return CpuPlatform()
    if name == "cuda":
        from mrl.platforms.cuda import CudaPlatform

        return CudaPlatform()
    if name == "npu":
        from mrl.platforms.npu import NpuPlatform

        return NpuPlatform()
    raise ConfigError(f"cluster.device: {name!r} is no platform; allowed: {', '.join(PLATFORMS)}")


def prepare_process(device: str, layout: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """What the process of a Megatron rank needs before anything in it imports Megatron; only Ascend needs something.

    `layout`: parallel sizes, `overrides`: fields of the transformer config, both under Megatron's names. Returns those of `overrides` that
    Megatron itself is to be given. Raises EnvironmentFault.
    """
    if device != "npu":
        return dict(overrides)
    from mrl.platforms.npu_environment import MINDSPEED_FIELDS
    from mrl.platforms.npu_mindspeed import adapt

    adapt(layout, overrides)
    return {name: value for name, value in overrides.items() if name not in MINDSPEED_FIELDS}
