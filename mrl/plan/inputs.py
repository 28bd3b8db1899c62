"""From a configuration to what the memory model asks: one place that reads the keys."""

from dataclasses import dataclass, replace

from mrl.config.places import rollout_layout
from mrl.config.schema import RunConfig
from mrl.errors import ConfigError
from mrl.model import ModelSpec
from mrl.model.layout import RolloutLayout, TrainLayout
from mrl.plan.activations import Activations, Kernels, MicroBatch, Recompute
from mrl.plan.assumptions import USUAL, Assumptions
from mrl.plan.devices import Device, default_device, devices, find_device
from mrl.plan.engine_memory import GRAPHS, EngineMemory, engine_memory, engine_memory_with_cache
from mrl.plan.model_state import Precision, largest_parameter, stage_state
from mrl.plan.phases import ActorBytes, EngineBytes, Offload

_ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}
_MIB, _GIB = 1024**2, 1024**3
_BATCHED_TOKENS = 8192  # vLLM's default for RL-sized engines where rollout.max_num_batched_tokens is null
_SLOW_BUCKET = 512 * _MIB  # of full tensors on their way through the driver


@dataclass(frozen=True)
class BatchPlan:
    """Batch algebra of one step. Counts of micro-batches are of one rank and one mini-batch."""

    prompts: int
    responses_per_prompt: int
    samples: int
    mini_batches: int
    samples_per_rank: int  # of one mini-batch
    micro: MicroBatch  # the largest that can come up: every row at its limits
    micro_batches: int
    log_prob_micro: MicroBatch

    def to_json(self) -> dict:
        """Plain data."""
        return {
            "train_batch_size": self.prompts,
            "n": self.responses_per_prompt,
            "samples_per_step": self.samples,
            "updates_per_step": self.mini_batches,
            "samples_per_rank_and_update": self.samples_per_rank,
            "micro_batches_per_update": self.micro_batches,
            "micro_batch": vars(self.micro),
            "micro_batch_tokens": self.micro.tokens,
            "log_prob_micro_batch": vars(self.log_prob_micro),
        }


@dataclass(frozen=True)
class PlanInputs:
    """Everything that a plan follows from."""

    config: RunConfig
    model: ModelSpec
    device: Device
    assumptions: Assumptions
    train: TrainLayout
    rollout: RolloutLayout

    @classmethod
    def of(cls, config: RunConfig, model: ModelSpec, device: Device, assumptions: Assumptions = USUAL) -> "PlanInputs":
        """Raises ConfigError for an illegal layout."""
        train = TrainLayout.build(config.actor.layout.model_dump(), model)
        return cls(config, model, device, assumptions, train, rollout_layout(config))

    @property
    def colocated(self) -> bool:
        return self.config.cluster.placement == "colocated"

    @property
    def element_bytes(self) -> int:
        return _ELEMENT_BYTES[self.config.model.dtype]

    @property
    def engine_element_bytes(self) -> int:
        return _ELEMENT_BYTES[self.config.rollout_dtype]


def device_for(config: RunConfig, name: str | None = None) -> Device:
    """The device called `name`, else the one that cluster.accelerator names, else the smallest that cluster.device can mean.

    Raises ConfigError for a name that is not known or of another kind than cluster.device.
    """
    name = name or config.cluster.accelerator
    if name is None:
        return default_device(config.cluster.device)
    device = find_device(name)
    if device.platform != config.cluster.device:
        fitting = ", ".join(d.name for d in devices().values() if d.platform == config.cluster.device)
        raise ConfigError(f"device {name}: cluster.device is {config.cluster.device}; allowed: {fitting} (or set cluster.device)")
    return device


def recompute_of(config: RunConfig) -> Recompute:
    """Activation recomputation, from `model.override_transformer_config`."""
    given = config.model.override_transformer_config
    if (granularity := given.get("recompute_granularity")) is None:
        return Recompute()
    return Recompute(
        granularity=granularity,
        method=given.get("recompute_method") or "uniform",
        num_layers=given.get("recompute_num_layers") or 1,
        modules=tuple(given.get("recompute_modules") or Recompute().modules),
    )


def offload_of(config: RunConfig) -> Offload:
    """What leaves the device between phases."""
    actor = config.actor
    return Offload(actor.param_offload, actor.grad_offload, actor.optimizer_offload, config.ref.param_offload)


def precision_of(config: RunConfig, element_bytes: int) -> Precision:
    """Of weights of `element_bytes`, with the share of Adam that Megatron's hybrid optimizer has on the host."""
    given = config.actor.optim.override_optimizer_config
    share = float(given.get("optimizer_offload_fraction") or 0.0) if given.get("optimizer_cpu_offload") else 0.0
    return Precision(element_bytes, host_share=share, masters_stay=not given.get("use_precision_aware_optimizer"))


def batch_plan(config: RunConfig, train: TrainLayout) -> BatchPlan:
    """The batches of a step. Under a token budget a micro-batch is one packed row of that many tokens."""
    actor, data, n = config.actor, config.data, config.rollout.n
    samples = actor.ppo_mini_batch_size * n
    per_rank, micro = -(-samples // train.data), update_micro_batch(config, train)
    packed = actor.log_prob_max_token_len_per_gpu or actor.ppo_max_token_len_per_gpu
    rows = actor.log_prob_micro_batch_size_per_gpu or actor.ppo_micro_batch_size_per_gpu
    log_prob = _micro_batch(config, train, rows, packed, -(-data.train_batch_size * n // train.data))
    return BatchPlan(
        prompts=data.train_batch_size,
        responses_per_prompt=n,
        samples=data.train_batch_size * n,
        mini_batches=config.updates_per_step,
        samples_per_rank=per_rank,
        micro=micro,
        micro_batches=_count(config, train, micro, per_rank),
        log_prob_micro=log_prob,
    )


def update_micro_batch(config: RunConfig, train: TrainLayout) -> MicroBatch:
    """The largest micro-batch of the update in a layout: a token budget is of one device, so context parallelism multiplies it."""
    actor = config.actor
    per_rank = -(-actor.ppo_mini_batch_size * config.rollout.n // train.data)
    return _micro_batch(config, train, actor.ppo_micro_batch_size_per_gpu, actor.ppo_max_token_len_per_gpu, per_rank)


def _micro_batch(config: RunConfig, train: TrainLayout, rows: int, tokens: int | None, available: int) -> MicroBatch:
    prompt, response = config.data.max_prompt_length, config.data.max_response_length
    multiple = (2 * train.context if train.context > 1 else 1) * (train.tensor if train.sequence_parallel else 1)
    length, packed = _up(prompt + response, multiple), config.actor.use_remove_padding
    if not config.actor.use_dynamic_bsz or tokens is None:
        return MicroBatch(min(rows, available), length, response, packed)
    budget = _up(min(max(tokens * train.context, length), available * length), multiple)
    return MicroBatch(1, budget, budget * response // (prompt + response), packed)


def _count(config: RunConfig, train: TrainLayout, micro: MicroBatch, per_rank: int) -> int:
    """How many micro-batches a rank's samples make when all are at their limits; a multiple of the stages with virtual ones."""
    tokens = per_rank * (config.data.max_prompt_length + config.data.max_response_length)
    packed = config.actor.use_dynamic_bsz and config.actor.ppo_max_token_len_per_gpu is not None
    count = -(-tokens // micro.tokens) if packed else -(-per_rank // micro.rows)
    return _up(count, train.pipeline if train.virtual_pipeline > 1 else 1)


def kernels_of(device: Device) -> Kernels:
    """Transformer Engine, or its Ascend counterpart, is there on every accelerator that a preset is written for."""
    return "torch" if device.platform == "cpu" else "transformer_engine"


def activations_of(inputs: PlanInputs, micro: MicroBatch) -> Activations:
    """The activation model of the configured actor."""
    return Activations(
        model=inputs.model,
        layout=inputs.train,
        micro=micro,
        bytes=inputs.element_bytes,
        kernels=kernels_of(inputs.device),
        recompute=recompute_of(inputs.config),
        expert_load=inputs.assumptions.expert_load if inputs.train.expert > 1 else 1.0,
    )


def actor_bytes(inputs: PlanInputs, batch: BatchPlan, pp: int) -> ActorBytes:
    """Terms of one rank of pipeline stage `pp`."""
    state = stage_state(inputs.model, inputs.train, pp, precision_of(inputs.config, inputs.element_bytes))
    activations = activations_of(inputs, batch.micro)
    return ActorBytes(
        parameters=state.parameters,
        gradients=state.gradients,
        optimizer=state.optimizer,
        optimizer_host=state.optimizer_host,
        activations=activations.stage_saved(pp, batch.micro_batches),
        temporaries=activations.stage_temporaries(pp),
        log_prob=replace(activations, micro=batch.log_prob_micro).forward_only(pp),
        sync_staging=actor_staging(inputs, pp),
        offload=offload_of(inputs.config),
        reference=reference_bytes(inputs, pp),
    )


def reference_bytes(inputs: PlanInputs, pp: int) -> int:
    """Parameters of the reference model of a KL term on a rank of stage `pp`; with a layout of its own, those of its fullest stage."""
    algorithm, own = inputs.config.algorithm, inputs.config.ref.layout
    if not algorithm.needs_reference:
        return 0
    layout = inputs.train if own is None else TrainLayout.build(own.model_dump(), inputs.model)
    stages = (pp,) if own is None else range(layout.pipeline)
    return max(stage_state(inputs.model, layout, stage, Precision(inputs.element_bytes)).parameters for stage in stages)


def actor_staging(inputs: PlanInputs, pp: int) -> int:
    """Fast path: a round being packed and one on the wire. Slow path: a bucket, and the largest tensor gathered and merged."""
    if inputs.config.reshard.path == "fast":
        return 2 * inputs.config.reshard.budget_mb * _MIB
    whole = largest_parameter(inputs.model, inputs.train, pp) * inputs.train.tensor * inputs.element_bytes
    return _SLOW_BUCKET + 2 * whole


def engine_of(inputs: PlanInputs) -> EngineMemory:
    """One engine worker on the device, with the cache that its share of the memory leaves."""
    r = inputs.config.rollout
    passes = {"batched_tokens": r.max_num_batched_tokens or _BATCHED_TOKENS, "max_num_seqs": r.max_num_seqs}
    if inputs.device.platform == "cpu":
        cache = r.cpu_kvcache_gib * _GIB // inputs.rollout.workers_per_engine
        return engine_memory_with_cache(inputs.model, inputs.rollout, cache, dtype_bytes=inputs.engine_element_bytes, **passes)
    share = round(inputs.device.memory * r.gpu_memory_utilization)
    return engine_memory(inputs.model, inputs.rollout, share, dtype_bytes=inputs.engine_element_bytes, **passes)


def engine_bytes(inputs: PlanInputs, engine: EngineMemory) -> EngineBytes:
    """Terms of one engine worker. A sync stages two rounds and, at its peak, two modules in load layout."""
    fast = inputs.config.reshard.path == "fast"
    staging = 2 * inputs.config.reshard.budget_mb * _MIB if fast else _SLOW_BUCKET
    graphs = 0 if inputs.config.rollout.enforce_eager or inputs.device.platform == "cpu" else GRAPHS
    return EngineBytes(
        weights=engine.weights,
        working_set=engine.working_set + graphs,
        cache=engine.cache,
        sync_staging=staging + 2 * engine.largest_module,
        asleep=inputs.assumptions.engine_asleep,
    )


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
