"""Predicted seconds of one update in a layout: computation, collectives and the pipeline's bubble. For ranking layouts, not for promises.

Volumes a layer and rank, of s tokens and hidden size h: tensor parallelism with sequence parallelism gathers and scatters s h twice
(Korthikanti et al., arXiv 2205.05198, section 4.2.2); experts send each token to its top-k experts and back; context parallelism passes
keys and values around; a stage hands s h on. A backward pass moves twice what the forward does, in the same places. Nothing overlaps.
"""

from dataclasses import dataclass

from mrl.model import ModelSpec
from mrl.model.layout import TrainLayout
from mrl.plan.activations import MicroBatch
from mrl.plan.assumptions import Assumptions
from mrl.plan.devices import Device
from mrl.plan.model_state import StateBytes

_F32, _BF16 = 4, 2


@dataclass(frozen=True)
class StepSeconds:
    """Of one update on the slowest stage."""

    compute: float
    tensor: float
    expert: float
    context: float
    pipeline: float  # handing over between stages
    data: float  # gradients and parameters over data parallelism
    bubble: float

    @property
    def total(self) -> float:
        return self.compute + self.tensor + self.expert + self.context + self.pipeline + self.data + self.bubble


@dataclass(frozen=True)
class UpdateWork:
    """What one update computes, whatever the layout."""

    model: ModelSpec
    micro: MicroBatch  # of one data-parallel replica
    tokens: float  # of the whole update
    flops_per_token: float  # of a forward pass


def update_seconds(
    work: UpdateWork, layout: TrainLayout, device: Device, per_node: int, state: StateBytes, recomputed: bool, assumed: Assumptions
) -> StepSeconds:
    """Sums over the micro-batches of one rank; the stage with the most layers sets the pace."""
    count = micro_batch_count(work, layout)
    passes = 4 if recomputed else 3
    forward = work.micro.tokens * work.flops_per_token / (layout.tensor * layout.context)
    layers = max(map(sum, layout.chunk_layers))
    share = layers / work.model.num_layers
    compute = count * passes * forward * share / (device.flops * assumed.train_mfu)
    links = _Links(layout, device, per_node, assumed.link_share)
    moved = _volumes(work, layout, layers)
    tensor, expert, context, pipeline = (
        count * passes * moved[name] / links.rate(size)
        for name, size in (
            ("tensor", layout.tensor),
            ("expert", layout.expert_tensor * layout.expert),
            ("context", layout.tensor * layout.context),
            ("pipeline", layout.world_size),
        )
    )
    data = _data_seconds(layout, state, links)
    steady = compute + tensor + expert + context + pipeline
    bubble = steady * (layout.pipeline - 1) / (layout.virtual_pipeline * count)
    return StepSeconds(compute, tensor, expert, context, pipeline, data, bubble)


def micro_batch_count(work: UpdateWork, layout: TrainLayout) -> int:
    """Micro-batches of one rank; a multiple of the stages with virtual ones."""
    count = max(1, -(-int(work.tokens) // (work.micro.tokens * layout.data)))
    return -(-count // layout.pipeline) * layout.pipeline if layout.virtual_pipeline > 1 else count


@dataclass(frozen=True)
class _Links:
    layout: TrainLayout
    device: Device
    per_node: int
    share: float

    def rate(self, group: int) -> float:
        """Bytes per second inside a group of consecutive ranks: the node's link while the group stays in one."""
        return self.share * (self.device.node_rate if group <= self.per_node else self.device.network_rate)


def _volumes(work: UpdateWork, layout: TrainLayout, layers: int) -> dict[str, float]:
    """Bytes that a rank sends in the forward pass of one micro-batch through its stage."""
    m = work.model
    s = work.micro.tokens / layout.context
    hidden = s * m.hidden_size * _BF16
    sharded = hidden / layout.tensor
    dense = len(m.moe_layers) < m.num_layers
    return {
        "tensor": layers * (4 if dense else 2) * hidden * (layout.tensor - 1) / layout.tensor,
        "expert": layers * m.is_moe * 2 * sharded * m.num_experts_per_tok * _others(layout.expert * layout.expert_tensor),
        "context": layers * 2 * s * _kv_width(m, layout.tensor) * _BF16 * (layout.context - 1),
        "pipeline": sharded * layout.virtual_pipeline * (layout.pipeline > 1),
    }


def _others(size: int) -> float:
    """The share of what is spread evenly over `size` ranks that leaves a rank."""
    return (size - 1) / size


def _kv_width(m: ModelSpec, tensor: int) -> int:
    return max(1, m.num_key_value_heads // tensor) * m.head_dim


def _data_seconds(layout: TrainLayout, state: StateBytes, links: _Links) -> float:
    """Reduce-scatter of the gradients and all-gather of the parameters, once an update."""
    ranks = layout.data * layout.context
    if ranks == 1:
        return 0.0
    return (state.gradients + state.parameters) * _others(ranks) / links.rate(layout.tensor * ranks)
