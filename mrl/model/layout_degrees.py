"""The input form of a parallel layout: degrees with Megatron's names, each with its meaning.

The section `actor.layout` of the configuration has these keys (mrl/config/schema_actor.py takes them from here).
"""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

_REQUIRED = MISSING


def _key(default: Any, meaning: str, **notes: Any) -> Any:
    """Declares a key of the section. `notes` are those of `key` in mrl/config/section.py."""
    return field(default=default, metadata={"meaning": meaning, **notes})


@dataclass(frozen=True)
class LayoutDegrees:
    """Parallel degrees of the actor under their Megatron names. Data parallelism is what remains of the world size.

    `expert_tensor_parallel_size` None means 1, unlike Megatron, where it means the tensor size. Slicing small experts
    costs more in communication than it saves, and every public recipe sets 1 by hand.
    """

    world_size: int = _key(
        _REQUIRED,
        "Ranks of the actor. Data parallelism is what remains after tensor, context and pipeline parallelism.",
        ge=1,
    )
    tensor_model_parallel_size: int = _key(
        1,
        "Over how many ranks each matrix is cut.",
        ge=1,
        advice="Raise it when weights do not fit: of a dense model first, of a mixture after "
        "expert_model_parallel_size. Keep it inside a node. 4 KV heads (Qwen3 MoE) are not cut beyond TP 4 before "
        "megatron-core 0.16.",
        verl="actor_rollout_ref.actor.megatron.tensor_model_parallel_size",
    )
    pipeline_model_parallel_size: int = _key(
        1,
        "Over how many stages the layers are spread.",
        ge=1,
        advice="Where tensor parallelism inside a node is not enough. It wants many micro-batches, else stages wait.",
        verl="actor_rollout_ref.actor.megatron.pipeline_model_parallel_size",
    )
    virtual_pipeline_model_parallel_size: int | None = _key(
        None,
        "Model chunks per stage, interleaved; leave it out for none.",
        ge=1,
        advice="Shortens the bubble of a deep pipeline at the price of more messages. Not on npu.",
        verl="actor_rollout_ref.actor.megatron.virtual_pipeline_model_parallel_size",
    )
    context_parallel_size: int = _key(
        1,
        "Over how many ranks each sequence is cut.",
        ge=1,
        advice="For sequences too long for all else.",
        verl="actor_rollout_ref.actor.megatron.context_parallel_size",
    )
    expert_model_parallel_size: int = _key(
        1,
        "Over how many ranks whole experts are spread.",
        ge=1,
        advice="The cheapest way to fit a large MoE: experts are nearly all of its bytes. "
        "Prefer it to cutting experts.",
        verl="actor_rollout_ref.actor.megatron.expert_model_parallel_size",
    )
    expert_tensor_parallel_size: int | None = _key(
        None,
        "Over how many ranks each expert is cut; left out: 1.",
        ge=1,
        advice="1 unless an expert alone is too large.",
        verl="actor_rollout_ref.actor.megatron.expert_tensor_parallel_size",
    )
    sequence_parallel: bool | None = _key(
        None,
        "Norms and dropouts share the sequence over the tensor-parallel ranks; left out: on when there are several.",
    )
    num_layers_in_first_pipeline_stage: int | None = _key(
        None,
        "Layers of the first stage, where the layers do not divide by the stages.",
        ge=1,
        verl="actor_rollout_ref.actor.megatron.override_transformer_config.num_layers_in_first_pipeline_stage",
    )
    num_layers_in_last_pipeline_stage: int | None = _key(
        None,
        "Layers of the last stage, where the layers do not divide by the stages.",
        ge=1,
        verl="actor_rollout_ref.actor.megatron.override_transformer_config.num_layers_in_last_pipeline_stage",
    )
    account_for_embedding_in_pipeline_split: bool = _key(
        False,
        "The embedding counts as a layer when layers are dealt out to stages.",
        verl="actor_rollout_ref.actor.megatron.override_transformer_config.account_for_embedding_in_pipeline_split",
    )
    account_for_loss_in_pipeline_split: bool = _key(
        False,
        "The output layer and loss count as a layer when layers are dealt out to stages.",
        verl="actor_rollout_ref.actor.megatron.override_transformer_config.account_for_loss_in_pipeline_split",
    )
    pipeline_layers: tuple[int, ...] | None = _key(
        None,
        "Layers of each stage, written out; with virtual stages of each chunk, in the order of the layers.",
        advice="The third way to write an uneven split, and the plainest.",
    )

    @classmethod
    def of(cls, degrees: "Mapping[str, Any] | LayoutDegrees") -> "LayoutDegrees":
        """Makes degrees from a mapping. Returns degrees, such as a section of the configuration, unchanged."""
        if isinstance(degrees, LayoutDegrees):
            return degrees
        listed = degrees.get("pipeline_layers")
        return cls(**{**degrees, "pipeline_layers": None if listed is None else tuple(listed)})

    @property
    def data_parallel_size(self) -> int:
        """Number of copies of the dense parameters; 0 if they do not divide the ranks, which is illegal."""
        size, rest = divmod(self.world_size, self.dense_ranks)
        if rest:
            return 0
        return size

    @property
    def virtual_pipeline(self) -> int:
        """Number of layer chunks on each pipeline stage."""
        return self.virtual_pipeline_model_parallel_size or 1

    @property
    def expert_tensor(self) -> int:
        """Tensor ranks of an expert; 1 if the key is left out, whatever the degree of attention is."""
        return self.expert_tensor_parallel_size or 1

    @property
    def uses_sequence_parallel(self) -> bool:
        """Tells whether sequence parallelism is on: the key's value, or by default whether there are several tensor
        ranks.
        """
        if self.sequence_parallel is None:
            return self.tensor_model_parallel_size > 1
        return self.sequence_parallel

    @property
    def dense_ranks(self) -> int:
        """Number of ranks for one copy of the dense parameters and one sequence."""
        return self.tensor_model_parallel_size * self.context_parallel_size * self.pipeline_model_parallel_size

    @property
    def sequence_parts(self) -> int:
        """Number of equal parts of a sequence: tensor ranks with sequence parallelism, times two for each context rank
        (zigzag).
        """
        over_tensor = 1
        if self.uses_sequence_parallel:
            over_tensor = self.tensor_model_parallel_size
        return over_tensor * (2 * self.context_parallel_size if self.context_parallel_size > 1 else 1)

    @property
    def expert_ranks(self) -> int:
        """Number of ranks for one copy of the experts."""
        return self.expert_tensor * self.expert_model_parallel_size * self.pipeline_model_parallel_size

    @property
    def end_stages(self) -> tuple[int, ...]:
        """The given layer counts of the first and the last stage."""
        ends = (self.num_layers_in_first_pipeline_stage, self.num_layers_in_last_pipeline_stage)
        return tuple(n for n in ends if n is not None)

    @property
    def counted_extras(self) -> int:
        """Returns how many of embedding and loss count as a layer in the split."""
        return int(self.account_for_embedding_in_pipeline_split) + int(self.account_for_loss_in_pipeline_split)

    @property
    def notations(self) -> int:
        """Returns how many of the three notations of an uneven split are used. At most one is allowed."""
        return (self.pipeline_layers is not None) + bool(self.end_stages) + bool(self.counted_extras)


for _degree in fields(LayoutDegrees):
    # Only __init__ has the defaults. A section that inherits from here and lacks a refused key must not read a default
    # of the class.
    if _degree.default is not MISSING:
        delattr(LayoutDegrees, _degree.name)
