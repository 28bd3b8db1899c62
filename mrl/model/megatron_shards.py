"""What each Megatron rank holds, as boxes in Hugging Face coordinates.

Names are those of megatron-core 0.16.1 GPT models built with Transformer Engine's module names, which mbridge 0.15.1 maps: the norm
before a fused linear layer belongs to that layer (`linear_qkv.layer_norm_weight`), experts are `experts.linear_fc1.weight{i}`. Layer
and expert numbers in them are local to the model chunk and the rank, as in `named_parameters()` of the unwrapped chunk.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property

from mrl.model import ModelSpec, tensor_specs
from mrl.model.boxes import Box
from mrl.model.layout import TrainLayout, padded_vocab_size


@dataclass(frozen=True)
class Piece:
    """A block of a Hugging Face tensor and where it lies in the local parameter; both boxes have one shape."""

    hf_name: str
    hf_box: Box
    local_box: Box


@dataclass(frozen=True)
class Shard:
    """One local parameter of one rank. Local elements under no piece are vocabulary padding."""

    megatron_name: str
    vp_chunk: int  # number of the model chunk (virtual pipeline rank) that has the parameter
    local_shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    is_expert: bool
    replicas: tuple[int, ...]  # all ranks, ascending and this one included, whose parameter holds exactly these pieces

    @property
    def primary(self) -> int:
        """The replica that counts when each element is to be counted once."""
        return self.replicas[0]


def local_shapes(shards: Iterable[Shard]) -> dict[tuple[str, int], tuple[int, ...]]:
    """(Megatron name, model chunk) -> shape, as the model itself can be asked."""
    return {(shard.megatron_name, shard.vp_chunk): shard.local_shape for shard in shards}


def source_shards(model: ModelSpec, layout: TrainLayout, rank: int) -> tuple[Shard, ...]:
    """The parameters of one rank, chunk by chunk. The layout must be legal for the model (`TrainLayout.build` sees to it)."""
    pp = layout.dense_coords(rank).pp
    return tuple(shard for vp in range(layout.virtual_pipeline) for shard in _Chunk(model, layout, rank, pp, vp).shards())


@dataclass(frozen=True)
class _Cut:
    """How a parameter is divided: this rank has part `index` of `parts`, and `replicas` have the same part."""

    index: int
    parts: int
    replicas: tuple[int, ...]
    is_expert: bool = False

    def share(self, size: int) -> tuple[int, int]:
        """(start, stop) of this rank's part of a dimension."""
        part = size // self.parts
        return self.index * part, (self.index + 1) * part


@dataclass(frozen=True)
class _Chunk:
    """One model chunk on one rank."""

    model: ModelSpec
    layout: TrainLayout
    rank: int
    pp: int
    vp: int

    def shards(self) -> Iterator[Shard]:
        if self.layout.is_first_chunk(self.pp, self.vp):
            yield self._vocabulary("embedding.word_embeddings.weight", "model.embed_tokens.weight", self._vocabulary_cut)
        for local, layer in enumerate(self.layout.stage_layers(self.pp, self.vp)):
            yield from self._layer(f"decoder.layers.{local}.", layer)
        if self.layout.is_last_chunk(self.pp, self.vp):
            yield self._copied("decoder.final_layernorm.weight", "model.norm.weight")
            yield from self._output_layer()

    def _output_layer(self) -> Iterator[Shard]:
        if not self.model.tie_word_embeddings:
            yield self._vocabulary("output_layer.weight", "lm_head.weight", self._tensor_cut)
        elif self.layout.pipeline > 1:
            # the last stage has no embedding to share, so Megatron gives it a copy and keeps the two equal
            yield self._vocabulary("output_layer.weight", "model.embed_tokens.weight", self._vocabulary_cut)

    def _layer(self, to: str, layer: int) -> Iterator[Shard]:
        hf = f"model.layers.{layer}."
        yield from self._attention(to, hf)
        if layer in self.model.moe_layers:
            yield self._copied(f"{to}pre_mlp_layernorm.weight", f"{hf}post_attention_layernorm.weight")
            yield from self._moe(f"{to}mlp.", f"{hf}mlp.")
        else:
            yield self._copied(f"{to}mlp.linear_fc1.layer_norm_weight", f"{hf}post_attention_layernorm.weight")
            yield from self._mlp(f"{to}mlp.", f"{hf}mlp.", self._tensor_cut)

    def _attention(self, to: str, hf: str) -> Iterator[Shard]:
        to, att = f"{to}self_attention.", f"{hf}self_attn."
        yield self._copied(f"{to}linear_qkv.layer_norm_weight", f"{hf}input_layernorm.weight")
        yield self._qkv(f"{to}linear_qkv.weight", att, "weight")
        if self.model.qkv_bias:
            yield self._qkv(f"{to}linear_qkv.bias", att, "bias")
        if self.model.qk_norm:
            yield self._copied(f"{to}q_layernorm.weight", f"{att}q_norm.weight")
            yield self._copied(f"{to}k_layernorm.weight", f"{att}k_norm.weight")
        yield self._columns(f"{to}linear_proj.weight", f"{att}o_proj.weight", self._tensor_cut)

    def _moe(self, to: str, hf: str) -> Iterator[Shard]:
        yield self._copied(f"{to}router.weight", f"{hf}gate.weight")
        per_rank = self.model.num_experts // self.layout.expert
        first = self.layout.expert_coords(self.rank).ep * per_rank
        for local in range(per_rank):
            yield from self._mlp(f"{to}experts.", f"{hf}experts.{first + local}.", self._expert_cut, suffix=str(local))
        if self.model.shared_expert_intermediate_size:
            yield from self._mlp(f"{to}shared_experts.", f"{hf}shared_expert.", self._tensor_cut)
            yield self._copied(f"{to}shared_experts.gate_weight", f"{hf}shared_expert_gate.weight")

    def _mlp(self, to: str, hf: str, cut: _Cut, suffix: str = "") -> Iterator[Shard]:
        yield self._stacked_rows(f"{to}linear_fc1.weight{suffix}", (f"{hf}gate_proj.weight", f"{hf}up_proj.weight"), cut)
        yield self._columns(f"{to}linear_fc2.weight{suffix}", f"{hf}down_proj.weight", cut)

    @cached_property
    def _tensor_cut(self) -> _Cut:
        """Divided over the tensor ranks."""
        return _Cut(self.layout.dense_coords(self.rank).tp, self.layout.tensor, self.layout.dense_group(self.rank, "cp", "dp"))

    @cached_property
    def _copy_cut(self) -> _Cut:
        """Whole on every tensor rank."""
        return _Cut(0, 1, self.layout.dense_group(self.rank, "tp", "cp", "dp"))

    @cached_property
    def _expert_cut(self) -> _Cut:
        """Divided over the tensor ranks of the expert grid."""
        coords = self.layout.expert_coords(self.rank)
        return _Cut(coords.etp, self.layout.expert_tensor, self.layout.expert_group(self.rank, "edp"), is_expert=True)

    @cached_property
    def _vocabulary_cut(self) -> _Cut:
        """Word embeddings, which the last stage has a copy of when they are tied."""
        cut, layout = self._tensor_cut, self.layout
        if not self.model.tie_word_embeddings:
            return cut
        ends = {0, layout.pipeline - 1}
        tp = cut.index
        ranks = (layout.rank_of_dense(tp, cp, dp, pp) for pp in ends for dp in range(layout.data) for cp in range(layout.context))
        return _Cut(tp, cut.parts, tuple(sorted(ranks)))

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return _shapes(self.model)

    def _shard(self, name: str, shape: tuple[int, ...], pieces: tuple[Piece, ...], cut: _Cut) -> Shard:
        return Shard(name, self.vp, shape, pieces, cut.is_expert, cut.replicas)

    def _copied(self, name: str, hf_name: str) -> Shard:
        box = Box.whole(self._shapes[hf_name])
        return self._shard(name, box.shape, (Piece(hf_name, box, box),), self._copy_cut)

    def _columns(self, name: str, hf_name: str, cut: _Cut) -> Shard:
        """A row-parallel layer: its input dimension, the second one, is divided."""
        rows, columns = self._shapes[hf_name]
        box = Box(((0, rows), cut.share(columns)))
        return self._shard(name, box.shape, (Piece(hf_name, box, Box.whole(box.shape)),), cut)

    def _stacked_rows(self, name: str, hf_names: tuple[str, ...], cut: _Cut) -> Shard:
        """A gated column-parallel layer: this rank's rows of gate, then its rows of up."""
        segments = []
        for hf_name in hf_names:
            start, stop = cut.share(self._shapes[hf_name][0])
            segments.append((hf_name, start, stop - start))
        return self._rows(name, segments, 0, sum(rows for _, _, rows in segments), cut)

    def _qkv(self, name: str, hf: str, leaf: str) -> Shard:
        """The fused projection: for each key/value head the query heads that use it, then the key head, then the value head.

        The fused rows are cut evenly, so with more tensor ranks than key/value heads a rank's part may begin inside a group.
        """
        m, cut = self.model, self._tensor_cut
        queries = m.num_attention_heads // m.num_key_value_heads * m.head_dim
        segments = []
        for group in range(m.num_key_value_heads):
            segments.append((f"{hf}q_proj.{leaf}", group * queries, queries))
            segments += [(f"{hf}{part}_proj.{leaf}", group * m.head_dim, m.head_dim) for part in ("k", "v")]
        return self._rows(name, segments, *cut.share(sum(rows for _, _, rows in segments)), cut)

    def _vocabulary(self, name: str, hf_name: str, cut: _Cut) -> Shard:
        vocab = self.model.vocab_size
        return self._rows(name, [(hf_name, 0, vocab)], *cut.share(padded_vocab_size(vocab, cut.parts)), cut)

    def _rows(self, name: str, segments: list[tuple[str, int, int]], start: int, stop: int, cut: _Cut) -> Shard:
        """Rows [start, stop) of the concatenation of `segments` (hf name, first row, number of rows); rows beyond it are padding."""
        tail = self._shapes[segments[0][0]][1:]
        pieces, at = [], 0
        for hf_name, first, rows in segments:
            low, high = max(start, at), min(stop, at + rows)
            if low < high:
                columns = Box.whole(tail).ranges
                hf_box = Box(((first + low - at, first + high - at), *columns))
                pieces.append(Piece(hf_name, hf_box, Box(((low - start, high - start), *columns))))
            at += rows
        return self._shard(name, (stop - start, *tail), tuple(pieces), cut)


@cache
def _shapes(model: ModelSpec) -> dict[str, tuple[int, ...]]:
    return {t.name: t.shape for t in tensor_specs(model)}
