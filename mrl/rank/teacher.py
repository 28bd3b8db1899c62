"""The teacher of a distillation on one rank: a second model, in process groups and a layout of its own."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from megatron.core import parallel_state as mpu

from mrl.config.schema import RunConfig
from mrl.config.schema_actor import PARAMETERS
from mrl.config.teacher_model import teacher_of
from mrl.data.batch import TrainBatch
from mrl.model import load_model_spec
from mrl.platforms import Platform
from mrl.rank import parallel
from mrl.rank.bridge import DTYPES, MBridge
from mrl.rank.cut import MicroRows, Splitter
from mrl.rank.forward import Likeliest, log_prob_pass, nothing_around, of_rows, on_device, return_hidden_states
from mrl.rank.offload import Residence
from mrl.rank.packing import MicroBatch, MicroBatches, micro_batch
from mrl.rank.row_results import check_batch

if TYPE_CHECKING:
    from mrl.rank.vision import Pixels, Vision


class Teacher:
    """This rank's part of the teacher. Every method is collective, like those of MegatronActor."""

    vision: "Vision | None" = None  # after `see`

    def __init__(self, config: RunConfig, platform: Platform) -> None:
        """Builds and loads the teacher. The ranks must have met. Raises ConfigError for an illegal layout or override,
        EnvironmentFault when the checkpoint is not usable.
        """
        own = config.distillation.teacher_model
        described = teacher_of(config, load_model_spec)
        self.model = described.model
        self.layout = described.layout
        self._config = config
        self._platform = platform
        self._groups = parallel.OtherGroups()
        with self._groups.in_place():
            parallel.init_model_parallel(self.layout, config.trainer.seed, config.cluster.step_timeout_s)
            given = {"path": own.model_path, "override_transformer_config": own.override_transformer_config}
            bridge = MBridge(
                config.model.model_copy(update=given),
                config.actor,
                self.model,
                self.layout,
                config.trainer.deterministic,
            )
            self._chunks = bridge.build_model(is_trained=False)
            return_hidden_states(self._chunks)
            bridge.load_hf(own.model_path)
        distillation = config.distillation
        self._likeliest = None  # further tokens whose log-probs are wanted
        if distillation.over_top_k:
            known = load_model_spec(config.model.path).vocab_size  # token ids that the student knows
            self._likeliest = Likeliest(distillation.distillation_loss.topk, known)
        moved = ()
        if own.param_offload:
            moved = (PARAMETERS,)
        self._residence = Residence(platform, self._chunks, None, moved, "distillation.teacher_model")
        self._residence.offload()

    def see(self, pixels: "Pixels") -> None:
        """Loads the vision tower of its checkpoint, so that rows may have images. `pixels`: as in Vision.

        Raises EnvironmentFault for files with other weights.
        """
        from mrl.rank.vision import Vision

        folder = self._config.distillation.teacher_model.model_path
        with self._groups.in_place():
            dtype = DTYPES[self._config.model.dtype]
            self.vision = Vision(self._chunks, folder, dtype, self._platform.device, pixels)

    def prepared(self, batch: TrainBatch) -> TrainBatch:
        """Sets the positions of tokens where rows have images, before any pass of a step."""
        return batch if self.vision is None else self.vision.prepared(batch)

    @property
    def on_host(self) -> Iterator[torch.Tensor]:
        """Yields the host buffers of parameters that leave the device."""
        return self._residence.on_host

    def columns(
        self, batch: TrainBatch, micros: Sequence[MicroRows]
    ) -> tuple[np.ndarray, dict[str, np.ndarray]] | None:
        """Returns rows of the batch, and log-probabilities of their sampled tokens under the teacher, at the batch's
        temperatures, as `teacher_log_probs`.

        If the loss needs them, it also returns the teacher's likeliest tokens with their log-probs. `micros` are those
        of this rank's replica of the teacher, and `batch` has their rows. One rank of each replica returns the result,
        the others None.
        """
        check_batch(batch, self.model, moe_layers=0)
        with self._groups.in_place():
            with self._residence.using(PARAMETERS):
                inputs = self._inputs(batch, micros)
                around = nothing_around if self.vision is None else self.vision.around(batch, nothing_around)
                outputs = log_prob_pass(self._chunks, inputs, self.model.vocab_size, around, self._likeliest)
            self.holds_result = parallel.holds_result()
            parallel.release_scratch()  # no plan counts it outside the pass, wherever the weights are
        self._residence.offload()
        if not self.holds_result:
            return None
        result = of_rows(micros, outputs)
        columns = {"teacher_log_probs": result.log_probs}
        if result.top_ids is not None:
            columns |= {"teacher_top_ids": result.top_ids, "teacher_top_log_probs": result.top_log_probs}
        return result.rows, columns

    def _inputs(self, batch: TrainBatch, micros: Sequence[MicroRows]) -> MicroBatches:
        config = self._config
        shape = Splitter.for_teacher(config.actor, config.distillation.teacher_model, self.layout, self.model).shape
        context_rank = mpu.get_context_parallel_rank()

        def lay_out(number: int) -> MicroBatch[torch.Tensor]:
            micro = micros[number]
            laid_out = micro_batch(batch, micro.rows, shape, context_rank, micro.is_filler)
            return on_device(laid_out, self._platform.device)

        kept = 1
        if self.layout.virtual_pipeline > 1:
            kept = self.layout.pipeline
        return MicroBatches(len(micros), lay_out, kept)
