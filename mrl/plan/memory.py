"""The memory of a plan: terms of actor and engine, every phase on its fullest device, the KV cache, the host."""

from dataclasses import replace
from typing import Any

from mrl.config.deployment import Deployment, rank_devices
from mrl.config.lora_rules import reference_is_the_base
from mrl.config.schema import RunConfig
from mrl.model.adapters import MERGED_BYTES
from mrl.model.hf_config import LayerKind
from mrl.model.layout import padded_vocab_size
from mrl.model.megatron_shards import megatron_slice
from mrl.model.registry import weight_map
from mrl.model.weight_map import Weight
from mrl.plan.activations import Activations, Kernels, MicroBatchShape
from mrl.plan.engine_memory import EngineMemory, cache_bytes_per_token, captured_graphs
from mrl.plan.host_memory import host_section
from mrl.plan.memory_phases import (
    TERMS,
    ActorBytes,
    CriticBytes,
    EngineBytes,
    Offload,
    Phase,
    ScoringBytes,
    actor_phases,
    colocated_phases,
    engine_phases,
    with_optimizer_early,
)
from mrl.plan.model_state import Precision, largest_parameter, stage_state
from mrl.plan.plan_inputs import (
    BatchPlan,
    PlanInputs,
    batch_plan,
    engine_groups,
    engine_of,
    of_reference,
    precision_of,
    recompute_of,
    sync_budget,
)
from mrl.plan.sample_bytes import sample_bytes, teacher_top_bytes
from mrl.plan.teacher_costs import TeacherBytes, teacher_inputs, teacher_parameters
from mrl.plan.vision_costs import host_bytes, kept_features, looking_bytes, tower_bytes, worker_outside
from mrl.reshard.setup import BUCKET_BYTES

_CACHE_CURE = "the cache holds not one sequence: raise rollout.tensor_model_parallel_size or gpu_memory_utilization"


def memory_section(inputs: PlanInputs) -> dict[str, Any]:
    """Returns the bytes of every phase on its fullest device, by term.

    The KV cache and the host memory of the fullest node stand beside.
    """
    batch = batch_plan(inputs.config, inputs.train)
    engine = engine_of(inputs)
    actors = [actor_bytes(inputs, batch, pp) for pp in range(inputs.train.pipeline)]
    worker = engine_bytes(inputs, engine)
    cache = _cache(inputs, engine)
    host = host_section(inputs, batch, engine, actors, *rank_devices(Deployment.of(inputs.config)))
    if inputs.colocated:
        per_stage = with_optimizer_early([colocated_phases(a, worker, inputs.device) for a in actors], actors)
    else:
        per_stage = [list(actor_phases(a, inputs.device)) for a in actors]
    fullest = {phase.name: _fullest(inputs, per_stage, number) for number, phase in enumerate(per_stage[0])}
    if not inputs.colocated:
        fullest |= {phase.name: {"stage": None, **phase.to_json()} for phase in engine_phases(worker, inputs.device)}
    return {
        "phases": fullest,
        "fits": all(phase["fits"] for phase in fullest.values())
        and cache["longest_sequences_per_engine"] > 0
        and host["fits"],
        "layers": kernels_of(inputs),
        "recompute": str(recompute_of(inputs.config)),
        "activation_terms_of_a_layer": activations_of(inputs, batch.micro).layer(LayerKind(inputs.model.is_moe)),
        "kv_cache": cache,
        "host": host,
    }


def _fullest(inputs: PlanInputs, per_stage: list[list[Phase]], number: int) -> dict[str, Any]:
    """Returns the stage with the most bytes in one phase."""
    stage = max(range(len(per_stage)), key=lambda pp: per_stage[pp][number].total)
    phase = per_stage[stage][number]
    change = phase.cure
    config = of_reference(inputs.config) if phase.name == "ref" else inputs.config
    if change and config.actor.use_dynamic_bsz:
        change = TERMS[phase.largest].packed_cure or change
    return {"stage": stage, **phase.to_json(), "change": change}


def _cache(inputs: PlanInputs, engine: EngineMemory) -> dict[str, Any]:
    data = inputs.rollout.data  # ranks with caches of their own
    longest = engine.cache_tokens // data // inputs.config.data.max_sample_length * data
    return {
        "bytes_per_worker": engine.cache,
        "bytes_per_token": cache_bytes_per_token(inputs.model, inputs.rollout.tensor, inputs.engine_element_bytes),
        "tokens_per_engine": engine.cache_tokens,
        "longest_sequences_per_engine": longest,
        "change": "" if longest else _CACHE_CURE,
    }


# ---------------------------------------------------------------- the actor


def actor_bytes(inputs: PlanInputs, batch: BatchPlan, pp: int) -> ActorBytes:
    """Returns the terms of one rank of pipeline stage `pp`."""
    return ActorBytes(
        **_model_bytes(inputs, batch, pp),
        sync_staging=_actor_staging(inputs, pp),
        reference=_reference_bytes(inputs, pp),
        reference_pass=_reference_pass(inputs, pp),
        samples=sample_bytes(inputs, batch, pp),
        teacher=_teacher_bytes(inputs),
        scores_old=not inputs.config.algorithm.on_policy,
        scores_base=inputs.config.algorithm.needs_reference and reference_is_the_base(inputs.config),
        critic=_critic_bytes(inputs, pp),
        vision_tower=tower_bytes(inputs, pp),
        looking=looking_bytes(inputs, batch, pp),
        looking_in_update=looking_bytes(inputs, batch, pp, update=True),
        features=host_bytes(inputs, batch, pp),
    )


def _model_bytes(inputs: PlanInputs, batch: BatchPlan, pp: int, is_critic: bool = False) -> dict[str, Any]:
    """Returns the terms that actor and critic both have, on one rank of pipeline stage `pp`.

    A critic's passes are counted as the actor's, whose output layer takes more than a critic's head.
    """
    precision = precision_of(inputs.config, inputs.element_bytes)
    model = inputs.model.holding(inputs.config.actor.mtp.train)
    state = stage_state(model, inputs.train, pp, precision, lora=inputs.lora, is_critic=is_critic)
    activations = activations_of(inputs, batch.micro)
    saved = activations.stage_saved(pp, batch.micro_batches)
    drafting = 0 if is_critic else _drafting_bytes(inputs, pp, precision)
    return {
        "parameters": state.parameters + drafting,
        "gradients": state.gradients,
        "optimizer": state.optimizer,
        "optimizer_host": state.optimizer_host,
        "activations": saved,
        "temporaries": max(activations.stage_temporaries(pp), _adam_scratch(inputs, state.optimizer) - saved),
        "log_prob": replace(activations, micro=batch.log_prob_micro).forward_only(pp),
        "offload": offload_of(inputs.config),
    }


def _drafting_bytes(inputs: PlanInputs, pp: int, precision: Precision) -> int:
    """Returns the weights that the last stage has for drafts and that are not among the trained ones: a predicting
    layer that stays as it came, or the first stage's embedding for one that is trained.
    """
    config = inputs.config
    if not config.rollout.drafts_with_model or pp < inputs.train.pipeline - 1:
        return 0
    if config.actor.mtp.train:
        rows = padded_vocab_size(inputs.model.vocab_size, inputs.train.tensor) // inputs.train.tensor
        return rows * inputs.model.hidden_size * precision.parameters * (inputs.train.pipeline > 1)
    own = weight_map(inputs.model.holding(True)).predicting_layer.megatron
    return sum(_shard_bytes(inputs, weight, precision) for weight in own)


def _shard_bytes(inputs: PlanInputs, weight: Weight, precision: Precision) -> int:
    """Returns the bytes of a rank's parameters of one row of the weight map, outside of Megatron's buffers."""
    train = inputs.train
    count = inputs.model.num_experts // train.expert if weight.is_expert else 1
    width = precision.parameters
    if weight.dtype == "float32":
        width = 4
    return count * megatron_slice(weight, train.tensor, train.expert_tensor).numel * width


def _reference_pass(inputs: PlanInputs, pp: int) -> ScoringBytes | None:
    """Returns what a reference's pass takes by its own limits; None where no pass is made."""
    if not inputs.config.algorithm.needs_reference:
        return None
    own = replace(inputs, config=of_reference(inputs.config))
    batch = batch_plan(own.config, own.train)
    samples = sample_bytes(own, batch, pp)
    return ScoringBytes(
        activations_of(own, batch.log_prob_micro).forward_only(pp), samples.log_prob, samples.log_prob_routes
    )


def _critic_bytes(inputs: PlanInputs, pp: int) -> CriticBytes | None:
    """Returns the terms of a critic on the ranks of the actor's stage `pp`: those of its fullest stage there."""
    own = inputs.critic
    if own is None:
        return None
    batch = batch_plan(own.config, own.train)
    ranks = [rank for rank in range(own.train.world_size) if inputs.train.dense_coords(rank).pp == pp]
    stages = sorted({own.train.dense_coords(rank).pp for rank in ranks})
    return CriticBytes.fullest(_critic_stage(own, batch, stage) for stage in stages)


def _critic_stage(own: PlanInputs, batch: BatchPlan, pp: int) -> CriticBytes:
    samples = sample_bytes(own, batch, pp)
    state = _model_bytes(own, batch, pp, is_critic=True)
    looking = looking_bytes(own, batch, pp)
    return CriticBytes(**state, batch=samples.update, values_batch=samples.log_prob, looking=looking)


def activations_of(inputs: PlanInputs, micro: MicroBatchShape) -> Activations:
    """Returns the activation model of the configured actor."""
    return Activations(
        model=inputs.model,
        layout=inputs.train,
        micro=micro,
        bytes=inputs.element_bytes,
        kernels=kernels_of(inputs),
        recompute=recompute_of(inputs.config),
        expert_load=inputs.assumptions.expert_load_in(inputs.train),
        gradient_bytes=precision_of(inputs.config, inputs.element_bytes).gradients,
        lora=inputs.lora,
        dropout=inputs.config.actor.lora.dropout > 0,
        gated_delta=inputs.config.model.gated_delta,
        predicting=inputs.model.holding(inputs.config.actor.mtp.train).predicting_layers,
    )


def kernels_of(inputs: PlanInputs) -> Kernels:
    """Returns the kernels that ranks use: on accelerators Transformer Engine or its Ascend counterpart.

    Ranks refuse to start without, unless the run allows it.
    """
    without = inputs.device.platform == "cpu" or inputs.config.model.allow_torch_layers
    if without:
        return "torch"
    return "transformer_engine"


def _adam_scratch(inputs: PlanInputs, optimizer: int) -> int:
    """Returns the bytes that a step of torch's AdamW takes, when activations are gone.

    On devices it holds the roots of all second moments at once. Fused Adams take none. `optimizer`: bytes of Adam's
    state.
    """
    if inputs.device.platform == "cpu" or kernels_of(inputs) != "torch" or not optimizer:
        return 0
    precision = precision_of(inputs.config, inputs.element_bytes)
    return round(optimizer * precision.moments / 2 / precision.adam)


def offload_of(config: RunConfig) -> Offload:
    """Returns what leaves the device between phases."""
    actor = config.actor
    return Offload(
        actor.param_offload,
        actor.grad_offload,
        actor.optimizer_offload,
        config.ref.param_offload,
        config.distillation.teacher_model.param_offload,
    )


def _reference_bytes(inputs: PlanInputs, pp: int) -> int:
    """Returns the parameters of a KL term's reference model on a rank of stage `pp`; it has the actor's layout."""
    if not inputs.config.algorithm.needs_reference or reference_is_the_base(inputs.config):
        return 0
    return stage_state(inputs.model, inputs.train, pp, Precision(inputs.element_bytes)).parameters


def _teacher_bytes(inputs: PlanInputs) -> TeacherBytes:
    """Returns the bytes of the teacher's parameters and of its pass."""
    teacher = teacher_inputs(inputs)
    if teacher is None:
        return TeacherBytes()
    batch = batch_plan(teacher.config, teacher.train)
    stages = range(teacher.train.pipeline)
    activations = activations_of(teacher, batch.log_prob_micro)
    return TeacherBytes(
        parameters=teacher_parameters(teacher),
        log_prob=max(activations.forward_only(pp) for pp in stages),
        batch=max(sample_bytes(teacher, batch, pp).log_prob for pp in stages)
        + 2 * batch.log_prob_micro.rows * batch.log_prob_micro.response * teacher_top_bytes(inputs),
        looking=max(looking_bytes(teacher, batch, pp) for pp in stages),
    )


def _actor_staging(inputs: PlanInputs, pp: int) -> int:
    """Returns the bytes that a rank stages for a sync.

    Fast path: one round being packed and one on the wire. Slow path: a bucket, and the largest tensor gathered; with
    adapters also a copy of a rank's part to merge into. On both, with adapters or FP8 values, what merging takes.
    """
    if inputs.config.reshard.path == "fast":
        merged = MERGED_BYTES if inputs.lora or inputs.config.rollout.fp8_block else 0
        return 2 * sync_budget(inputs.config) + merged
    largest = largest_parameter(inputs.model, inputs.train, pp) * inputs.element_bytes
    adapted = largest + MERGED_BYTES if inputs.lora else 0
    return BUCKET_BYTES + 2 * largest * inputs.train.tensor + adapted


# ---------------------------------------------------------------- an engine


def _keeps_tower(inputs: PlanInputs) -> bool:
    """Tells whether a worker that sleeps keeps the vision tower: a CPU's does, unless syncs bring it."""
    return inputs.device.platform == "cpu" and inputs.model.trained_tower is None


def engine_bytes(inputs: PlanInputs, engine: EngineMemory) -> EngineBytes:
    """Returns the terms of one engine worker. A sync stages two rounds and, at its peak, two modules in load layout."""
    staging = 2 * sync_budget(inputs.config) if inputs.config.reshard.path == "fast" else BUCKET_BYTES
    graphs = captured_graphs(inputs.device, inputs.config.rollout.enforce_eager)
    groups = engine_groups(inputs.rollout, inputs.model.is_moe)
    always = inputs.device.context + inputs.device.group * groups + engine.buffers
    kept = always + kept_features(inputs)
    return EngineBytes(
        weights=engine.weights + engine.draft + engine.tower,
        working_set=engine.working_set + graphs,
        cache=engine.cache,
        sync_staging=staging + 2 * engine.largest_module,
        asleep=kept + graphs + engine.tower * _keeps_tower(inputs),
        outside=always + worker_outside(inputs),
    )
