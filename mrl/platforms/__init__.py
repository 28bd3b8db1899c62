"""The only room that knows a device by name: cpu, cuda or npu. Everything else asks a `Platform`."""

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
