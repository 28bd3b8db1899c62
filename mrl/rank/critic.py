"""A critic on one rank: values of tokens, and the updates that train it.

It is built, cut and saved as the actor is, in a layout of its own if it has one. It is on the device while it computes.
After that, everything that `critic.*_offload` names leaves the device.
"""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from megatron.core import parallel_state as mpu
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor

from mrl.algo.aggregate import MetricParts, merge, to_floats
from mrl.algo.plain import Denominators, FloatParts, ValueLossParameters
from mrl.algo.value_loss import ValueInputs, value_loss
from mrl.config.schema import RunConfig
from mrl.config.schema_actor import GRADIENTS, OPTIMIZER, PARAMETERS
from mrl.data.batch import TrainBatch
from mrl.errors import NumericAbort
from mrl.model import ModelSpec
from mrl.model.critic_weights import critic_shards
from mrl.model.hf_files import check_same_architecture
from mrl.model.layout import TrainLayout
from mrl.model.megatron_shards import Shard
from mrl.platforms import Platform
from mrl.rank import parallel
from mrl.rank.bridge import DTYPES, Bridge, MBridge
from mrl.rank.cut import MicroRows, Splitter
from mrl.rank.forward import Around, evaluating, laid_out, nothing_around, run_pass, whole_sequences
from mrl.rank.offload import Residence, needs, switched
from mrl.rank.optimizer import (
    StepResult,
    build_optimizer,
    build_scheduler,
    current_lr,
    step,
    zero_gradients,
)
from mrl.rank.overlap import gather_weights, set_gradient_reduction
from mrl.rank.packing import MicroBatch, MicroBatches
from mrl.rank.row_results import check_batch

if TYPE_CHECKING:
    from mrl.rank.vision import Pixels, Vision


@dataclass(frozen=True)
class CriticOutputs:
    """Values and their mask, both [rows, response_length], with whole sequences on every rank."""

    values: Tensor  # float32; zero where nothing was computed
    computed: Tensor  # bool; as MicroBatch.has_log_probs


class MegatronCritic:
    """One rank of the critic; every method is collective. Checkpoints use it as they use MegatronActor.

    Its methods put the critic's process groups in Megatron's place themselves, so they are called outside `in_place`.
    Whoever reads or writes its weights or states does so within.
    """

    lora = None  # the critic is always trained completely
    trained_beside = None
    vision: "Vision | None" = None  # after `see`

    def __init__(
        self, config: RunConfig, rank: int, platform: Platform, model: ModelSpec, of_actor: TrainLayout
    ) -> None:
        """Builds this rank's part beside the actor's and loads its initial weights.

        It uses the actor's process groups if its layout is `of_actor`, else its own. `config` is `RunConfig.of_critic`,
        which has the critic as its actor. Raises EnvironmentFault for unusable initial weights. Raises ConfigError for
        an illegal layout or another architecture than the actor's.
        """
        self.config = config
        self.rank = rank
        self.platform = platform
        self.model = model
        self.layout = TrainLayout.build(config.actor.layout, model)
        self.in_place = nullcontext
        self._has_own_groups = self.layout != of_actor
        if self._has_own_groups:
            self.in_place = parallel.OtherGroups().in_place
        self.parameters = ValueLossParameters(config.critic.cliprange_value, config.critic.loss_agg_mode)
        if config.critic.path is not None:
            check_same_architecture("critic.path", config.model.path, model)
        with self.in_place():
            if self._has_own_groups:
                parallel.init_model_parallel(self.layout, config.trainer.seed, config.cluster.step_timeout_s)
            self._build()
            self.on_last_stage = parallel.on_last_stage()
            self.holds_result = parallel.holds_result()
        self.residence = Residence(platform, self.chunks, self.optimizer, switched(config.actor), "critic")
        self.num_updates = 0  # optimizer steps that were applied
        self.skipped_in_a_row = 0  # consecutive newest updates that could not be applied

    def _build(self) -> None:
        config = self.config
        trainer = config.trainer
        self.bridge: Bridge = MBridge(
            config.model,
            config.actor,
            self.model,
            self.layout,
            trainer.deterministic,
            trainer.seed,
            has_value_head=True,
        )
        self.chunks = self.bridge.build_model()
        set_gradient_reduction(self.chunks)
        self.bridge.load_hf(config.model.path)
        gather_weights(self.chunks)
        self.optimizer = build_optimizer(config.actor.optim, self.chunks, DTYPES[config.model.dtype])
        self.scheduler = build_scheduler(config.actor.optim, self.optimizer, config.total_updates, "critic")

    def see(self, pixels: "Pixels") -> None:
        """Loads the vision tower of its checkpoint, so that rows may have images. `pixels`: as in Vision.

        Raises EnvironmentFault for files with other weights.
        """
        from mrl.rank.vision import Vision

        model = self.config.model
        with self.in_place():
            self.vision = Vision(self.chunks, model.path, DTYPES[model.dtype], self.platform.device, pixels)

    def prepared(self, batch: TrainBatch) -> TrainBatch:
        """Sets the positions of tokens where rows have images, before any pass of a step."""
        return batch if self.vision is None else self.vision.prepared(batch)

    def _around(self, batch: TrainBatch, training: bool = False, micros: Sequence[MicroRows] | None = None) -> Around:
        """Returns the context of each forward, in which a chunk sees images."""
        if self.vision is None:
            return nothing_around
        return self.vision.around(batch, nothing_around, training, micros)

    @property
    def optimizers(self) -> tuple[MegatronOptimizer, ...]:
        """Its optimizer, as those of an actor."""
        return (self.optimizer,)

    @property
    def schedulers(self) -> tuple[OptimizerParamScheduler, ...]:
        """Its schedule, as those of an actor."""
        return (self.scheduler,)

    @property
    def trained(self) -> ModelSpec:
        """The model, as that of an actor."""
        return self.model

    @property
    def shards(self) -> tuple[Shard, ...]:
        """The descriptions of this rank's parameters."""
        return critic_shards(self.model, self.layout, self.rank)

    def offload(self) -> None:
        """Moves everything that `critic.*_offload` names off the device. Methods that need it bring it back."""
        if self.residence.switched or self._has_own_groups:  # nobody else would use or release their scratch
            with self.in_place():
                parallel.release_scratch()  # first, so that the memory is given back with what leaves
        self.residence.offload()

    def columns(
        self, batch: TrainBatch, micros: Sequence[MicroRows]
    ) -> tuple[np.ndarray, dict[str, np.ndarray]] | None:
        """Returns rows of the batch, and values of their sampled tokens, including rejected ones, as `critic_values`.

        `micros` are those of this rank's replica of the critic, and `batch` has their rows. Every rank of the last
        pipeline stage returns values, the others None.
        """
        with self.in_place():
            outputs = self._values(_for_critic(replace(batch, keep=None)), micros)
        self.offload()
        if not self.on_last_stage:
            return None
        rows, values = _of_rows(micros, outputs)
        return rows, {"critic_values": values}

    @needs(PARAMETERS)
    def _values(self, batch: TrainBatch, micros: Sequence[MicroRows]) -> list[CriticOutputs]:
        check_batch(batch, self.model, 0)
        return value_pass(self.chunks, self._inputs(batch, micros), self._around(batch))

    def update_replica(
        self, batch: TrainBatch, mini_batches: Sequence[Sequence[MicroRows]], counts: Sequence[Denominators]
    ) -> list[FloatParts]:
        """Runs one optimizer step per mini-batch, on `critic_values` and `returns` of the batch.

        Metrics have one entry per mini-batch on the ranks that hold results, and one entry about offloading. Raises
        NumericAbort, on all ranks, at the trainer.max_skipped_updates-th update in a row that changed nothing.
        """
        with self.in_place():
            parts = self._updates(_for_critic(batch), mini_batches, counts)
        self.offload()
        left = self.residence.left_bytes
        return [*parts, {f"offload/critic_{kind}_bytes": (float(size), 1.0) for kind, size in left.items() if size}]

    @needs(PARAMETERS, GRADIENTS, OPTIMIZER)
    def _updates(
        self, batch: TrainBatch, mini_batches: Sequence[Sequence[MicroRows]], counts: Sequence[Denominators]
    ) -> list[FloatParts]:
        parts = [self._update(batch, micros, count) for micros, count in zip(mini_batches, counts, strict=True)]
        gather_weights(self.chunks)
        if self.holds_result:
            return parts
        return []

    def _update(self, batch: TrainBatch, micros: Sequence[MicroRows], count: Denominators) -> FloatParts:
        zero_gradients(self.chunks, self.optimizer)
        losses: list[MetricParts] = []
        result = StepResult(False, math.nan, current_lr(self.optimizer))
        if count.tokens:  # counted over all replicas, so all of them skip together
            around = self._around(batch, training=True, micros=micros)
            losses = value_loss_pass(self.chunks, self._inputs(batch, micros), self.parameters, count, around)
            result = step(self.optimizer, self.scheduler)
        self.num_updates += result.applied
        self._count_skipped(result)
        parts = merge(map(to_floats, losses))
        if mpu.get_data_parallel_rank() == 0:
            parts |= _step_metrics(result)
        return parts

    def _count_skipped(self, result: StepResult) -> None:
        self.skipped_in_a_row = 0 if result.applied else self.skipped_in_a_row + 1
        limit = self.config.trainer.max_skipped_updates
        if self.skipped_in_a_row >= limit:
            raise NumericAbort(
                f"{limit} updates of the critic in a row could not be applied (trainer.max_skipped_updates), the last "
                f"gradient's norm is {result.grad_norm}; look at critic/vf_loss of the last steps and resume with a "
                "smaller critic.optim.lr"
            )

    def _inputs(self, batch: TrainBatch, micros: Sequence[MicroRows]) -> MicroBatches:
        shape = Splitter.for_update(self.config.actor, self.layout, self.model).shape
        return laid_out(batch, micros, shape, self.layout, self.platform.device)


def _for_critic(batch: TrainBatch) -> TrainBatch:
    """Returns the batch without the columns that only the actor uses. The critic's routers choose by themselves."""
    others = ("routes", "route_rows", "advantages", "ref_log_probs", "loss_weights", "selected")
    of_teacher = ("teacher_log_probs", "teacher_top_ids", "teacher_top_log_probs")
    return replace(batch, **dict.fromkeys([*others, *of_teacher]))


def value_pass(
    chunks: list[torch.nn.Module], micro_batches: MicroBatches, around: Around = nothing_around
) -> list[CriticOutputs]:
    """Runs the forward only. Returns the values of each micro-batch on the last stage, an empty list elsewhere."""

    def keep(inputs: MicroBatch, values: Tensor) -> tuple[Tensor, CriticOutputs]:
        return values.new_zeros(()), CriticOutputs(values, inputs.has_log_probs)

    with torch.no_grad(), evaluating(chunks):
        return run_pass(chunks, micro_batches, _token_values, keep, around, forward_only=True)


def value_loss_pass(
    chunks: list[torch.nn.Module],
    micro_batches: MicroBatches,
    parameters: ValueLossParameters,
    denominators: Denominators,
    around: Around = nothing_around,
) -> list[MetricParts]:
    """Runs forward and backward of a mini-batch on this rank. Sums gradients as the actor's `loss_pass` does."""
    undo_means = len(micro_batches) * mpu.get_data_parallel_world_size()

    def loss(inputs: MicroBatch, values: Tensor) -> tuple[Tensor, MetricParts]:
        given = ValueInputs(values, inputs.critic_values, inputs.returns, inputs.response_mask)
        result = value_loss(parameters, given, denominators)
        return result.loss * undo_means, result.metrics

    return run_pass(chunks, micro_batches, _token_values, loss, around, forward_only=False)


def _token_values(given: Tensor, _: torch.nn.Module, inputs: MicroBatch) -> Tensor:
    """Returns [rows, response_length]: the head's output [batch, length, 1] at the position that predicts each response
    token.
    """
    return whole_sequences(given.flatten()[inputs.predictors], inputs)


def _of_rows(micros: Sequence[MicroRows], outputs: Sequence[CriticOutputs]) -> tuple[np.ndarray, np.ndarray]:
    """Joins the outputs of micro-batches without fillers: rows, int64, and values, float32, of their sampled tokens."""
    kept = [(micro.rows, each) for micro, each in zip(micros, outputs, strict=True) if not micro.is_filler]
    rows = [np.zeros(0, np.int64), *(rows for rows, _ in kept)]
    values = [np.zeros(0, np.float32), *(each.values[each.computed].cpu().numpy() for _, each in kept)]
    return np.concatenate(rows), np.concatenate(values)


def _step_metrics(result: StepResult) -> FloatParts:
    norm = {}
    if result.applied:
        norm = {"critic/grad_norm": (result.grad_norm, 1.0)}
    return norm | {"critic/lr": (result.lr, 1.0), "critic/skipped_updates": (float(not result.applied), 1.0)}
