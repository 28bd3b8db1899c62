"""What a model sees: images of rows become features of the vision tower, in the places of their tokens.

    pixels   --> tower (transformers' own module) --> features of each image, once a step, by one of the ranks
                 that share a replica's rows on the first stage
    first stage: embedding of tokens, with features in the places of images' tokens
                 layers 0, 1, ...: DeepStack's further features are added behind them (arXiv:2406.04334)
    every stage: queries and keys are turned by three positions a token, made by the model's own get_rope_index

Which tokens are an image's is recorded in the rows, and never asked of token ids: a model may sample an image's token.

Hooks on Megatron's modules do all of it. They are set when the first rows with images may come. So a model that sees no
images computes as if this file were not there.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.utils import unwrap_model
from safetensors import safe_open
from torch import Tensor
from torch.nn import Module
from transformers import PreTrainedModel

from mrl.data.batch import TrainBatch
from mrl.errors import ConfigError, EnvironmentFault
from mrl.model.hf_files import in_tower, tower_tensors
from mrl.rank.balance import balanced_parts
from mrl.rank.cut import MicroRows
from mrl.rank.forward import Around
from mrl.rank.packing import MicroBatch
from mrl.rank.tower_training import (
    Grids,
    TowerGradients,
    before_sums,
    drawn_tower,
    trained_tower,
    without_weights,
)

AXES = 3  # positions by time, row and column
Pixels = Callable[[str], Tensor]  # from an image's name to what its processor made of it, [patches, numbers of a patch]


def whole_model(folder: str, dtype: torch.dtype, device: torch.device, has_tower: bool) -> PreTrainedModel:
    """Returns transformers' model without weights, except for those of its vision tower if `has_tower`.

    The tower is frozen, in `dtype` on `device`. Raises EnvironmentFault if the files in `folder` have other weights.
    """
    whole = without_weights(folder)
    if has_tower:
        tower = drawn_tower(whole, dtype)
        _load(tower, Path(folder))
        whole.visual = tower.to(device)
    return whole.eval().requires_grad_(False)


def _load(tower: Module, folder: Path) -> None:
    stored: dict[str, Tensor] = {}
    for file, keys in tower_tensors(folder):
        with safe_open(file, framework="pt", device="cpu") as tensors:
            stored |= {in_tower(key): tensors.get_tensor(key) for key in keys}
    try:
        tower.load_state_dict(stored)
    except RuntimeError as error:
        raise EnvironmentFault(
            f"model.path {folder}: the weights of its vision tower are not those of {type(tower).__name__}, which "
            f"config.json describes: {error}"
        ) from None


@dataclass(frozen=True)
class _Placed:
    """Features of a micro-batch's image tokens on this rank, and their rows among hidden states [length * batch]."""

    rows: Tensor  # int64 [tokens]
    of_layers: tuple[Tensor, ...]  # [tokens, hidden] each: of the embedding, then of DeepStack


@dataclass
class _Added:
    """Adds one of DeepStack's features behind a layer."""

    number: int  # among those of _Placed
    placed: _Placed | None = None
    training: bool = False
    pending: deque[_Placed | None] = field(default_factory=deque)  # of forwards that backward will recompute

    def __call__(self, layer: Module, given: Any, output: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        placed = self._current()
        if placed is None:
            return None
        hidden, *others = output
        return (_at(hidden, placed.rows, placed.of_layers[self.number], is_sum=True), *others)

    def _current(self) -> _Placed | None:
        # as of routers (routing.py): a recomputation inside a backward pass gets what the first forward had
        if torch._C._current_graph_task_id() != -1 and self.pending:
            return self.pending.popleft()
        if self.training and not torch.is_grad_enabled():
            self.pending.append(self.placed)
        return self.placed


class Vision:
    """The images of one rank's model chunks."""

    def __init__(self, chunks: list[Module], folder: str, dtype: torch.dtype, device: torch.device, pixels: Pixels):
        """`folder`: the checkpoint with the tower. `pixels`: asked on ranks of the first stage alone, once a step and a
        replica for each image.

        Raises ConfigError where the first chunk has fewer layers than DeepStack has features.
        """
        self._pixels = pixels
        self._device = device
        cores = unwrap_model(chunks)
        first = next((core for core in cores if core.pre_process), None)
        self._sees = first is not None
        trained = None if first is None else trained_tower(first)
        self._whole = whole_model(folder, dtype, device, self._sees and trained is None)
        self._learning: TowerGradients | None = None  # of a tower that is trained
        if trained is not None:
            self._whole.visual = trained
            self._learning = TowerGradients(trained, self._features_of, self._shared_out)
            before_sums(chunks, self._learning.backward)
        self._axes: Tensor | None = None  # int64 [turned pairs]: the position that turns a pair
        self._positions: Tensor | None = None  # of the micro-batch that a chunk computes
        self._placed: _Placed | None = None
        self._added: list[_Added] = []
        self._features: dict[str, Tensor] = {}  # of a step: name -> [tokens, layers, hidden], on the host
        for core in cores:
            core.config.apply_rope_fusion = False  # Megatron's kernels take one position a token
            core.rotary_pos_emb.register_forward_hook(self._turned)
        if first is not None:
            self._watch(first)

    def _watch(self, first: Module) -> None:
        count = len(getattr(self._whole.visual, "deepstack_merger_list", ()))
        layers = first.decoder.layers
        if count > len(layers):
            raise ConfigError(
                f"the first pipeline chunk of this model has {len(layers)} layers, "
                f"and images add features behind the first {count} (deepstack_visual_indexes): give it at least {count}"
            )
        first.embedding.register_forward_hook(self._embedded)
        for number in range(count):
            added = _Added(number + 1)
            layers[number].register_forward_hook(added)
            self._added.append(added)

    def prepared(self, batch: TrainBatch) -> TrainBatch:
        """Begins a step: forgets the features of the previous one, and sets the positions of all tokens."""
        self._features.clear()
        self._forget_recomputed()
        return self.with_positions(batch)

    def weights_changed(self) -> None:
        """Forgets the features that a tower computed before it was trained by an update."""
        if self._learning is not None:
            self._features.clear()

    @contextmanager
    def other_weights(self) -> Iterator[None]:
        """Returns a context for a pass with other weights in place, such as the reference's.

        Features that a trained tower has computed are kept, and not used there.
        """
        if self._learning is None:
            yield
            return
        kept = self._features
        self._features = {}
        try:
            yield
        finally:
            self._features = kept

    def _forget_recomputed(self) -> None:
        for added in self._added:
            added.pending.clear()

    def with_positions(self, batch: TrainBatch) -> TrainBatch:
        """Sets the positions of all tokens, if rows have images."""
        if batch.image_counts is None:
            return batch
        lengths = batch.sequence_lengths
        ends = np.cumsum(lengths)
        begins = ends - lengths
        positions = np.repeat((np.arange(ends[-1]) - np.repeat(begins, lengths))[:, None], AXES, 1).astype(np.int32)
        starts = np.repeat(np.cumsum(batch.lengths) - batch.lengths, batch.image_counts) + batch.image_starts
        of_sequence = np.searchsorted(ends, starts, side="right")
        for sequence in np.unique(of_sequence):
            images = np.flatnonzero(of_sequence == sequence)
            kinds = np.zeros(lengths[sequence], np.int64)
            for image in images:
                start = starts[image] - begins[sequence]
                kinds[start : start + batch.image_tokens[image]] = 1
            found = self._of_sequence(kinds, batch.image_grids[images])
            positions[begins[sequence] : ends[sequence]] = found
        return replace(batch, positions=positions)

    def _of_sequence(self, kinds: np.ndarray, grids: np.ndarray) -> np.ndarray:
        """Returns positions, int64 [tokens, 3]. `kinds`: 1 for tokens of images, 0 for text."""
        kinds = torch.from_numpy(kinds)[None]
        found, _ = self._whole.get_rope_index(kinds, kinds, torch.from_numpy(grids.astype(np.int64)))
        return found[:, 0].T.numpy()

    def around(
        self, batch: TrainBatch, inner: Around, training: bool = False, micros: Sequence[MicroRows] | None = None
    ) -> Around:
        """Returns a context in which one chunk's forward sees a micro-batch's images, with `inner` inside of it.

        Collective over the ranks that share the rows of `batch`: features that are not there yet are computed.
        `micros`: those of a mini-batch, whose images alone are wanted; None: all.
        """
        self._forget_recomputed()
        grids = {}
        if self._sees and batch.image_counts is not None:
            grids = _grids(batch, micros)
            self._look(grids)
        if training and self._learning is not None:
            self._learning.begin(grids, self._features)

        @contextmanager
        def both(model: Module, inputs: MicroBatch) -> Iterator[None]:
            core = unwrap_model(model)
            self._positions = inputs.positions
            if core.pre_process:
                self._show(self._of_micro_batch(inputs, core.config.sequence_parallel, training), training)
            try:
                with inner(model, inputs):
                    yield
            finally:
                self._positions = None
                if core.pre_process:
                    self._show(None, False)

        return both

    def _show(self, placed: _Placed | None, training: bool) -> None:
        self._placed = placed
        for added in self._added:
            added.placed = placed
            added.training = training

    def _of_micro_batch(self, inputs: MicroBatch, sequence_parallel: bool, training: bool) -> _Placed | None:
        images = inputs.images
        if images is None or not images.names:
            return None
        batch, length = inputs.input_ids.shape
        shares = mpu.get_tensor_model_parallel_world_size() if sequence_parallel else 1
        share = length // shares
        begin = share * (mpu.get_tensor_model_parallel_rank() if sequence_parallel else 0)
        rows, features, own = [], [], []
        for name, places, parts in zip(images.names, images.places, images.parts, strict=True):
            row, place = np.divmod(places, length)
            here = (place >= begin) & (place < begin + share)
            if here.any():
                rows.append((place[here] - begin) * batch + row[here])
                own.append((name, torch.from_numpy(parts[here])))
                features.append(self._features[name][own[-1][1]])
        if not rows:
            return None
        layers = torch.cat(features).to(self._device).unbind(1)
        if training and self._learning is not None:
            layers = self._learning.watched(layers, own, sequence_parallel)
        return _Placed(torch.from_numpy(np.concatenate(rows)).to(self._device), layers)

    def _look(self, grids: Grids) -> None:
        """Computes the features of images of a replica's rows. Each rank sends what it has computed to the others.

        The device has the features of one image at a time.
        """
        group = mpu.get_tensor_and_context_parallel_group()
        wanted = {name: grid for name, grid in grids.items() if name not in self._features}
        shared_out = list(self._shared_out(wanted))
        with torch.no_grad():  # first all of this rank's, while the others compute theirs
            found = {
                name: self._features_of(name, wanted[name]).cpu()
                for owner, name in shared_out
                if owner == dist.get_rank(group)
            }
        if dist.get_world_size(group) > 1:
            for owner, name in shared_out:
                is_own = name in found
                features = found[name].to(self._device) if is_own else self._room_for(wanted[name])
                dist.broadcast(features, dist.get_global_rank(group, owner), group)
                if not is_own:
                    found[name] = features.cpu()
        self._features |= found

    def _shared_out(self, grids: Grids) -> Iterator[tuple[int, str]]:
        """Yields each image with the number of the rank that computes it, among those that share a replica's rows: they
        share images out by patches.
        """
        names = list(grids)
        size = dist.get_world_size(mpu.get_tensor_and_context_parallel_group())
        patches = np.array([prod(grids[name]) for name in names], np.float64)
        for owner, share in enumerate(balanced_parts(patches, size) if names else ()):
            yield from ((owner, names[number]) for number in share)

    def _features_of(self, name: str, grid: Sequence[int]) -> Tensor:
        """Returns features of an image, [tokens, layers, hidden]: in the places of its tokens, then DeepStack's.

        The tower computes images one by one, so that no image's bits depend on others.
        """
        found = self._whole.get_image_features(
            self._pixels(name).to(self._device), torch.tensor([list(grid)], device=self._device), return_dict=True
        )
        of_layers = (found.pooler_output, *(getattr(found, "deepstack_features", None) or ()))
        return torch.stack([features[0] for features in of_layers], 1)

    def _room_for(self, grid: Sequence[int]) -> Tensor:
        """Returns memory for the features of an image that another rank computes."""
        tower = self._whole.visual
        tokens = prod(grid) // tower.spatial_merge_size**2
        shape = (tokens, 1 + len(self._added), tower.config.out_hidden_size)
        return torch.empty(shape, dtype=tower.dtype, device=self._device)

    def _embedded(self, embedding: Module, given: Any, hidden: Tensor) -> Tensor | None:
        if self._placed is None:
            return None
        return _at(hidden, self._placed.rows, self._placed.of_layers[0], is_sum=False)

    def _turned(self, rotary: Module, given: Any, plain: Tensor) -> Tensor | None:
        """Returns angles [length, batch, 1, 2 * pairs] by three positions a token, in place of those by one.

        Of a pack there is one row for each of this rank's tokens (forward.packing_of).
        """
        if self._positions is None:
            return None
        if self._axes is None:
            self._axes = self._axes_of(len(rotary.inv_freq)).to(self._device)
        angles = self._positions[..., self._axes].float() * rotary.inv_freq
        return torch.cat((angles, angles), -1).transpose(0, 1)[:, :, None]

    def _axes_of(self, pairs: int) -> Tensor:
        """Asks the model's own module which of three positions turns each pair, by angles that say which they are."""
        marked = torch.arange(AXES).view(AXES, 1, 1, 1).expand(AXES, 1, 1, pairs).clone()
        return self._whole.language_model.rotary_emb.recomposition_frequencies(marked)[0, 0, :pairs]


def _grids(batch: TrainBatch, micros: Sequence[MicroRows] | None) -> dict[str, list[int]]:
    """Returns the images of rows by name, in their order. `micros`: as in Vision.around."""
    images = np.arange(len(batch.image_names))
    if micros is not None:
        rows = np.concatenate([micro.rows for micro in micros])
        images = np.flatnonzero(np.isin(np.repeat(np.arange(len(batch)), batch.image_counts), rows))
    return {batch.image_names[number].decode(): batch.image_grids[number].tolist() for number in images}


def _at(hidden: Tensor, rows: Tensor, features: Tensor, is_sum: bool) -> Tensor:
    """Returns hidden states [length, batch, hidden] with features in the place of `rows`, or added to them."""
    flat = hidden.flatten(0, 1)
    features = features.to(hidden.dtype)
    if is_sum:
        features = flat[rows] + features
    return flat.index_put((rows,), features).view_as(hidden)
