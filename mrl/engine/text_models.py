"""Imports vLLM's text models of Qwen3.5 where torchvision is not installed, as in the versions for CPUs.

They stand in one file with the models that read images. The processors of those import torchvision for functions that
neither text models nor those of seeing_models.py call. vLLM imports the text models from here. Meanwhile empty modules
replace those of torchvision. Transformers is asked before whether torchvision is there, and keeps its answer.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from transformers.utils import is_torchvision_available, is_torchvision_v2_available

_NAMES = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2", "torchvision.transforms.v2.functional")


@contextmanager
def empty_torchvision() -> Iterator[None]:
    """Returns a context in which imports find empty modules for torchvision, if it is not installed."""
    if is_torchvision_available() or is_torchvision_v2_available() or "torchvision" in sys.modules:
        yield
        return
    modules = {name: ModuleType(name) for name in _NAMES}
    for name, module in modules.items():
        parent, _, leaf = name.rpartition(".")
        if parent:
            setattr(modules[parent], leaf, module)
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in _NAMES:
            sys.modules.pop(name, None)


with empty_torchvision():
    from vllm.model_executor.models.qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM

__all__ = ["Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"]
