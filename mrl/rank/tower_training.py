"""Trains a vision tower beside its text model (model.vision: trained, projector).

    before a mini-batch    features of its images, without a graph, once an image (vision.py)
    in each backward       the loss's gradient at the features is added up on the host, in float32
    after the last one     of each image, one of the ranks that share its rows sums their gradients, computes the
                           features once more with a graph, and goes backward into Megatron's buffers
    then                   tensor-parallel ranks add up what each has of its images. Data- and context-parallel ranks
                           are summed by Megatron, with all other weights

So an image costs the tower two forwards and one backward a mini-batch, however many rows show it, and activations of
one image at a time are in memory. Megatron's recomputation never meets the tower. The tower is a module of the first
model chunk: optimizer, offload, checkpoints and weight sync find it with the other weights. All of it is there, also
where the projector alone is trained: a run that continues another may train more, or less.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from torch import Tensor
from torch.nn import Module
from transformers import AutoConfig, AutoModel, PreTrainedModel

from mrl.model.trained_tower import MODULE, TrainedTower
from mrl.rank.parameter_marks import FROZEN, OF_TOWER, is_frozen

_NAME = MODULE.removesuffix(".")
Grids = Mapping[str, Sequence[int]]  # image -> patches by time, row and column


def without_weights(folder: str) -> PreTrainedModel:
    """Returns transformers' model of config.json in `folder`, on the meta device."""
    with torch.device("meta"):
        return AutoModel.from_config(AutoConfig.from_pretrained(folder, local_files_only=True))


def drawn_tower(whole: PreTrainedModel, dtype: torch.dtype) -> Module:
    """Returns a vision tower of the whole's kind whose weights are drawn, to be loaded. Its buffers are as computed."""
    with torch.random.fork_rng(devices=[]):
        return type(whole.visual)._from_config(whole.config.vision_config, dtype=dtype)


def trained_tower(first: Module) -> Module | None:
    """Returns the tower of a first model chunk; None if it is not trained."""
    return getattr(first, _NAME, None)


class TowerMaker:
    """Puts the tower into the first model chunk when that is made. The weights are loaded later, with the others."""

    def __init__(self, folder: str, tower: TrainedTower, dtype: torch.dtype):
        self._folder = folder
        self._tower = tower
        self._dtype = dtype
        self._buffers: list[tuple[Module, str, Tensor]] = []  # the module, its buffer's name, and its values

    def put(self, chunk: Module, pre_process: bool, **_: Any) -> None:
        """Is a callback of mbridge."""
        if not pre_process:
            return
        tower = drawn_tower(without_weights(self._folder), self._dtype)
        for name, parameter in tower.named_parameters():
            setattr(parameter, OF_TOWER, True)
            if not self._tower.is_trained(name):
                setattr(parameter, FROZEN, True)
        self._buffers = [
            (module, name, buffer.clone())
            for module in tower.modules()
            for name, buffer in module.named_buffers(recurse=False)
        ]
        chunk.add_module(_NAME, tower)

    def restore_buffers(self) -> None:
        """Undoes the rounding of buffers, which no checkpoint holds, by Megatron's wrapper of 16-bit models."""
        for module, name, values in self._buffers:
            rounded = getattr(module, name)
            setattr(module, name, values.to(rounded.device))


class TowerGradients:
    """The gradients of a mini-batch at the features of its images, and the tower's backward."""

    def __init__(
        self,
        tower: Module,
        features_of: Callable[[str, Sequence[int]], Tensor],
        shared_out: Callable[[Grids], Iterable[tuple[int, str]]],
    ):
        """`features_of`: from an image's name and grid to its features [tokens, layers, hidden]. `shared_out`: yields
        each image with the number of the rank that computes it, among those that share a replica's rows.
        """
        self._tower = tower
        self._features_of = features_of
        self._shared_out = shared_out
        self._grids: Grids = {}
        self._gradients: dict[str, Tensor] = {}  # image -> float32 [tokens, layers, hidden] on the host

    def begin(self, grids: Grids, features: Mapping[str, Tensor]) -> None:
        """Starts a mini-batch with these images."""
        self._grids = grids
        self._gradients = {name: torch.zeros(features[name].shape, dtype=torch.float32) for name in grids}

    def watched(
        self, layers: Sequence[Tensor], images: Sequence[tuple[str, Tensor]], sequence_parallel: bool
    ) -> tuple[Tensor, ...]:
        """Returns features of a micro-batch as leaves of its graph, whose gradients are added up.

        `layers`: of the embedding, then of DeepStack, [tokens, hidden] each. `images`: for each image in their order,
        its name and which of its tokens they are.
        """
        if mpu.get_tensor_model_parallel_rank() and not sequence_parallel:
            return tuple(layers)  # every tensor rank has the same gradient, and one of them counts
        return tuple(self._leaf(number, layer, images) for number, layer in enumerate(layers))

    def _leaf(self, number: int, layer: Tensor, images: Sequence[tuple[str, Tensor]]) -> Tensor:
        leaf = layer.detach().clone().requires_grad_()

        def add(leaf: Tensor) -> None:
            gradient = leaf.grad.float().cpu()
            leaf.grad = None
            for (name, tokens), part in zip(images, gradient.split([len(each) for _, each in images]), strict=True):
                self._gradients[name][tokens, number] += part

        leaf.register_post_accumulate_grad_hook(add)
        return leaf

    def backward(self) -> None:
        """Adds the gradients of the tower's parameters to Megatron's buffers. Collective over the ranks that share a
        replica's rows on the first stage.
        """
        if not self._grids:
            return
        group = mpu.get_tensor_and_context_parallel_group()
        device = next(self._tower.parameters()).device
        for owner, name in self._shared_out(self._grids):
            gradient = self._gradients.pop(name).to(device)
            if dist.get_world_size(group) > 1:
                dist.reduce(gradient, dist.get_global_rank(group, owner), group=group)
            if owner == dist.get_rank(group):
                with torch.enable_grad(), self._without_graph_of_frozen():
                    features = self._features_of(name, self._grids[name])
                    features.backward(gradient.to(features.dtype))
        self._grids = {}
        if mpu.get_tensor_model_parallel_world_size() > 1:
            for parameter in self._tower.parameters():
                if not is_frozen(parameter):
                    dist.all_reduce(parameter.main_grad, group=mpu.get_tensor_model_parallel_group())

    @contextmanager
    def _without_graph_of_frozen(self) -> Iterator[None]:
        """Computes nothing backward before the projector if that alone is trained. The gradients of the others stay
        zero in their buffers.
        """
        frozen = [parameter for parameter in self._tower.parameters() if is_frozen(parameter)]
        for parameter in frozen:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in frozen:
                parameter.requires_grad_(True)


def before_sums(chunks: Iterable[Module], backward: Callable[[], None]) -> None:
    """Calls `backward` when all micro-batches of an update are computed, before gradients are summed over replicas."""
    for chunk in chunks:
        chunk.config.finalize_model_grads_func = _Before(backward, _own(chunk.config.finalize_model_grads_func))


class _Before:
    def __init__(self, backward: Callable[[], None], sums: Callable[..., None]):
        self.backward = backward
        self.sums = sums

    def __call__(self, *arguments: Any, **named: Any) -> None:
        self.backward()
        self.sums(*arguments, **named)


def _own(sums: Callable[..., None]) -> Callable[..., None]:
    """Returns Megatron's function: chunks share their configuration, and an earlier one may be wrapped already."""
    return sums.sums if isinstance(sums, _Before) else sums
