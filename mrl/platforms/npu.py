"""Ascend NPUs: plannable, not trainable yet."""

from mrl.errors import EnvironmentFault


class NpuPlatform:
    """Refuses at construction, so that nothing falls back to another device in silence."""

    def __init__(self) -> None:
        raise EnvironmentFault(
            "cluster.device=npu cannot train yet: `mrl plan` and `mrl validate` work for it, the worker side (torch_npu, MindSpeed) "
            "is not part of this version; set cluster.device to cpu or cuda to train"
        )
