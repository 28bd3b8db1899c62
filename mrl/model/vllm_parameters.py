"""What each vLLM worker must hold: its fused parameters as boxes in Hugging Face coordinates.

Names and shapes are those of vLLM 0.32's Qwen models in load layout, that is as `load_weights` fills them, before a kernel packs or
shuffles anything. The dialect says how a device's build lays experts out: everybody but Ascend stores them as [expert, out, in],
vllm-ascend transposed. Experts are placed as vLLM's linear strategy places them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from mrl.errors import ConfigError
from mrl.model import ModelSpec
from mrl.model.boxes import Box
from mrl.model.layout import RolloutLayout

Dialect = Literal["cpu", "cuda", "npu"]
TRANSPOSED: Dialect = "npu"
_VOCABULARY_MULTIPLE = 64  # vLLM's DEFAULT_VOCAB_PADDING_SIZE


@dataclass(frozen=True)
class TargetPiece:
    """A block of a Hugging Face tensor and where it lies in a worker's parameter.

    Hugging Face dimension d lies along local dimension `axes[d]`; local dimensions that are not in `axes` have extent 1 in `local_box`
    (the number of an expert).
    """

    hf_name: str
    hf_box: Box
    local_box: Box
    axes: tuple[int, ...]


@dataclass(frozen=True)
class TargetParameter:
    """One parameter of one worker. Local elements under no piece are padding, which must be zero."""

    name: str  # as in named_parameters()
    module: str  # the name without its last part: what vLLM's layerwise reload materialises and processes as one
    local_shape: tuple[int, ...]
    dtype: str
    pieces: tuple[TargetPiece, ...]


def target_parameters(model: ModelSpec, rollout: RolloutLayout, worker: int, dialect: Dialect, dtype: str) -> tuple[TargetParameter, ...]:
    """The parameters of one worker in vLLM's module order; `dtype` is the engine's.

    Raises ConfigError for sizes that vLLM could not divide over the workers.
    """
    return tuple(_Worker(model, rollout, worker, dialect == TRANSPOSED, dtype).parameters())


@dataclass(frozen=True)
class _Worker:
    model: ModelSpec
    rollout: RolloutLayout
    worker: int
    transposed: bool
    dtype: str

    @property
    def tp(self) -> int:
        return self.rollout.coords(self.worker).tp

    def parameters(self) -> Iterator[TargetParameter]:
        yield self._vocabulary("model.embed_tokens.weight")
        for layer in range(self.model.num_layers):
            yield from self._layer(f"model.layers.{layer}.", layer in self.model.moe_layers)
        yield self._whole("model.norm.weight", (self.model.hidden_size,))
        if not self.model.tie_word_embeddings:
            yield self._vocabulary("lm_head.weight")

    def _layer(self, at: str, has_experts: bool) -> Iterator[TargetParameter]:
        m = self.model
        yield self._qkv(at + "self_attn.", "weight", (m.hidden_size,))
        if m.qkv_bias:
            yield self._qkv(at + "self_attn.", "bias", ())
        yield self._columns(at + "self_attn.o_proj.weight", m.hidden_size, m.num_attention_heads * m.head_dim)
        if m.qk_norm:
            yield self._whole(at + "self_attn.q_norm.weight", (m.head_dim,))
            yield self._whole(at + "self_attn.k_norm.weight", (m.head_dim,))
        if has_experts:
            yield from self._moe(at + "mlp.")
        else:
            yield from self._mlp(at + "mlp.", m.intermediate_size)
        yield self._whole(at + "input_layernorm.weight", (m.hidden_size,))
        yield self._whole(at + "post_attention_layernorm.weight", (m.hidden_size,))

    def _moe(self, at: str) -> Iterator[TargetParameter]:
        m = self.model
        yield self._whole(at + "gate.weight", (m.num_experts, m.hidden_size))
        if m.shared_expert_intermediate_size:
            yield self._whole(at + "shared_expert_gate.weight", (1, m.hidden_size))
            yield from self._mlp(at + "shared_expert.", m.shared_expert_intermediate_size)
        yield from self._experts(at)

    def _mlp(self, at: str, size: int) -> Iterator[TargetParameter]:
        rows = self._share(size, f"{at}gate_proj")
        hidden = self.model.hidden_size
        segments = [(f"{at}{part}_proj.weight", *rows) for part in ("gate", "up")]
        yield self._stacked(f"{at}gate_up_proj.weight", segments, (hidden,))
        yield self._columns(f"{at}down_proj.weight", hidden, size)

    def _qkv(self, at: str, leaf: str, tail: tuple[int, ...]) -> TargetParameter:
        """Query rows, key rows, value rows. With more tensor ranks than key/value heads, neighbouring ranks hold the same head."""
        m, parts = self.model, self.rollout.tensor
        heads = self._share(m.num_attention_heads, "attention heads")
        kv, copies = max(m.num_key_value_heads // parts, 1), max(parts // m.num_key_value_heads, 1)
        if kv * parts != m.num_key_value_heads * copies:
            raise ConfigError(
                f"{m.num_key_value_heads} key/value heads can neither be divided over {parts} tensor ranks nor repeated on them"
            )
        first = self.tp // copies * kv
        ranges = {"q": heads, "k": (first, first + kv), "v": (first, first + kv)}
        segments = [(f"{at}{part}_proj.{leaf}", start * m.head_dim, stop * m.head_dim) for part, (start, stop) in ranges.items()]
        return self._stacked(f"{at}qkv_proj.{leaf}", segments, tail)

    def _experts(self, at: str) -> Iterator[TargetParameter]:
        """w13 [expert, gate rows then up rows, hidden] and w2 [expert, hidden, columns], or both with the last two swapped."""
        m, module = self.model, f"{at}experts.routed_experts"
        experts, (start, stop) = self._expert_share(), self._expert_rows()
        size, axes = stop - start, (2, 1) if self.transposed else (1, 2)
        w13, w2 = [], []
        for slot, expert in enumerate(experts):
            hf, one = f"{at}experts.{expert}.", (slot, slot + 1)
            for half, part in enumerate(("gate", "up")):
                hf_box = Box(((start, stop), (0, m.hidden_size)))
                w13.append(
                    self._expert_piece(
                        f"{hf}{part}_proj.weight", hf_box, one, ((half * size, half * size + size), (0, m.hidden_size)), axes
                    )
                )
            hf_box = Box(((0, m.hidden_size), (start, stop)))
            w2.append(self._expert_piece(f"{hf}down_proj.weight", hf_box, one, ((0, m.hidden_size), (0, size)), axes))
        for leaf, shape, pieces in (("w13_weight", (2 * size, m.hidden_size), w13), ("w2_weight", (m.hidden_size, size), w2)):
            shape = shape[::-1] if self.transposed else shape
            yield TargetParameter(f"{module}.{leaf}", module, (len(experts), *shape), self.dtype, tuple(pieces))

    def _expert_piece(self, hf_name: str, hf_box: Box, slot: tuple[int, int], ranges: tuple, axes: tuple[int, int]) -> TargetPiece:
        return TargetPiece(hf_name, hf_box, Box((slot, *(ranges[::-1] if self.transposed else ranges))), axes)

    def _expert_share(self) -> range:
        """Numbers of this worker's experts; what cannot be divided goes to the first ranks."""
        parts, (index, _) = self.rollout.expert, self.rollout.expert_coords(self.worker)
        each, more = divmod(self.model.num_experts, parts)
        if not each:
            raise ConfigError(f"{self.model.num_experts} experts cannot be spread over {parts} workers: some would have none")
        first = index * each + min(index, more)
        return range(first, first + each + (index < more))

    def _expert_rows(self) -> tuple[int, int]:
        _, index = self.rollout.expert_coords(self.worker)
        return _part(self.model.moe_intermediate_size, self.rollout.expert_tensor, index, "moe_intermediate_size")

    def _share(self, size: int, what: str) -> tuple[int, int]:
        return _part(size, self.rollout.tensor, self.tp, what)

    def _vocabulary(self, name: str) -> TargetParameter:
        """Rows of the vocabulary padded to a multiple of 64; a rank may hold padding only."""
        vocab, hidden = self.model.vocab_size, self.model.hidden_size
        start, stop = self._share(-(-vocab // _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE, "padded vocabulary")
        held = [(name, start, min(stop, vocab))] if start < vocab else []
        return self._stacked(name, held, (hidden,), rows=stop - start)

    def _whole(self, name: str, shape: tuple[int, ...]) -> TargetParameter:
        return self._parameter(name, shape, [(name, Box.whole(shape), Box.whole(shape))])

    def _columns(self, name: str, rows: int, columns: int) -> TargetParameter:
        box = Box(((0, rows), self._share(columns, name)))
        return self._parameter(name, box.shape, [(name, box, Box.whole(box.shape))])

    def _stacked(
        self, name: str, segments: Sequence[tuple[str, int, int]], tail: tuple[int, ...], rows: int | None = None
    ) -> TargetParameter:
        """Rows [start, stop) of several tensors (hf name, start, stop), one under the other."""
        blocks, at, columns = [], 0, Box.whole(tail).ranges
        for hf_name, start, stop in segments:
            blocks.append((hf_name, Box(((start, stop), *columns)), Box(((at, at + stop - start), *columns))))
            at += stop - start
        return self._parameter(name, (at if rows is None else rows, *tail), blocks)

    def _parameter(self, name: str, shape: tuple[int, ...], blocks: Sequence[tuple[str, Box, Box]]) -> TargetParameter:
        axes = tuple(range(len(shape)))
        pieces = tuple(TargetPiece(hf_name, hf_box, local_box, axes) for hf_name, hf_box, local_box in blocks)
        return TargetParameter(name, name.rpartition(".")[0], tuple(shape), self.dtype, pieces)


def _part(size: int, parts: int, index: int, what: str) -> tuple[int, int]:
    """(start, stop) of an equal share. Raises ConfigError when there is none."""
    if size % parts:
        raise ConfigError(f"{what} = {size} cannot be divided over {parts} workers; choose rollout degrees that divide it")
    each = size // parts
    return index * each, (index + 1) * each
