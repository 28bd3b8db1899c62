"""A vision tower that is trained: its tensors, which are rows of the weight map.

The tower is transformers' module. Every rank of the first model chunk has the whole of it, and so has every worker of
an engine. Its tensors have one name everywhere, model.visual.*, whatever prefix the files have.

    projector    what makes tokens of patches: the merger, and DeepStack's
    trained      all of the tower
"""

from collections.abc import Iterator
from dataclasses import dataclass

from mrl.model.tower_sizes import VisionTower

NAMES = "model.visual."  # prefix of the tower's tensors in the weight map
MODULE = "visual."  # of its parameters in the first model chunk, and in an engine's model
FROZEN = "frozen"  # values of model.vision
TRAINED = "trained"
PROJECTOR = "projector"
_PROJECTOR = ("merger.", "deepstack_merger_list.")
Tensors = Iterator[tuple[str, tuple[int, ...]]]  # name and shape of each


@dataclass(frozen=True)
class TrainedTower:
    """A tower, and how much of it is trained."""

    part: str  # TRAINED or PROJECTOR, as in model.vision
    sizes: VisionTower

    def shapes(self) -> Tensors:
        """Yields the name within the tower and the shape of each tensor, in the order of transformers' modules."""
        hidden = self.sizes.hidden_size
        yield "patch_embed.proj.weight", (hidden, *self.sizes.patch)
        if not self.sizes.gated:
            yield "patch_embed.proj.bias", (hidden,)
            yield "pos_embed.weight", (self.sizes.positions, hidden)
        for layer in range(self.sizes.layers):
            yield from _inside(f"blocks.{layer}", self._layer())
        yield from _inside("merger", self._merger(hidden))
        for number in range(self.sizes.features):
            yield from _inside(f"deepstack_merger_list.{number}", self._merger(hidden * self.sizes.merged))

    def _layer(self) -> Tensors:
        hidden = self.sizes.hidden_size
        inner = self.sizes.intermediate_size
        for norm in ("norm1", "norm2"):
            yield from self._norm(norm, hidden)
        yield from _linear("attn.qkv", 3 * hidden, hidden)
        yield from _linear("attn.proj", hidden, hidden)
        if self.sizes.gated:
            yield from _linear("mlp.gate_proj", inner, hidden)
            yield from _linear("mlp.up_proj", inner, hidden)
            yield from _linear("mlp.down_proj", hidden, inner)
        else:
            yield from _linear("mlp.linear_fc1", inner, hidden)
            yield from _linear("mlp.linear_fc2", hidden, inner)

    def _merger(self, normed: int) -> Tensors:
        """`normed`: width of its norm, of a patch or of a token."""
        norm, first, second = ("norm", "linear_fc1", "linear_fc2")
        if self.sizes.gated:
            norm, first, second = ("ln_q", "mlp.0", "mlp.2")
        token = self.sizes.hidden_size * self.sizes.merged
        yield from self._norm(norm, normed)
        yield from _linear(first, token, token)
        yield from _linear(second, self.sizes.out_hidden_size, token)

    def _norm(self, name: str, size: int) -> Tensors:
        yield f"{name}.weight", (size,)
        if not self.sizes.gated:
            yield f"{name}.bias", (size,)

    def is_trained(self, name: str) -> bool:
        """Tells whether a tensor is trained, given its name within the tower."""
        return self.part == TRAINED or name.startswith(_PROJECTOR)


def _inside(module: str, tensors: Tensors) -> Tensors:
    return ((f"{module}.{name}", shape) for name, shape in tensors)


def _linear(name: str, rows: int, columns: int) -> Tensors:
    yield f"{name}.weight", (rows, columns)
    yield f"{name}.bias", (rows,)
