"""Reads from a configuration what memory and times are computed from."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from functools import lru_cache
from typing import Any

from mrl.config.deployment import cluster_shape, rollout_layout
from mrl.config.schema import LoraConfig, RunConfig
from mrl.config.schema_rollout import MTP
from mrl.config.teacher_model import teacher_of
from mrl.errors import ConfigError, MrlError
from mrl.model import ModelSpec, planning_model_spec
from mrl.model.adapters import Lora
from mrl.model.device_grid import DeviceId, actor_devices, engine_devices
from mrl.model.eagle_head import head_bytes, head_cache_elements
from mrl.model.layout import RolloutLayout, TrainLayout
from mrl.model.precision import Precision
from mrl.model.tower_sizes import VisionTower
from mrl.plan.activations import MicroBatchShape, Recompute
from mrl.plan.calibration_file import assumptions_of
from mrl.plan.devices import (
    Assumptions,
    Device,
    Starts,
    SyncRates,
    default_device,
    device_by_part,
    devices_of,
    find_device,
)
from mrl.plan.engine_memory import (
    NO_DRAFTER,
    Drafter,
    EngineMemory,
    cache_bytes_per_token,
    draft_weight_bytes,
    engine_memory,
    engine_memory_with_cache,
    engine_share,
)
from mrl.platforms.hosting import MemoryReach, get_hosting
from mrl.reshard.setup import pair_route
from mrl.units import GIB, MIB, round_up

_ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}
_BATCHED_TOKENS = 8192  # vLLM's default for RL-sized engines where rollout.max_num_batched_tokens is null


@dataclass(frozen=True)
class BatchPlan:
    """The batches of one step. Counts of micro-batches are those of one rank and one mini-batch."""

    prompts: int
    responses_per_prompt: int
    samples: int
    mini_batches: int  # of one epoch
    epochs: int
    samples_per_rank: int  # of one mini-batch
    micro: MicroBatchShape  # the largest possible one: every row at its limits
    micro_batches: int
    log_prob_micro: MicroBatchShape

    @property
    def updates(self) -> int:
        """Optimizer updates of the step."""
        return self.mini_batches * self.epochs

    def to_json(self) -> dict:
        """Returns the batches as plain data."""
        return {
            "train_batch_size": self.prompts,
            "n": self.responses_per_prompt,
            "samples_per_step": self.samples,
            "updates_per_step": self.updates,
            "samples_per_rank_and_update": self.samples_per_rank,
            "micro_batches_per_update": self.micro_batches,
            "micro_batch": vars(self.micro),
            "micro_batch_tokens": self.micro.tokens,
            "log_prob_micro_batch": vars(self.log_prob_micro),
        }


@dataclass(frozen=True)
class PlanInputs:
    """Everything that decides a plan."""

    config: RunConfig
    model: ModelSpec
    device: Device
    assumptions: Assumptions
    train: TrainLayout
    rollout: RolloutLayout
    validation_prompts: int = 0  # of a validation; 0: there is none, or their number is unknown

    @classmethod
    def of(
        cls,
        config: RunConfig,
        model: ModelSpec,
        device: Device,
        assumptions: Assumptions | None = None,
        validation_prompts: int | None = None,
    ) -> "PlanInputs":
        """Makes the inputs. Memory for communicators of weight syncs and of ranks is reserved on the device.

        `assumptions`: by default those of cluster.calibration. `validation_prompts`: those of data.val_files, where
        they were read. Raises ConfigError for an illegal layout, and for a calibration that cannot be used.
        """
        model = model.with_trained_tower(config.model.vision)
        train = TrainLayout.build(config.actor.layout, model)
        if assumptions is None:
            assumptions = assumptions_of(config.cluster.calibration, device)
        pairs = device.pair and device.pair * most_pairs(config)
        groups = device.group and device.group * process_groups(config, model, train)
        validation = _validation_prompts(config, validation_prompts)
        device = replace(device, communicators=pairs, communicators_of_ranks=groups)
        return cls(config, model, device, assumptions, train, rollout_layout(config.rollout), validation)

    @property
    def colocated(self) -> bool:
        return self.config.cluster.placement == "colocated"

    @property
    def sync_rates(self) -> tuple[SyncRates, Starts]:
        """The rates of a sync's steps, and the seconds of its starts, as far as they are reached."""
        share = self.assumptions.sync_share
        rates = SyncRates(*(rate * share for rate in astuple(self.device.sync)))
        return rates, Starts(*(seconds / share for seconds in astuple(self.device.starts)))

    @property
    def lora(self) -> Lora | None:
        """The trained adapters; None where all weights are trained."""
        return self.config.actor.lora.adapters

    @property
    def tower(self) -> VisionTower | None:
        """The vision tower that the run sees by; None for a run of text."""
        if self.config.model.vision is None:
            return None
        return self.model.tower

    @property
    def critic(self) -> "PlanInputs | None":
        """The same inputs with the critic in the actor's place and in its layout; None without a critic."""
        own = self.config.of_critic
        if own is None:
            return None
        return replace(self, config=own, train=TrainLayout.build(own.actor.layout, self.model))

    @property
    def element_bytes(self) -> int:
        """Bytes of one number of the actor's weights."""
        return _ELEMENT_BYTES[self.config.model.dtype]

    @property
    def engine_element_bytes(self) -> int:
        """Bytes of one number of the engines' weights."""
        return _ELEMENT_BYTES[self.config.rollout_dtype]


def device_for(config: RunConfig, name: str | None = None) -> Device:
    """Returns the device called `name`, else cluster.accelerator, else the smallest one of cluster.device.

    Raises ConfigError for an unknown name, or one of another kind than cluster.device.
    """
    named = name or config.cluster.accelerator
    if named is None:
        return default_device(config.cluster.device)
    device = device_by_part(name) if name else find_device(named)
    if device.platform != config.cluster.device:
        fitting = ", ".join(d.name for d in devices_of(config.cluster.device))
        raise ConfigError(
            f"device {named}: cluster.device is {config.cluster.device}; allowed: {fitting} (or set cluster.device)"
        )
    return device


def _validation_prompts(config: RunConfig, read: int | None) -> int:
    """Returns the validation prompts of a run that validates: those that were read, at most data.val_max_samples."""
    trainer = config.trainer
    data = config.data
    if not data.val_files or not (trainer.val_before_train or trainer.test_freq > 0):
        return 0
    return min((each for each in (read, data.val_max_samples) if each is not None), default=0)


def sync_budget(config: RunConfig) -> int:
    """Returns the bytes of one round of the weight sync, staged on each side."""
    return config.reshard.budget_mb * MIB


def recompute_of(config: RunConfig) -> Recompute:
    """Returns the activation recomputation of `model.override_transformer_config`."""
    given = config.model.override_transformer_config
    if (granularity := given.get("recompute_granularity")) is None:
        return Recompute()
    return Recompute(
        granularity=granularity,
        method=given.get("recompute_method") or "uniform",
        num_layers=given.get("recompute_num_layers") or 1,
        modules=tuple(given.get("recompute_modules") or Recompute().modules),
    )


def precision_of(config: RunConfig, element_bytes: int) -> Precision:
    """Returns the bytes that training keeps for each weight of `element_bytes`.

    Gradients are in float32 or in the weights' format. Megatron's hybrid optimizer keeps a share of Adam on the host.
    """
    given = config.actor.optim.override_optimizer_config
    share = 0.0
    if given.get("optimizer_cpu_offload"):
        share = float(given.get("optimizer_offload_fraction") or 0.0)
    in_float32 = config.actor.override_ddp_config.get("grad_reduce_in_fp32", True)
    return Precision(
        element_bytes,
        gradients=Precision.gradients if in_float32 else element_bytes,
        host_share=share,
        keeps_masters=not given.get("use_precision_aware_optimizer"),
    )


def batch_plan(config: RunConfig, train: TrainLayout) -> BatchPlan:
    """Returns the batches of a step. Under a token budget a micro-batch is one packed row of that many tokens."""
    actor = config.actor
    data = config.data
    n = config.rollout.n
    per_rank = _samples_per_rank(config, train)
    micro = update_micro_batch(config, train)
    packed = actor.log_prob_max_token_len_per_gpu or actor.ppo_max_token_len_per_gpu
    rows = actor.log_prob_micro_batch_size_per_gpu or actor.ppo_micro_batch_size_per_gpu
    log_prob = _micro_batch(config, train, rows, packed, -(-data.train_batch_size * n // train.data))
    return BatchPlan(
        prompts=data.train_batch_size,
        responses_per_prompt=n,
        samples=data.train_batch_size * n,
        mini_batches=config.mini_batches,
        epochs=actor.ppo_epochs,
        samples_per_rank=per_rank,
        micro=micro,
        micro_batches=_micro_batch_count(config, train, micro, per_rank),
        log_prob_micro=log_prob,
    )


def update_micro_batch(config: RunConfig, train: TrainLayout) -> MicroBatchShape:
    """Returns the largest micro-batch of an update in a layout.

    A token budget is one device's, so context parallelism multiplies it.
    """
    actor = config.actor
    available = _samples_per_rank(config, train)
    return _micro_batch(config, train, actor.ppo_micro_batch_size_per_gpu, actor.ppo_max_token_len_per_gpu, available)


def shape_of_actor(config: RunConfig, model: ModelSpec) -> dict[str, Any]:
    """Returns what an actor's seconds depend on beside batch and lengths, as plain data: its layout, what it recomputes
    and the tokens of its largest micro-batches. Two runs with the same ones measure the same.
    """
    recompute = recompute_of(config)
    micro = update_micro_batch(config, TrainLayout.build(config.actor.layout, model))
    return {
        "layout": config.actor.layout.model_dump(mode="json"),
        "recompute": asdict(recompute) | {"modules": sorted(recompute.modules)},
        "micro_batch_tokens": micro.tokens,
    }


def _samples_per_rank(config: RunConfig, train: TrainLayout) -> int:
    """Returns the samples of one mini-batch that a data-parallel rank has."""
    return -(-config.actor.ppo_mini_batch_size * config.rollout.n // train.data)


def _micro_batch(
    config: RunConfig, train: TrainLayout, rows: int, tokens: int | None, available: int
) -> MicroBatchShape:
    prompt = config.data.max_prompt_length
    response = config.data.max_response_length
    multiple = 1
    if train.context > 1:
        multiple *= 2 * train.context
    if train.sequence_parallel:
        multiple *= train.tensor
    length = round_up(prompt + response, multiple)
    packed = config.actor.use_remove_padding
    if not config.actor.use_dynamic_bsz or tokens is None:
        return MicroBatchShape(min(rows, available), length, response, packed)
    budget = round_up(min(max(tokens * train.context, length), available * length), multiple)
    return MicroBatchShape(1, budget, budget * response // (prompt + response), packed)


def _micro_batch_count(config: RunConfig, train: TrainLayout, micro: MicroBatchShape, per_rank: int) -> int:
    """Returns the micro-batches that a rank's samples make at their limits; with virtual stages a multiple of the
    stages.
    """
    tokens = per_rank * config.data.max_sample_length
    packed = config.actor.use_dynamic_bsz and config.actor.ppo_max_token_len_per_gpu is not None
    count = -(-tokens // micro.tokens) if packed else -(-per_rank // micro.rows)
    return round_up(count, train.pipeline if train.virtual_pipeline > 1 else 1)


def engine_passes(config: RunConfig) -> dict[str, int]:
    """Returns what decides the size of an engine's largest pass, and of its weights in FP8."""
    rollout = config.rollout
    return {
        "batched_tokens": rollout.max_num_batched_tokens or _BATCHED_TOKENS,
        "max_num_seqs": rollout.max_num_seqs,
        "fp8_block": rollout.fp8_block,
    }


def _drafter(inputs: PlanInputs) -> Drafter:
    """Returns what drafts on the worker with most. A head counts as whole, which vLLM cuts."""
    speculation, rollout, nbytes = inputs.config.rollout.speculation, inputs.rollout, inputs.engine_element_bytes
    if speculation is None:
        return NO_DRAFTER
    weights = cache = 0
    if speculation.head is not None and (weights := head_bytes(speculation.head)):
        cache = head_cache_elements(speculation.head, rollout.tensor) * nbytes
    elif speculation.method == MTP:
        weights = draft_weight_bytes(inputs.model, rollout, nbytes, inputs.config.rollout.fp8_block)
        cache = cache_bytes_per_token(inputs.model, rollout.tensor, nbytes) // inputs.model.attending_layers
    return Drafter(weights, cache, speculation.most)


def engine_of(inputs: PlanInputs) -> EngineMemory:
    """Returns one engine worker on the device, with the cache that its share of the memory leaves."""
    rollout = inputs.config.rollout
    passes = engine_passes(inputs.config)
    bytes_of_a_number = inputs.engine_element_bytes
    beside = {
        "drafter": _drafter(inputs),
        "sequences": -(
            -inputs.config.data.train_batch_size * rollout.n // (inputs.rollout.num_engines * inputs.rollout.data)
        ),
        "tower": inputs.tower.parameters * bytes_of_a_number if inputs.tower else 0,
    }
    if inputs.device.platform == "cpu":
        cache = rollout.cpu_kvcache_gib * GIB  # VLLM_CPU_KVCACHE_SPACE, which every worker takes for itself
        return engine_memory_with_cache(
            inputs.model, inputs.rollout, cache, dtype_bytes=bytes_of_a_number, **beside, **passes
        )
    share = engine_share(inputs.device, rollout.gpu_memory_utilization, rollout.enforce_eager)
    return engine_memory(inputs.model, inputs.rollout, share, dtype_bytes=bytes_of_a_number, **beside, **passes)


def of_reference(config: RunConfig) -> RunConfig:
    """Returns the configuration with the reference's micro-batch limits in the actor's place, and no adapters."""
    ref = config.ref
    limits = {
        "use_dynamic_bsz": ref.log_prob_use_dynamic_bsz,
        "log_prob_micro_batch_size_per_gpu": ref.log_prob_micro_batch_size_per_gpu,
        "log_prob_max_token_len_per_gpu": ref.log_prob_max_token_len_per_gpu,
    }
    given = {name: value for name, value in limits.items() if value is not None}
    actor = config.actor.model_copy(update=given | {"lora": LoraConfig()})
    return config.model_copy(update={"actor": actor})


# ---------------------------------------------------------------- communicators
#
# They need device memory. A weight sync has one for every rank and worker that NCCL or HCCL joins. Both libraries make
# it for two processes at their first message (ProcessGroupNCCL.cpp and ProcessGroupHCCL.cpp, pointToPoint). It has its
# own buffers, which are missing in the measured memory of engines. It stays as long as the two are connected. The
# number of pairs cannot be reduced. In layouts that spread experts over all ranks, each rank holds some that no other
# has. Every engine needs them.
#
# The actor has process groups, which its reference uses too. A teacher has groups of its own on the actor's ranks. So
# has a critic in a layout of its own. Each group of several ranks gets a communicator at its first collective. Workers
# of an engine have theirs before vLLM measures what memory is left (v1/worker/gpu_worker.py), outside of its share.

# Axes of the groups in which Megatron's ranks of one model meet (parallel_state.py); each group has its communicator.
_PASSES = (("tp",), ("cp",), ("pp",))
_UPDATES = (("cp", "dp"),)  # beside one of all ranks, for the gradient's norm
_EXPERT_PASSES = (("ep",), ("etp",), ("etp", "ep"))
_EXPERT_UPDATES = (("edp",),)
_ALL = (("tp", "cp", "dp", "pp"),)
_ENDS = (("pp",),)


def process_groups(config: RunConfig, model: ModelSpec, actor: TrainLayout) -> int:
    """Returns the process groups of several ranks that a rank has for the actor, the teacher and the critic.

    A critic in the actor's layout uses the actor's. Illegal layouts of the others count as none; other code reports
    them.
    """
    count = actor_groups(actor, model)
    try:
        teacher = teacher_of(config, lambda path: planning_model_spec(path)[0])
        critic = config.of_critic
        layout = critic and TrainLayout.build(critic.actor.layout, model)
    except MrlError:
        return count
    if teacher is not None:
        count += groups_of(teacher.layout, teacher.model, is_trained=False)
    if layout is not None and layout != actor:
        count += groups_of(layout, replace(model, tie_word_embeddings=False), is_trained=True)
    return count


def actor_groups(layout: TrainLayout, model: ModelSpec) -> int:
    """Returns the process groups of several ranks that a rank has for the actor.

    Besides those of its passes and updates, these are the group of all processes, and one for what routers count.
    """
    routing = model.is_moe and layout.world_size > layout.pipeline
    return groups_of(layout, model, is_trained=True) + (layout.world_size > 1) + routing


def groups_of(layout: TrainLayout, model: ModelSpec, is_trained: bool) -> int:
    """Returns the process groups of several ranks in which a rank of one model meets others.

    The first pipeline stage and the last have one for tied embeddings.
    """
    groups = _PASSES + _UPDATES * is_trained
    if model.is_moe:
        groups += _EXPERT_PASSES + _EXPERT_UPDATES * is_trained
    if is_trained:
        groups += _ALL
    if model.tie_word_embeddings:
        groups += _ENDS
    sizes = layout.dense_sizes._asdict() | layout.expert_sizes._asdict()
    return sum(any(sizes[axis] > 1 for axis in axes) for axes in groups)


def engine_groups(layout: RolloutLayout, is_moe: bool) -> int:
    """Returns the process groups of several workers in which a worker of an engine meets others.

    vLLM makes one for experts wherever a model has some (distributed/parallel_state.py).
    """
    sizes = [layout.tensor, layout.data]
    if is_moe:
        sizes.append(layout.workers_per_engine)
    return sum(size > 1 for size in sizes)


def most_pairs(config: RunConfig) -> int:
    """Returns the pairs at the device with most, if every rank sends to every worker. With many experts nearly each
    does.

    Returns 0 for processes that do not fit on the cluster, which other code reports.
    """
    if config.reshard.path != "fast":
        return 0
    try:
        ranks, workers = _devices(config)
    except MrlError:
        return 0
    return _most_pairs(config.reshard.transport, get_hosting(config.cluster.device).memory_reach, ranks, workers)


@lru_cache(maxsize=64)  # a search of engines asks for few places very often
def _most_pairs(kind: str, reach: MemoryReach, ranks: tuple[DeviceId, ...], workers: tuple[DeviceId, ...]) -> int:
    pairs: Counter[DeviceId] = Counter()
    for these, others in ((ranks, workers), (workers, ranks)):
        nodes = _by_node(others)
        for device, count in Counter(these).items():
            pairs[device] += count * _served(kind, reach, device, nodes)
    return max(pairs.values())


def _devices(config: RunConfig) -> tuple[tuple[DeviceId, ...], tuple[DeviceId, ...]]:
    """Returns the devices of ranks and workers like `rank_devices`, except for the order of workers inside a node.

    That order does not change the counts.
    """
    cluster = cluster_shape(config.cluster)
    world = config.actor.layout.world_size
    first = 0
    if config.cluster.placement != "colocated":
        first = world
    return actor_devices(world, cluster), engine_devices(rollout_layout(config.rollout), cluster, first)


def _by_node(devices: Sequence[DeviceId]) -> dict[int, list[DeviceId]]:
    nodes: dict[int, list[DeviceId]] = defaultdict(list)
    for device in devices:
        nodes[device.node].append(device)
    return nodes


def _served(kind: str, reach: MemoryReach, device: DeviceId, others: Mapping[int, Sequence[DeviceId]]) -> int:
    """Returns how many processes on the other side p2p joins with a process at `device`. `others`: their devices by
    node.
    """
    served = 0
    for node, there in others.items():
        if node == device.node:
            served += sum(pair_route(kind, device, other, reach) == "p2p" for other in there)
        elif pair_route(kind, device, there[0], reach) == "p2p":  # the same for all processes of another node
            served += len(there)
    return served
