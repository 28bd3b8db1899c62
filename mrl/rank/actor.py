"""The trained model on one rank: log-probabilities, updates, and export of its weights under Hugging Face names."""

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import torch
from megatron.core import parallel_state as mpu
from megatron.core.optimizer.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from mrl.algo.aggregate import merge, to_floats
from mrl.algo.plain import Denominators, FloatParts
from mrl.algo.rows import row_sums
from mrl.algo.selection import select
from mrl.config.schema import RunConfig
from mrl.config.schema_actor import GRADIENTS, OPTIMIZER, PARAMETERS
from mrl.data.batch import TrainBatch
from mrl.data.samples import ImageStore
from mrl.errors import ConfigError, DataError, NumericAbort
from mrl.model import load_model_spec
from mrl.model.adapters import adapter_shards, all_shards
from mrl.model.hf_files import check_same_architecture
from mrl.model.layout import TrainLayout
from mrl.model.megatron_shards import Shard, source_shards
from mrl.model.peft_files import read_peft
from mrl.model.weight_map import PREDICTING
from mrl.platforms import get_platform
from mrl.platforms.layers import check_dispatcher, check_gated_delta, check_layers, layers
from mrl.platforms.process_memory import ProcessMemory, process_memory
from mrl.platforms.speed import product_rate
from mrl.rank import parallel
from mrl.rank.bridge import DTYPES, Bridge, MBridge
from mrl.rank.critic import MegatronCritic
from mrl.rank.cut import MicroRows, ReplicaCut, RowLengths, Splitter, StepCut, step_cut
from mrl.rank.exchange import gather_bytes
from mrl.rank.forward import (
    Around,
    Beside,
    laid_out,
    log_prob_pass,
    loss_pass,
    nothing_around,
    of_rows,
    return_hidden_states,
)
from mrl.rank.kernels import kernels_text
from mrl.rank.lora_layers import Adapters, drawing_noise
from mrl.rank.loss_parameters import loss_parameters
from mrl.rank.offload import FrozenWeights, Residence, needs, switched
from mrl.rank.optimizer import (
    StepResult,
    build_optimizer,
    build_scheduler,
    current_lr,
    freeze,
    step,
    zero_gradients,
)
from mrl.rank.overlap import gather_weights, set_gradient_reduction
from mrl.rank.packing import MicroBatches
from mrl.rank.predicting import (
    PredictingLayer,
    embedding_on_last_stage,
    join_making_trained,
    load_from_files,
)
from mrl.rank.replica_norms import norm_metrics, replica_norms
from mrl.rank.routing import Routing
from mrl.rank.row_results import RowResult, UpdateResult, check_batch
from mrl.rank.teacher import Teacher

if TYPE_CHECKING:
    from mrl.rank.vision import Pixels, Vision


class MegatronActor:
    """One rank of the actor.

    Every method is collective: all ranks call it with the same arguments, in the same order.
    """

    def __init__(self, config: RunConfig, rank: int, world_size: int, master_addr: str, master_port: int) -> None:
        """Joins the other ranks, builds this rank's part of the model and loads it from `config.model.path`.

        Raises ConfigError for an illegal layout or override. Raises EnvironmentFault for absent ranks or a bad
        checkpoint.
        """
        self.config = config
        self.rank = rank
        # first, because a user's file is the likeliest to be wrong
        self.loss_parameters = loss_parameters(config.algorithm, config.distillation)
        self.platform = get_platform(config.cluster.device)
        self.platform.set_device(rank % config.cluster.n_gpus_per_node)
        self.platform.apply_patches()
        parallel.count_collectives(rank)
        check_layers(config.cluster.device, layers(), config.model.allow_torch_layers)
        check_dispatcher(config.model.override_transformer_config)
        check_gated_delta(config.model.gated_delta)
        if config.trainer.deterministic:
            self.platform.deterministic()
        self.model = load_model_spec(config.model.path, config.model.vision)
        self.held = self.model.holding(config.rollout.drafts_with_model)  # with its predicting layer, if it drafts
        self.trained = self.model.holding(config.actor.mtp.train)  # and if it is trained, which checkpoints have
        self.layout = TrainLayout.build(config.actor.layout, self.model)
        timeout_s = config.cluster.step_timeout_s
        parallel.init_distributed(self.platform, rank, world_size, master_addr, master_port, timeout_s)
        self.teacher = Teacher(config, self.platform) if config.distillation.enabled else None  # before random numbers
        parallel.init_model_parallel(self.layout, config.trainer.seed, timeout_s)
        self.bridge: Bridge = self._build_bridge()
        self.chunks = self.bridge.build_model()
        self.lora = config.actor.lora.adapters
        self.adapters = self._adapters()
        set_gradient_reduction(self.chunks)
        self._replica_norms = replica_norms(self.chunks, self.platform.device)
        return_hidden_states(self.chunks)
        self.reference = self._load_reference() if config.algorithm.needs_reference else None
        self.bridge.load_hf(config.model.path)
        self._read_adapters(config.actor.lora.path)
        gather_weights(self.chunks)
        fused = config.model.override_transformer_config.get("moe_router_fusion")  # chooses where nobody can look
        replay = config.actor.router_replay
        self.routing = Routing(self.chunks, self.model, replay) if self.model.is_moe and not fused else None
        if config.actor.freeze_router:
            freeze(p for chunk in self.chunks for key, p in chunk.named_parameters() if key.endswith(".router.weight"))
        self.optimizer = build_optimizer(config.actor.optim, self.chunks, DTYPES[config.model.dtype])
        self.scheduler = build_scheduler(config.actor.optim, self.optimizer, config.total_updates)
        self.predicting = self._build_predicting()
        held = [*self.chunks, *([] if self.predicting is None else [self.predicting.chunk])]
        parts = [part for each in self.optimizers for part in each.chained_optimizers]
        self.residence = Residence(self.platform, held, ChainedOptimizer(parts), switched(config.actor))
        self.vision: Vision | None = None  # after `see`
        self.num_updates = 0  # optimizer steps that were applied
        self.skipped_in_a_row = 0  # consecutive newest updates that could not be applied
        self.critic = self._build_critic()

    @property
    def shards(self) -> tuple[Shard, ...]:
        """The descriptions of this rank's parameters, without a predicting layer that stays as it came."""
        return all_shards(self.trained, self.layout, self.rank, self.lora)

    @property
    def predicting_chunk(self) -> torch.nn.Module | None:
        """The predicting layer, where this rank holds one."""
        return None if self.predicting is None else self.predicting.chunk

    @property
    def trained_beside(self) -> torch.nn.Module | None:
        """The predicting layer, where this rank trains one."""
        return self.predicting_chunk if self.config.actor.mtp.train else None

    @property
    def optimizers(self) -> tuple[MegatronOptimizer, ...]:
        """The optimizers of this rank: of the policy, and of a predicting layer that is trained here."""
        own = None if self.predicting is None else self.predicting.optimizer
        return (self.optimizer,) if own is None else (self.optimizer, own)

    @property
    def schedulers(self) -> tuple[OptimizerParamScheduler, ...]:
        """The schedules of `optimizers`."""
        return (self.scheduler,) if len(self.optimizers) == 1 else (self.scheduler, self.predicting.scheduler)

    @property
    def on_last_stage(self) -> bool:
        """Tells whether this rank computes log-probs and losses."""
        return parallel.on_last_stage()

    @property
    def holds_result(self) -> bool:
        """Tells whether this rank returns the results of its data-parallel replica."""
        return parallel.holds_result()

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Returns what every rank gave, in rank order."""
        return gather_bytes(data, self.platform.device)

    def _build_bridge(self) -> Bridge:
        trainer = self.config.trainer
        return MBridge(
            self.config.model, self.config.actor, self.model, self.layout, trainer.deterministic, trainer.seed
        )

    def _adapters(self) -> Adapters | None:
        if self.lora is None:
            return None
        described = adapter_shards(self.model, self.layout, self.rank, self.lora)
        return Adapters(self.chunks, self.lora, described)

    def _read_adapters(self, path: str | None) -> None:
        """Replaces the initial adapters with those in PEFT's form in `path`, if it is given."""
        if self.adapters is not None and path is not None:
            read_peft(path, self.model, self.lora)
            self.adapters.read(path, self.model)

    def _build_predicting(self) -> PredictingLayer | None:
        """Builds the predicting layer and loads it, on ranks of the last stage of a run whose engines draft with it.

        Collective.
        """
        config = self.config
        if not self.held.predicting_layers:
            return None
        if not self.on_last_stage:
            if config.actor.mtp.train:
                join_making_trained(self.chunks, config.actor.optim, DTYPES[config.model.dtype])
            return None
        layer = self.bridge.build_predicting_layer()
        predicting = PredictingLayer(layer, self.model, self.chunks, self.platform, config.actor.mtp.train)
        shards = all_shards(self.held, self.layout, self.rank, None)
        own = {shard.megatron_name: shard for shard in shards if shard.megatron_name.startswith(PREDICTING)}
        load_from_files(predicting.chunk, own, config.model.path)
        if config.actor.mtp.train:
            predicting.make_trained(config.actor.optim, DTYPES[config.model.dtype], config.total_updates)
        return predicting

    def _build_critic(self) -> MegatronCritic | None:
        """Builds the critic after the offloaded states have left the device, which may lack memory for both."""
        own = self.config.of_critic
        if own is None:
            return None
        self.offload()
        critic = MegatronCritic(own, self.rank, self.platform, self.model, self.layout)
        critic.offload()
        return critic

    def _load_reference(self) -> FrozenWeights | Adapters:
        """Loads the reference through the model, before the actor's own weights take its place.

        With adapters, the reference is the base model, which is already there.
        """
        path = self.config.ref.path or self.config.model.path
        if self.adapters is not None and path == self.config.model.path:
            return self.adapters
        check_same_architecture("ref.path", path, self.model)
        self.bridge.load_hf(path)
        memory = partial(torch.empty, dtype=torch.uint8, device=self.platform.device)
        if self.config.ref.param_offload:
            memory = self.platform.host_memory
        return FrozenWeights(self.chunks, memory, self.platform.synchronize)

    def see(self, pixels: "Pixels") -> None:
        """Loads the checkpoint's vision tower, so that rows may have images. `pixels`: as in Vision.

        Raises ConfigError for a model without a tower, EnvironmentFault for files with other weights.
        """
        from mrl.rank.vision import Vision

        path = self.config.model.path
        if not self.model.is_wrapped:
            raise ConfigError(f"model.path {path}: the model has no vision tower, and rows have images")
        self.vision = Vision(self.chunks, path, DTYPES[self.config.model.dtype], self.platform.device, pixels)
        for second in (self.critic, self.teacher):
            if second is not None:
                second.see(pixels)

    def see_images(self, store: ImageStore | None) -> None:
        """Loads the vision tower if the run has images, which are read from `store`. Raises the errors of `see`."""
        if store is None:
            return
        from mrl.data.image_reader import ImageReader

        reader = ImageReader.of(self.config.model.path, store)
        self.see(lambda name: torch.from_numpy(reader.pixels(name)))

    def prepared(self, batch: TrainBatch) -> TrainBatch:
        """Sets what a rank computes of rows before any pass: the positions of their tokens, where they have images.

        Features of the rows before are forgotten.
        """
        if self.vision is None:
            return batch
        return self.vision.prepared(batch)

    def kernels(self) -> str:
        """Names the kernels that this rank computes with."""
        return kernels_text(self.chunks, self.optimizer)

    def speed(self, threads: int) -> tuple[str, float]:
        """Returns the device's name, and the FLOP/s of a large matrix product there in the model's dtype.

        `threads`: number of CPU threads that compute it.
        """
        rate = product_rate(self.platform, DTYPES[self.config.model.dtype], threads)
        self.platform.release_cache()
        return self.platform.device_name(), rate

    def offload(self) -> None:
        """Moves everything that `actor.*_offload` names off the device. Methods that need it bring it back."""
        self._release_scratch()
        self.residence.offload()

    def bring(self, *kinds: str) -> None:
        """Brings these kinds of offloaded state onto the device, and moves the others off it.

        Methods that compute would bring them as well. A separate call tells its time and lack of memory apart from
        theirs.
        """
        self._release_scratch()
        self.residence.settle()  # waits for what was prefetched for an update, which a critic's warm-up leaves out
        with self.residence.using(*kinds):
            pass

    def _release_scratch(self) -> None:
        """Releases scratch memory before the offload, so that the memory is given back at the same time."""
        if self.residence.switched:
            parallel.release_scratch()

    def prefetch(self, *kinds: str) -> None:
        """Begins to bring these kinds onto the device while log-probs are computed, as Residence.prefetch."""
        self.residence.prefetch(*kinds)

    def memory(self, on_host: Iterable[torch.Tensor] = ()) -> ProcessMemory:
        """Returns the memory that this rank's process holds.

        `on_host`: further tensors that stay on the host, beside the buffers of offloaded state.
        """
        frozen = ()
        if self.reference and self.config.ref.param_offload:
            frozen = self.reference.pieces
        of_teacher = self.teacher.on_host if self.teacher else ()
        of_critic = self.critic.residence.on_host if self.critic is not None else ()
        on_host = chain(on_host, self.residence.on_host, frozen, of_teacher, of_critic)
        return process_memory(self.platform.name, on_host)

    def log_probs(self, batch: TrainBatch) -> RowResult | None:
        """Computes `policy_log_probs` for a whole step. Every rank gets the same batch, and one rank per replica a
        result.
        """
        batch = self.prepared(self._of_own_layers(batch))
        return _handed_out(self.policy_log_probs(batch, self._whole(batch).log_probs))

    def ref_log_probs(self, batch: TrainBatch) -> RowResult | None:
        """Computes `reference_log_probs` for a whole step, as `log_probs` does."""
        batch = self.prepared(self._of_own_layers(batch))
        return _handed_out(self.reference_log_probs(batch, self._whole(batch).reference))

    def update(self, batch: TrainBatch) -> UpdateResult:
        """Runs `update_replica` for a whole step. Every rank gets the same batch, and selects and counts the loss's
        tokens.
        """
        batch = self.prepared(self._of_own_layers(batch))
        check_batch(batch, self.model, self._moe_layers)
        cut = self._cut(batch)
        if batch.advantages is not None and batch.old_log_probs is not None:
            batch = self._with_selection(batch, cut.rows)
        counts = [_count(batch.rows(rows)) for rows in cut.rows]
        result = self.update_replica(batch, cut.of(mpu.get_data_parallel_rank()).mini_batches, counts)
        loads = []
        if self.holds_result and mpu.get_data_parallel_rank() == 0:
            loads = list(cut.loads)
        return replace(result, loads=loads, old=_handed_out(result.old))

    @needs(PARAMETERS)
    def policy_log_probs(self, batch: TrainBatch, micros: Sequence[MicroRows]) -> RowResult | None:
        """Returns log-probabilities of the sampled tokens under the current weights: the old policy of a step.

        They are at the batch's temperatures. `batch` holds at least the rows of this replica's `micros`. Every rank of
        the last pipeline stage returns them, the others None.
        """
        check_batch(batch, self.model, self._moe_layers)
        if self.routing is None:
            return self._log_probs(batch, micros, nothing_around)
        self.routing.begin_step()
        return self._log_probs(batch, micros, self.routing.recording)

    @needs(PARAMETERS)
    def reference_log_probs(self, batch: TrainBatch, micros: Sequence[MicroRows]) -> RowResult | None:
        """Returns log-probs as `policy_log_probs`, under the reference model's weights."""
        if self.reference is None:
            raise RuntimeError(
                "no reference model was loaded: algorithm.use_kl_loss and use_kl_in_reward are both false"
            )
        check_batch(batch, self.model, self._moe_layers)
        with self.reference.in_place(), self.vision.other_weights() if self.vision else nullcontext():
            return self._log_probs(batch, micros, self.routing.supplying if self.routing else nothing_around)

    def _log_probs(self, batch: TrainBatch, micros: Sequence[MicroRows], around: Around) -> RowResult | None:
        batch = replace(batch, keep=None)  # tokens rejected from the loss have log-probs all the same
        inputs = self._inputs(batch, micros)
        if self.vision is not None:
            around = self.vision.around(batch, around)
        outputs = log_prob_pass(self.chunks, inputs, self.model.vocab_size, around)
        if self.on_last_stage:
            return of_rows(micros, outputs)
        return None

    @needs(PARAMETERS, GRADIENTS, OPTIMIZER)
    def update_replica(
        self, batch: TrainBatch, mini_batches: Sequence[Sequence[MicroRows]], counts: Sequence[Denominators]
    ) -> UpdateResult:
        """Runs one optimizer step per mini-batch, one epoch after the other.

        `batch` holds at least the rows of this replica's micro-batches. On the last pipeline stage it has
        `old_log_probs` and `advantages`. `counts` cover whole mini-batches over all replicas.

        Metrics have one entry per mini-batch on the ranks that hold results. The last entry also has the metrics of the
        stage's routers and of offloading. A rank that reports these but holds no results returns this entry alone.

        A mini-batch whose gradient norm is not finite, or whose tokens are all rejected, changes nothing and counts in
        `actor/skipped_updates`. Raises NumericAbort, on all ranks, at the trainer.max_skipped_updates-th such
        mini-batch in a row.

        With algorithm.anchor on_policy there is one mini-batch without old log-probs, and the update returns its own.
        If one of these or of generation's log-probs is not finite, nothing is changed or counted. The caller must then
        end the run.
        """
        begun = time.perf_counter()
        check_batch(batch, self.model, self._moe_layers)
        self._check_columns(batch)
        if self.routing and self.config.algorithm.on_policy:
            self.routing.begin_step()  # no earlier pass did it
        results = []
        for number, (micros, count) in enumerate(zip(mini_batches, counts, strict=True), 1):
            with self.platform.span(f"mini-batch {number}"):
                results.append(self._update_once(batch, micros, count))
        gather_weights(self.chunks)
        parts = [part for part, _ in results if part is not None]
        left = self.residence.left_bytes  # by kind: what the last offload moved from the device to the host
        offloaded = {f"offload/{kind}_bytes": (float(nbytes), 1.0) for kind, nbytes in left.items() if nbytes}
        if seen := (self.routing.metrics() if self.routing else {}) | offloaded:
            parts[-1:] = [(parts[-1] if parts else {}) | seen]
        return UpdateResult(parts, [], results[-1][1], self._spent(begun))

    def _spent(self, begun: float) -> FloatParts:
        """Returns time of this rank's update since `begun`, by time.perf_counter, and memory peaks since the previous
        update.
        """
        self.platform.synchronize()
        spent = {
            "perf/update_s": time.perf_counter() - begun,
            "perf/max_memory_allocated_gb": self.platform.max_memory_allocated_gb(),
            "perf/max_memory_reserved_gb": self.platform.max_memory_reserved_gb(),
        }
        self.platform.reset_peak_memory()
        return {name: (value, 1.0) for name, value in spent.items()}

    def _check_columns(self, batch: TrainBatch) -> None:
        given = batch.old_log_probs is not None
        wanted = not self.config.algorithm.on_policy
        if self.on_last_stage and (given != wanted or batch.advantages is None):
            raise DataError(
                f"an update needs advantages in the batch, and old_log_probs {'too' if wanted else 'must not be there'}"
            )

    def gradients(self, batch: TrainBatch) -> list[FloatParts]:
        """Leaves the gradient of the loss over a whole batch, taken as one mini-batch, in the chunks' buffers.

        Every rank gets the same batch. Ranks that hold results return the loss metrics of their replica's
        micro-batches. Other ranks return an empty list.
        """
        batch = self.prepared(self._of_own_layers(batch))
        shares = self._update_splitter.shares(RowLengths.of(batch))
        whole = self._with_selection(batch, [np.arange(len(batch))]) if batch.old_log_probs is not None else batch
        return self._gradients(whole, shares[mpu.get_data_parallel_rank()], _count(batch))[0]

    @needs(PARAMETERS, GRADIENTS)
    def _gradients(
        self, batch: TrainBatch, micros: Sequence[MicroRows], count: Denominators
    ) -> tuple[list[FloatParts], RowResult | None]:
        drafts = self.config.actor.mtp.train
        inputs = self._inputs(batch, micros, drafts)
        zero_gradients(self.chunks, self.optimizer)
        if self._replica_norms is not None:
            self._replica_norms.begin()
        around = self.routing.comparing if self.routing else nothing_around
        if self.vision is not None:
            around = self.vision.around(batch, around, training=True, micros=micros)
        config = self.config
        with drawing_noise(config.actor.lora.dropout, config.trainer.seed, self.num_updates, self.platform.device):
            beside = self._learning(count) if drafts else None
            results = loss_pass(self.chunks, inputs, self.model.vocab_size, self.loss_parameters, count, around, beside)
        if self.predicting is not None:
            self.predicting.release_embedding()
        if self.routing:
            self.routing.check_recomputed()
        outputs = [result.outputs for result in results if result.outputs is not None]
        old = None
        if outputs:
            old = of_rows(micros, outputs)
        return [to_floats(result.metrics) for result in results] if self.holds_result else [], old

    def _learning(self, count: Denominators) -> Beside | None:
        """Returns what gives the predicting layer its gradient of a mini-batch; None on ranks without the layer.

        Collective.
        """
        predicting = self.predicting
        if predicting is not None:
            predicting.begin()
        embedding_on_last_stage(self.chunks, predicting, self.layout)
        if predicting is None:
            return None
        return partial(predicting.learn, scale=self.config.actor.mtp.loss_weight / count.tokens)

    def export_hf(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields (name, full tensor) of every weight, on every rank, in the model's dtype.

        A tensor is valid until the next one is requested. Adapters are merged into the weights.
        """
        with self.residence.using(PARAMETERS):
            merge = None
            if self.adapters is not None:
                merge = self.adapters.merging(source_shards(self.model, self.layout, self.rank))
            yield from self.bridge.export_hf(merge)

    def close(self) -> None:
        """Leaves the process groups. It is safe to call twice."""
        parallel.close()

    @property
    def _moe_layers(self) -> int:
        """Returns the number of this rank's layers with experts, which are the layers of a batch's routes."""
        if self.routing:
            return len(self.routing.layers)
        return 0

    def _of_own_layers(self, batch: TrainBatch) -> TrainBatch:
        """Reduces routes of all layers, as samples have them, to those of this rank's layers."""
        if batch.routes is None:
            return batch
        return replace(batch, routes=batch.routes[:, self.routing.layers])

    def computed_tokens(self, cut: ReplicaCut, lengths: RowLengths) -> np.ndarray:
        """Returns which tokens of a replica's rows need routes on this rank, bool [tokens]; as ReplicaCut.computed."""
        context = mpu.get_context_parallel_rank()
        tensor = mpu.get_tensor_model_parallel_rank()
        shape = self._update_splitter.shape
        return cut.computed(lengths, shape, context, tensor if shape.tensor > 1 else 0)

    @property
    def _update_splitter(self) -> Splitter:
        return Splitter.for_update(self.config.actor, self.layout, self.model)

    def _cut(self, batch: TrainBatch) -> StepCut:
        config = self.config
        return step_cut(config, self.layout, self.model, RowLengths.of(batch), step=0)  # a batch by itself

    def _whole(self, batch: TrainBatch) -> ReplicaCut:
        """Returns this replica's part of a step of which it has all rows."""
        check_batch(batch, self.model, self._moe_layers)
        return self._cut(batch).of(mpu.get_data_parallel_rank())

    def _with_selection(self, batch: TrainBatch, mini_batches: Sequence[np.ndarray]) -> TrainBatch:
        parts = [batch.rows(rows) for rows in mini_batches]
        selected = [
            select(self.loss_parameters, p.advantages, p.old_log_probs, p.loss_mask, p.response_lengths) for p in parts
        ]
        if any(each is None for each in selected):
            return batch
        of_batch = np.zeros(len(batch.rollout_log_probs), bool)
        for rows, of_part in zip(mini_batches, selected, strict=True):
            of_batch[batch.token_indices(rows)] = of_part
        return replace(batch, selected=of_batch)

    def _update_once(
        self, batch: TrainBatch, micros: Sequence[MicroRows], count: Denominators
    ) -> tuple[FloatParts | None, RowResult | None]:
        trained = count.tokens > 0  # counted over all replicas, so all of them skip together
        losses, old = self._gradients(batch, micros, count) if trained else ([], None)
        if trained and self.config.algorithm.on_policy and not self._all_finite(batch, old):
            return None, old
        handed_over = self._replica_norms.read() if trained and self._replica_norms is not None else []
        result = (
            step(self.optimizer, self.scheduler) if trained else StepResult(False, math.nan, current_lr(self.optimizer))
        )
        of_drafts = self._step_predicting() if result.applied and self.config.actor.mtp.train else {}
        self.num_updates += result.applied
        if self.vision is not None and result.applied:
            self.vision.weights_changed()
        self._count_skipped(result, trained)
        if not self.holds_result:
            return None, old
        if mpu.get_data_parallel_rank() > 0:
            return merge(losses) | of_drafts, old
        return merge(losses) | of_drafts | _step_metrics(result, handed_over), old

    def _step_predicting(self) -> FloatParts:
        """Updates the predicting layer, after the policy's own update. Collective.

        Returns metrics on ranks that have the layer.
        """
        predicting = self.predicting
        squares = torch.zeros((), device=self.platform.device)
        if predicting is not None:
            predicting.sum_gradients()
            squares = predicting.squares()
        torch.distributed.all_reduce(squares)
        norm = math.sqrt(float(squares))
        if predicting is None:
            return {}
        predicting.step(norm, self.config.actor.optim.clip_grad)
        if mpu.get_data_parallel_rank() > 0:
            return predicting.metrics()
        skipped = float(not math.isfinite(norm))
        return predicting.metrics() | {"actor/mtp_grad_norm": (norm, 1.0), "actor/mtp_skipped_updates": (skipped, 1.0)}

    def _all_finite(self, batch: TrainBatch, old: RowResult | None) -> bool:
        """Tells whether log-probs are finite on all ranks: `old`, and generation's for the same rows. Collective."""
        here = old is None or (
            np.isfinite(old.log_probs).all()
            and np.isfinite(batch.rollout_log_probs[batch.sampled_indices(old.rows)]).all()
        )
        return parallel.holds_everywhere(bool(here), self.platform.device)

    def _count_skipped(self, result: StepResult, trained: bool) -> None:
        """Counts skipped updates, and raises NumericAbort at the limit.

        The norm is summed over all ranks, so all of them count alike and stop together.
        """
        self.skipped_in_a_row = 0 if result.applied else self.skipped_in_a_row + 1
        limit = self.config.trainer.max_skipped_updates
        if self.skipped_in_a_row >= limit:
            why = "every token of the last one was rejected"
            if trained:
                why = f"the last gradient's norm is {result.grad_norm}"
            raise NumericAbort(
                f"{limit} updates in a row could not be applied (trainer.max_skipped_updates), {why}; weights are "
                f"those of the {self.num_updates} updates before. Look at the samples of the last steps and resume "
                "with a smaller actor.optim.lr"
            )

    def _inputs(self, batch: TrainBatch, micros: Sequence[MicroRows], drafts: bool = False) -> MicroBatches:
        """Returns this rank's inputs for each micro-batch. `drafts`: as for `laid_out`."""
        return laid_out(batch, micros, self._update_splitter.shape, self.layout, self.platform.device, drafts)


def _handed_out(result: RowResult | None) -> RowResult | None:
    if parallel.holds_result():
        return result
    return None


def _count(batch: TrainBatch) -> Denominators:
    """Returns the denominators of a whole batch."""
    return Denominators.counted(row_sums(batch.loss_mask, batch.response_lengths))


def _step_metrics(result: StepResult, handed_over: Sequence[float]) -> FloatParts:
    """Returns metrics of the optimizer's step, and of the gradients that replicas handed over.

    They are equal on every rank, so only one rank returns them.
    """
    norms = {}
    if result.applied:
        norms = {"actor/grad_norm": (result.grad_norm, 1.0)} | norm_metrics(handed_over)
    return norms | {"actor/lr": (result.lr, 1.0), "actor/skipped_updates": (float(not result.applied), 1.0)}
