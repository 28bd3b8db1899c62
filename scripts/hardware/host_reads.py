"""Counts what asks for a value of the device while a program computes: there the host waits until all is computed that
the value follows from.

Works on any device, because it looks at what is asked and not at whether it took time: an operation whose result, or
whose result's shape, depends on values (torch marks those), a tensor made into Python's or numpy's numbers, a copy
onto the host. Beside an accelerator a tensor that lies on the host is read without a wait, and counts nothing.
"""

import sys
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

_DEPENDS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_")
# of tensors on the host these do not reach torch's dispatcher, where _Operations listens
_TO_PYTHON = ("tolist", "numpy")
_COPIES = ("cpu", "to")


class HostReads:
    """While it is entered, `sites` counts reads by who asked, "folder/file.py:function"."""

    def __init__(self, device: str = "cpu") -> None:
        """`device`: the kind on which a program's tensors are that are not for the host."""
        self.sites: Counter[str] = Counter()
        self.device = device
        self.by_method = 0  # of them through methods of tensors, which call from this file
        self._on_host = WeakTensorKeyDictionary()  # copies: a look at one is no read

    def __enter__(self) -> "HostReads":
        self._stack = ExitStack()
        for name in (*_TO_PYTHON, *_COPIES):
            counting = self._counting(name, getattr(torch.Tensor, name))
            self._stack.enter_context(mock.patch.object(torch.Tensor, name, counting))
        self._stack.enter_context(_Operations(self.device, self._count))
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def _counting(self, name: str, original: Callable) -> Callable:
        @wraps(original)
        def method(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if name in _COPIES and not _names_the_host(name, (*args, *kwargs.values())):
                return original(tensor, *args, **kwargs)
            if tensor.device.type == self.device and tensor not in self._on_host:
                self.by_method += 1
                self._count()
            answer = original(tensor, *args, **kwargs)
            if name in _COPIES:
                self._on_host[answer] = True
            return answer

        return method

    def _count(self) -> None:
        frame = sys._getframe(1)
        while _is_torchs(frame.f_code.co_filename):
            frame = frame.f_back
        self.sites[site_of(frame.f_code.co_filename, frame.f_code.co_name)] += 1


def site_of(file: str, function: str) -> str:
    """A place in a program, short and told from others."""
    return f"{Path(file).parent.name}/{Path(file).name}:{function}"


def _is_torchs(file: str) -> bool:
    return file == __file__ or file.startswith(str(Path(torch.__file__).parent))


def _names_the_host(name: str, given: tuple[Any, ...]) -> bool:
    devices = [each for each in given if isinstance(each, str | torch.device)]
    return name == "cpu" or any(torch.device(each).type == "cpu" for each in devices)


class _Operations(TorchDispatchMode):
    """What torch itself says to depend on values; of an index only where it is a mask, of repeats without their sum."""

    def __init__(self, device: str, count: Callable[[], None]) -> None:
        super().__init__()
        self._device = device
        self._count_one = count

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
        is_asked = any(each.device.type == self._device for each in tensors)
        if is_asked and _depends_on_values(func, args, kwargs):
            self._count_one()
        return func(*args, **kwargs)


def _depends_on_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    name = func.overloadpacket.__name__
    if name in _INDEXING:
        return any(each is not None and each.dtype in (torch.bool, torch.uint8) for each in args[1])
    if name == "repeat_interleave":
        return kwargs.get("output_size") is None
    if name == "equal":
        return not _is_one(*args)
    return bool(_DEPENDS & set(func.tags))


def _is_one(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Of integers in the same memory torch knows without a look (ATen/native/cuda/Equal.cpp)."""
    same = first.data_ptr() == second.data_ptr() and first.stride() == second.stride()
    return same and first.shape == second.shape and not first.is_floating_point()
