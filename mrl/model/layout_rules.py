"""The rules for a training layout, as one table. All are checked at once.

Used through mrl/model/layout.py.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from math import lcm
from typing import Any, Protocol

from mrl.errors import UnknownValue, Violation
from mrl.model.layout_degrees import LayoutDegrees


class ModelFacts(Protocol):
    """The facts about a model that the rules need. mrl.model.ModelSpec implements it."""

    @property
    def num_layers(self) -> int: ...
    @property
    def num_attention_heads(self) -> int: ...
    @property
    def num_key_value_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...  # of dense MLP layers
    @property
    def moe_layers(self) -> tuple[int, ...]: ...  # numbers of the layers with experts
    @property
    def num_experts(self) -> int: ...  # 0: a dense model
    @property
    def moe_intermediate_size(self) -> int: ...
    @property
    def shared_expert_intermediate_size(self) -> int: ...  # 0: no shared expert
    @property
    def linear_num_key_heads(self) -> int: ...  # of gated delta attention; 0: no layer has it
    @property
    def wide_qk_norm(self) -> bool: ...  # one norm over the queries of all heads, one over the keys
    @property
    def attn_output_gate(self) -> bool: ...  # queries include a gate of the output
    @property
    def clamped_experts(self) -> bool: ...  # experts have biases


def padded_vocab_size(vocab_size: int, tensor: int) -> int:
    """Returns the rows of the embedding over all tensor ranks: the vocabulary rounded up to a multiple of the tensor
    degree.

    This is the smallest size that Megatron's vocabulary-parallel embedding accepts. The bridge gets this multiple
    (mbridge: `make_vocab_size_divisible_by`), because it pads nothing by default. Padding rows are zero and never
    exported.
    """
    return -(-vocab_size // tensor) * tensor


def chunk_layer_counts(d: LayoutDegrees, num_layers: int) -> tuple[tuple[int, ...], ...]:
    """Returns layer counts [pipeline][virtual_pipeline] of legal degrees, as megatron-core 0.16.1 splits them.

    Sources: transformer_block.get_num_layers_to_build; for an explicit list its `pipeline_model_parallel_layout`.
    """
    pp = d.pipeline_model_parallel_size
    vp = d.virtual_pipeline
    if d.pipeline_layers is not None:
        return tuple(tuple(d.pipeline_layers[v * pp + p] for v in range(vp)) for p in range(pp))
    if d.end_stages:
        return tuple((n // vp,) * vp for n in _end_stage_counts(d, num_layers))
    per_chunk = (num_layers + d.counted_extras) // (pp * vp)
    counts = [[per_chunk] * vp for _ in range(pp)]
    counts[0][0] -= d.account_for_embedding_in_pipeline_split
    counts[-1][-1] -= d.account_for_loss_in_pipeline_split
    return tuple(map(tuple, counts))


def _end_stage_counts(d: LayoutDegrees, num_layers: int) -> tuple[int, ...]:
    """Returns layers of each stage if the first or last is given. The other stages share the rest evenly."""
    first = d.num_layers_in_first_pipeline_stage
    last = d.num_layers_in_last_pipeline_stage
    middle = d.pipeline_model_parallel_size - len(d.end_stages)
    each = 0
    if middle > 0:
        each = (num_layers - sum(d.end_stages)) // middle
    return (() if first is None else (first,)) + (each,) * middle + (() if last is None else (last,))


@dataclass(frozen=True)
class _Rule:
    field: str
    holds: Callable[[LayoutDegrees, ModelFacts], bool]
    rule: str  # formatted with d (degrees) and m (model)
    why: str


def _is_moe(m: ModelFacts) -> bool:
    return m.num_experts > 0


def _has_dense_mlp(m: ModelFacts) -> bool:
    return len(m.moe_layers) < m.num_layers


def _kv_heads_split(d: LayoutDegrees, m: ModelFacts) -> bool:
    tp = d.tensor_model_parallel_size
    kv = m.num_key_value_heads
    return kv % tp == 0 or tp % kv == 0


def _qkv_rows_split(d: LayoutDegrees, m: ModelFacts) -> bool:
    return (m.num_attention_heads + 2 * m.num_key_value_heads) * m.head_dim % d.tensor_model_parallel_size == 0


def _middle_is_even(d: LayoutDegrees, m: ModelFacts) -> bool:
    if d.notations != 1 or not d.end_stages:
        return True
    middle = d.pipeline_model_parallel_size - len(d.end_stages)
    left = m.num_layers - sum(d.end_stages)
    if middle == 0:
        return left == 0
    return middle > 0 and left > 0 and left % middle == 0


def _stages_are_even(d: LayoutDegrees, m: ModelFacts) -> bool:
    if d.pipeline_layers is not None or d.end_stages:
        return True
    return (m.num_layers + d.counted_extras) % d.pipeline_model_parallel_size == 0


def _chunks_are_even(d: LayoutDegrees, m: ModelFacts) -> bool:
    if d.pipeline_layers is not None or not (_stages_are_even(d, m) and _middle_is_even(d, m)):
        return True  # another rule reports this
    pp = d.pipeline_model_parallel_size
    stages = _end_stage_counts(d, m.num_layers) if d.end_stages else ((m.num_layers + d.counted_extras) // pp,)
    return all(n % d.virtual_pipeline == 0 for n in stages)


def _list_fits(d: LayoutDegrees, m: ModelFacts) -> bool:
    if (listed := d.pipeline_layers) is None:
        return True
    chunks = d.pipeline_model_parallel_size * d.virtual_pipeline
    return (
        len(listed) == chunks
        and min(listed) >= 0
        and all(count > 0 for count in listed[1:-1])
        and sum(listed) == m.num_layers
    )


def _lists(d: LayoutDegrees, m: ModelFacts) -> Iterable[tuple[int, ...]]:
    """Yields pipeline splits to propose.

    These are the given one without empty inner chunks, an even one, and one with empty ends.
    """
    chunks = d.pipeline_model_parallel_size * d.virtual_pipeline
    if d.pipeline_layers is not None:
        yield _with_inner_layers(d.pipeline_layers)
    yield _even(m.num_layers, chunks)
    if chunks > 2:
        yield (0, *_even(m.num_layers, chunks - 2), 0)


def _with_inner_layers(listed: Sequence[int]) -> tuple[int, ...]:
    """Moves a layer of the fullest chunk to each empty inner chunk of `listed`."""
    counts = list(listed)
    for empty in (stage for stage in range(1, len(counts) - 1) if counts[stage] == 0):
        counts[counts.index(max(counts))] -= 1
        counts[empty] = 1
    return tuple(counts)


def _even(layers: int, chunks: int) -> tuple[int, ...]:
    each, more = divmod(layers, chunks)
    return tuple(each + (chunk < more) for chunk in range(chunks))


_TP = "tensor_model_parallel_size"
_PP = "pipeline_model_parallel_size"
_CP = "context_parallel_size"
_VPP = "virtual_pipeline_model_parallel_size"
_EP = "expert_model_parallel_size"
_ETP = "expert_tensor_parallel_size"
_FIRST = "num_layers_in_first_pipeline_stage"
_LAST = "num_layers_in_last_pipeline_stage"
_MIDDLE_RULE = (
    "of {m.num_layers} layers, those left for the middle stages must be at least one a stage and divide evenly"
)
_MIDDLE_WHY = "Megatron gives every stage without a count of its own the same number of layers"

TRAIN_RULES = (
    _Rule(
        "world_size",
        lambda d, m: d.world_size % d.dense_ranks == 0,
        "must be a multiple of tensor x context x pipeline = {d.dense_ranks}",
        "data parallelism is what remains of the world, and must be whole",
    ),
    _Rule(
        "world_size",
        lambda d, m: d.world_size % d.expert_ranks == 0,
        "must be a multiple of expert x expert tensor x pipeline = {d.expert_ranks}",
        "the experts' data parallelism is what remains of the world, and must be whole",
    ),
    _Rule(
        _TP,
        lambda d, m: m.num_attention_heads % d.tensor_model_parallel_size == 0,
        "must divide num_attention_heads = {m.num_attention_heads}",
        "each tensor rank computes whole heads",
    ),
    _Rule(
        _TP,
        _kv_heads_split,
        "must divide num_key_value_heads = {m.num_key_value_heads} or be a multiple of it",
        "a key/value head lies on one tensor rank, or is shared by a whole number of them",
    ),
    _Rule(
        _TP,
        _qkv_rows_split,
        "must divide the rows of the fused query-key-value weight",
        "Megatron cuts that weight into equal slices",
    ),
    _Rule(
        _TP,
        lambda d, m: not m.attn_output_gate or m.num_key_value_heads % d.tensor_model_parallel_size == 0,
        "must divide num_key_value_heads = {m.num_key_value_heads} where a gate weighs attention's output",
        "Megatron gives tensor ranks that share a head all of its gates, and each its own queries",
    ),
    _Rule(
        _TP,
        lambda d, m: not m.wide_qk_norm or m.num_key_value_heads % d.tensor_model_parallel_size == 0,
        "must divide num_key_value_heads = {m.num_key_value_heads} where one norm goes over the keys of all heads",
        "each tensor rank adds the squares of its own keys",
    ),
    _Rule(
        _TP,
        lambda d, m: m.linear_num_key_heads % d.tensor_model_parallel_size == 0,
        "must divide linear_num_key_heads = {m.linear_num_key_heads}",
        "each tensor rank has whole heads of gated delta attention with their states",
    ),
    _Rule(
        _CP,
        lambda d, m: d.context_parallel_size == 1 or m.linear_num_key_heads == 0,
        "must be 1 for a model with gated delta attention",
        "its state goes from token to token, and no rank passes one on",
    ),
    _Rule(
        _TP,
        lambda d, m: not _has_dense_mlp(m) or m.intermediate_size % d.tensor_model_parallel_size == 0,
        "must divide intermediate_size = {m.intermediate_size}",
        "gate, up and down projections are cut into equal slices",
    ),
    _Rule(
        _TP,
        lambda d, m: m.shared_expert_intermediate_size % d.tensor_model_parallel_size == 0,
        "must divide shared_expert_intermediate_size = {m.shared_expert_intermediate_size}",
        "the shared expert is cut over the tensor ranks",
    ),
    _Rule(
        _EP,
        lambda d, m: not _is_moe(m) or m.num_experts % d.expert_model_parallel_size == 0,
        "must divide num_experts = {m.num_experts}",
        "each expert rank holds the same number of experts",
    ),
    _Rule(
        _EP,
        lambda d, m: _is_moe(m) or d.expert_model_parallel_size == 1,
        "must be 1 for a dense model",
        "there are no experts to spread",
    ),
    _Rule(
        _ETP,
        lambda d, m: not _is_moe(m) or m.moe_intermediate_size % d.expert_tensor == 0,
        "must divide moe_intermediate_size = {m.moe_intermediate_size}",
        "each expert is cut into equal slices",
    ),
    _Rule(
        _ETP,
        lambda d, m: not m.clamped_experts or d.expert_tensor == 1,
        "must be 1 where experts have biases",
        "Megatron refuses it: each rank would add the bias of an expert's sum",
    ),
    _Rule(
        _ETP,
        lambda d, m: _is_moe(m) or d.expert_tensor == 1,
        "must be 1 for a dense model",
        "there are no experts to cut",
    ),
    _Rule(
        "sequence_parallel",
        lambda d, m: not d.uses_sequence_parallel or d.tensor_model_parallel_size > 1,
        "needs tensor_model_parallel_size > 1",
        "the sequence is cut over the tensor ranks",
    ),
    _Rule(
        "sequence_parallel",
        lambda d, m: d.uses_sequence_parallel or not _is_moe(m) or d.tensor_model_parallel_size == 1,
        "must be on for a mixture of experts with tensor_model_parallel_size > 1",
        "Megatron refuses to train one without it",
    ),
    _Rule(
        "sequence_parallel",
        lambda d, m: d.uses_sequence_parallel or m.linear_num_key_heads == 0 or d.tensor_model_parallel_size == 1,
        "must be on for gated delta attention with tensor_model_parallel_size > 1",
        "its norm is one for all heads, and only then does Megatron sum its gradient over tensor ranks",
    ),
    _Rule(
        _VPP,
        lambda d, m: d.virtual_pipeline == 1 or d.pipeline_model_parallel_size > 1,
        "needs pipeline_model_parallel_size > 1",
        "only a pipeline can be interleaved",
    ),
    _Rule(
        _VPP,
        _chunks_are_even,
        "must divide the layers of every stage",
        "each stage is cut into equal model chunks; pipeline_layers can say an uneven cut",
    ),
    _Rule(
        _PP,
        _stages_are_even,
        "must divide num_layers = {m.num_layers} plus those counted for embedding and loss = {d.counted_extras}",
        "stages are equal unless an uneven split is given (num_layers_in_first/last_pipeline_stage, "
        "account_for_*, pipeline_layers)",
    ),
    _Rule(
        _FIRST,
        lambda d, m: d.num_layers_in_first_pipeline_stage is None or _middle_is_even(d, m),
        _MIDDLE_RULE,
        _MIDDLE_WHY,
    ),
    _Rule(
        _LAST,
        lambda d, m: d.num_layers_in_last_pipeline_stage is None or _middle_is_even(d, m),
        _MIDDLE_RULE,
        _MIDDLE_WHY,
    ),
    _Rule(
        "pipeline_layers",
        _list_fits,
        "must have one count for each model chunk of {d.pipeline_model_parallel_size} stages x {d.virtual_pipeline}, "
        "in all num_layers = {m.num_layers}; only the first and the last may be 0",
        "every layer lies in exactly one model chunk; the first has the embedding too and the last the head, and a "
        "chunk without any weight cannot run",
    ),
    _Rule(
        "pipeline_layers",
        lambda d, m: d.pipeline_layers is None or d.notations == 1,
        "cannot be combined with another notation of an uneven split",
        "two notations could contradict each other",
    ),
    _Rule(
        "account_for_embedding_in_pipeline_split",
        lambda d, m: not (d.account_for_embedding_in_pipeline_split and d.end_stages),
        "cannot be combined with num_layers_in_first/last_pipeline_stage",
        "two notations could contradict each other",
    ),
    _Rule(
        "account_for_loss_in_pipeline_split",
        lambda d, m: not (d.account_for_loss_in_pipeline_split and d.end_stages),
        "cannot be combined with num_layers_in_first/last_pipeline_stage",
        "two notations could contradict each other",
    ),
)


def check_train_layout(degrees: Mapping[str, Any] | LayoutDegrees, model: ModelFacts) -> list[Violation]:
    """Returns all violations of a layout in the order of the table; empty if it is legal.

    `degrees` may be a mapping with the keys of LayoutDegrees. The schema ensures that they are positive.
    `Violation.field` is the key in that section. `allowed` has the nearest values that satisfy all rules of the same
    key while other keys stay as they are; it may be empty. Rules that read a key with unknown value are skipped.
    """
    d = LayoutDegrees.of(degrees)
    judged = (_judged(rule, d, model) for rule in TRAIN_RULES)
    return [violation for violation in judged if violation is not None]


def is_legal_layout(degrees: Mapping[str, Any] | LayoutDegrees, model: ModelFacts) -> bool:
    """Returns whether `check_train_layout` finds nothing, without looking for legal values."""
    d = LayoutDegrees.of(degrees)
    return all(_broken(rule, d, model) is None for rule in TRAIN_RULES)


def _broken(rule: _Rule, d: LayoutDegrees, m: ModelFacts) -> str | None:
    """Returns what a rule demands where it is broken; None where it holds or reads a key with unknown value."""
    try:
        if rule.holds(d, m):
            return None
        return rule.rule.format(d=d, m=m)
    except UnknownValue:
        return None


def _judged(rule: _Rule, d: LayoutDegrees, m: ModelFacts) -> Violation | None:
    text = _broken(rule, d, m)
    if text is None:
        return None
    return Violation(rule.field, text, rule.why, _nearest_legal(rule.field, d, m), value=getattr(d, rule.field))


def _nearest_legal(field: str, d: LayoutDegrees, m: ModelFacts, count: int = 4) -> tuple[Any, ...]:
    rules = [rule for rule in TRAIN_RULES if rule.field == field]

    def is_legal(candidate: Any) -> bool:
        changed = _changed(d, field, candidate)
        return all(rule.holds(changed, m) for rule in rules)

    try:
        legal = [candidate for candidate in _candidates(field, d, m) if is_legal(candidate)]
    except UnknownValue:
        return ()
    value = getattr(d, field)
    if not isinstance(value, int) or isinstance(value, bool):
        return tuple(legal[:count])
    return tuple(sorted(sorted(legal, key=lambda v: (abs(v - value), v))[:count]))


def _changed(d: LayoutDegrees, field: str, value: Any) -> LayoutDegrees:
    changed = copy(d)
    vars(changed)[field] = value
    return changed


def _candidates(field: str, d: LayoutDegrees, m: ModelFacts) -> Iterable[Any]:
    """Returns values of a key to try."""
    if field == "world_size":
        step = lcm(d.dense_ranks, d.expert_ranks)
        below = d.world_size // step
        return [step * k for k in range(max(1, below - 1), below + 3)]
    if field == "pipeline_layers":
        if d.notations > 1:
            return [None]
        return dict.fromkeys(_lists(d, m))
    if field == "sequence_parallel" or field.startswith("account_for_"):
        return [False, True]
    return range(1, max(m.num_attention_heads, m.num_experts, m.num_layers + 2) + 1)
