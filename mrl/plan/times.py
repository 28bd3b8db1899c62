"""Predicted FLOPs and seconds of a step: generation, log-probs and update. Nothing here is measured.

Nothing overlaps, except the exchanges of data parallelism where the configuration says so. A plan and a search predict
a pass of the actor in the same way. They count whole micro-batches on the slowest stage, which compute at an assumed
share of the peak. Every collective is added, and so is the pipeline's bubble.

Volumes a layer and rank, with s tokens and hidden size h:

* Tensor parallelism with sequence parallelism gathers and scatters s h twice (arXiv 2205.05198, section 4.2.2).
* Experts send each token to its top-k experts and back.
* Context parallelism passes keys and values around.
* A pipeline stage sends s h to the next one.

A backward pass moves twice as much as the forward pass, in the same places.
"""

from dataclasses import dataclass, replace
from functools import cache
from math import ceil

from mrl.config.lora_rules import reference_is_the_base
from mrl.config.schema import RunConfig
from mrl.model import ModelSpec, forward_flops_per_token, module_flops_per_token
from mrl.model.adapters import DELTA_INPUTS, Lora, adapted_modules
from mrl.model.computed_sizes import DELTA_CHUNK, delta_float32, delta_of_fla
from mrl.model.layout import TrainLayout
from mrl.model.precision import Precision
from mrl.plan.activations import MicroBatchShape, Recompute
from mrl.plan.devices import Assumptions, Device
from mrl.plan.engine_memory import EngineMemory, cache_bytes_per_token
from mrl.plan.generation_times import generation_seconds
from mrl.plan.model_state import StateBytes, stage_state
from mrl.plan.plan_inputs import BatchPlan, PlanInputs, batch_plan, of_reference, precision_of, recompute_of
from mrl.plan.step_work import Lengths, mean_flops_per_token, mean_lengths
from mrl.plan.teacher_costs import teacher_inputs, teacher_parameters
from mrl.plan.vision_costs import engine_looking_seconds, looking_flops, looking_seconds, looks, rank_looking_flops
from mrl.platforms.layers import has_grouped_product
from mrl.units import round_up

# bytes
_BF16 = 2
_F32 = 4
# Memory traffic a byte of a 16-bit parameter, once a micro-batch: its gradient is written and read, then added in 32.
_GRADIENT_TRAFFIC = 6
# What attention's backward computes, in forward passes: five products of queries and keys where the forward has two
# (arXiv 2307.08691, algorithm 2). Of any other product it is two.
_ATTENTION_BACKWARD = 2.5
# Kernel launches of mrl's gated delta layer for one chunk of the longest sequence, forward and backward
# (mrl/rank/gated_delta.py, _stepwise).
_DELTA_STEP = (12, 16)
_LAUNCHES = 30  # kernel launches of a dense layer in a forward pass
_GROUPED_PRODUCTS = 2  # of a layer of experts in a forward pass: gate and up in one, down
# modules that share an input
_QKV = ("q_proj", "k_proj", "v_proj")
_LATENT = (("q_proj",), ("q_a_proj",), ("q_b_proj",), ("kv_a_proj_with_mqa",), ("kv_b_proj",))  # no two in one layer
_OUT = ("o_proj",)
_OUT_OF_DELTA = ("out_proj",)
_GATED = ("gate_proj", "up_proj")
_DOWN = ("down_proj",)


# ---------------------------------------------------------------- passes


@dataclass(frozen=True)
class Passes:
    """How many forward passes each part of a pass costs."""

    compute: float = 1.0
    experts: float = 1.0  # sending tokens to experts and back
    others: float = 1.0  # all other exchanges
    backwards: int = 0  # backward passes among them, each of which counts as two above


def update_passes(recompute: Recompute, again: float = 0.0) -> Passes:
    """Returns the passes of an update: the forward, the backward as two, and what the backward recomputes.

    `again` comes from `share_again`. A recomputed mixture of experts sends its tokens again.
    """
    match recompute.granularity:
        case None:
            return Passes(3, 3, 3, 1)
        case "full":
            return Passes(4, 4, 4, 1)
    return Passes(3 + again, 3 + ("moe" in recompute.modules), 3, 1)


def share_again(recompute: Recompute, model: ModelSpec, flops_per_token: float) -> float:
    """Returns the share of a forward pass that selective recomputation computes twice, counted in matrix products.

    `flops_per_token` are those of the forward pass. Full recomputation gives 1, none gives 0.
    """
    if recompute.granularity != "selective":
        return float(recompute.granularity == "full")
    products = dict(module_flops_per_token(model, 0))
    products["core_attn"] = flops_per_token - forward_flops_per_token(model, 0)
    named = set(recompute.modules)
    if "moe" in named:
        named.discard("shared_experts")
    return sum(products.get(name, 0.0) for name in named) / flops_per_token


@dataclass(frozen=True)
class Overlap:
    """The exchanges of data parallelism that run beside computing (mrl/rank/overlap.py)."""

    gradients: bool = False  # beside the backward of the last micro-batch
    weights: float = 0.0  # share of the updates whose gather runs beside the next forward: all but a step's last


def overlap_of(config: RunConfig, updates: int) -> Overlap:
    """Returns what `actor.override_ddp_config` overlaps, for steps of so many updates."""
    given = config.actor.override_ddp_config
    beside = 0.0
    if given.get("overlap_param_gather"):
        beside = (updates - 1) / updates
    return Overlap(bool(given.get("overlap_grad_reduce")), beside)


def pipeline_slots(layout: TrainLayout, micro_batches: int) -> tuple[int, int]:
    """Returns the slots that a pipeline stage waits, and those that it works.

    They are p - 1 and v m (Narayanan et al., arXiv 2104.04473, section 2.2).
    """
    return layout.pipeline - 1, layout.virtual_pipeline * micro_batches


# ---------------------------------------------------------------- a step of a configuration


def step_flops(inputs: PlanInputs, batch: BatchPlan) -> dict[str, float]:
    """Returns the floating-point operations of each phase of one step, over all devices.

    Log-probs are there where a pass is made for old ones, and those of a reference where there is one.
    """
    lengths = mean_lengths(inputs.config, inputs.assumptions)
    forward = batch.samples * lengths.total * mean_flops_per_token(inputs.model, lengths)
    scored = {}
    if not inputs.config.algorithm.on_policy:
        scored = {"log_prob": forward}
    if inputs.config.algorithm.needs_reference:
        scored["ref"] = forward
    recompute = recompute_of(inputs.config)
    again = share_again(recompute, inputs.model, mean_flops_per_token(inputs.model, lengths))
    update = forward * update_passes(recompute, again).compute
    critic = {}
    if inputs.critic is not None:
        critic = {"values": forward, "critic": update * inputs.critic.config.actor.ppo_epochs}
    if teacher := teacher_inputs(inputs):
        scored["teacher"] = batch.samples * lengths.total * mean_flops_per_token(teacher.model, lengths)
    return _with_images(inputs, batch, scored | critic | {"update": update * batch.epochs, "generation": forward})


def _with_images(inputs: PlanInputs, batch: BatchPlan, flops: dict[str, float]) -> dict[str, float]:
    """Adds the vision tower's passes, of engines and of ranks."""
    looking = looking_flops(inputs, batch)
    if not looking:
        return flops
    of_ranks = rank_looking_flops(inputs, batch)
    added = {phase: count * of_ranks for phase, count in looks(inputs, batch).items()} | {"generation": looking}
    return flops | {phase: flops[phase] + more for phase, more in added.items()}


def phase_seconds(inputs: PlanInputs, batch: BatchPlan, engine: EngineMemory) -> dict[str, float]:
    """Predicts the seconds of each phase of a step.

    Log-probs, the reference, the teacher and the critic are there where a run has such passes. The rest is what the
    host does, and moving the actor to the host and back.
    """
    return {"generation": engine_seconds(inputs, batch, engine), **rank_seconds(inputs, batch)}


def engine_seconds(inputs: PlanInputs, batch: BatchPlan, engine: EngineMemory) -> float:
    """Predicts the seconds of a step's generation, with what engines look at."""
    seconds = generation_seconds(inputs, batch, engine)
    if inputs.tower is not None:
        seconds += engine_looking_seconds(inputs, batch)
    return _corrected(inputs, {"generation": seconds})["generation"]


def rank_seconds(inputs: PlanInputs, batch: BatchPlan) -> dict[str, float]:
    """Predicts the seconds of each phase of a step but generation."""
    log_probs, update = actor_seconds(inputs, batch)
    seconds = {
        **({} if inputs.config.algorithm.on_policy else {"log_prob": log_probs.total}),
        **reference_seconds(inputs),
        **teacher_seconds(inputs),
        **critic_seconds(inputs),
        "update": update.total * batch.updates,
        "rest": inputs.assumptions.rest + hand_over_seconds(inputs) * inputs.colocated,
    }
    if inputs.tower is not None:
        for phase, count in looks(inputs, batch).items():
            seconds[phase] += count * looking_seconds(inputs, batch)
    return _corrected(inputs, seconds)


def _corrected(inputs: PlanInputs, seconds: dict[str, float]) -> dict[str, float]:
    measured = inputs.assumptions.measured
    return measured.corrected(seconds) if measured else seconds


def reference_seconds(inputs: PlanInputs) -> dict[str, float]:
    """Predicts the pass of a KL term's reference model over a step; empty without one.

    A reference on the host changes places with the actor's weights before the pass and after it.
    """
    if not inputs.config.algorithm.needs_reference:
        return {}
    config = of_reference(inputs.config)
    batch = batch_plan(config, inputs.train)
    work = sample_work(config, inputs.model, batch.log_prob_micro, batch.samples, inputs.assumptions)
    per_node = config.cluster.n_gpus_per_node
    seconds = pass_seconds(work, inputs.train, inputs.device, per_node, Passes(), inputs.assumptions).total
    if config.ref.param_offload and not reference_is_the_base(inputs.config):
        like = Precision(inputs.element_bytes)
        moved = max(stage_state(inputs.model, inputs.train, pp, like).parameters for pp in range(inputs.train.pipeline))
        seconds += 2 * 2 * moved / host_path_rate(inputs)  # both models, there and back
    return {"ref": seconds}


def teacher_seconds(inputs: PlanInputs) -> dict[str, float]:
    """Predicts the teacher's pass over a step, and its return from the host; empty without a teacher.

    Its weights are frozen, so the host has them already when they leave.
    """
    teacher = teacher_inputs(inputs)
    if teacher is None:
        return {}
    batch = batch_plan(teacher.config, teacher.train)
    work = sample_work(teacher.config, teacher.model, batch.log_prob_micro, batch.samples, teacher.assumptions)
    per_node = inputs.config.cluster.n_gpus_per_node
    passed = pass_seconds(work, teacher.train, inputs.device, per_node, Passes(), inputs.assumptions)
    moved = teacher_parameters(teacher) * inputs.config.distillation.teacher_model.param_offload
    return {"teacher": passed.total + moved / host_path_rate(inputs)}


def critic_seconds(inputs: PlanInputs) -> dict[str, float]:
    """Predicts a critic's values and updates, with its moves between device and host; empty without a critic.

    What leaves the device does so after each of them. Its passes count as the actor's, but for logits, which it lacks.
    """
    if inputs.critic is None:
        return {}
    critic = replace(inputs.critic, assumptions=replace(inputs.assumptions, logit_passes=0.0))
    batch = batch_plan(critic.config, critic.train)
    values, update = actor_seconds(critic, batch)
    actor = critic.config.actor
    precision = precision_of(critic.config, critic.element_bytes)
    stages = range(critic.train.pipeline)
    states = [stage_state(critic.model, critic.train, pp, precision, is_critic=True) for pp in stages]
    parameters = max(state.parameters for state in states) * actor.param_offload
    optimizer = max(state.optimizer for state in states) * actor.optimizer_offload
    rate = host_path_rate(critic)
    return {
        "values": values.total + 2 * parameters / rate,
        "critic": update.total * batch.updates + 2 * (parameters + optimizer) / rate,
    }


def hand_over_seconds(inputs: PlanInputs) -> float:
    """Predicts the actor's moves to the host and back, once a step, for engines on the same device.

    The host has frozen parameters already when they leave.
    """
    actor = inputs.config.actor
    model = inputs.model.holding(actor.mtp.train)
    states = (
        stage_state(model, inputs.train, pp, precision_of(inputs.config, inputs.element_bytes), lora=inputs.lora)
        for pp in range(inputs.train.pipeline)
    )
    moved = max(
        (s.parameters + s.trained) * actor.param_offload + 2 * s.optimizer * actor.optimizer_offload for s in states
    )
    return moved / host_path_rate(inputs)


def host_path_rate(inputs: PlanInputs) -> float:
    """Returns the bytes per second between a device and its host."""
    return inputs.device.host_path_rate * inputs.assumptions.host_path_share


def actor_seconds(inputs: PlanInputs, batch: BatchPlan) -> tuple["PassSeconds", "PassSeconds"]:
    """Predicts a pass of log-probs over a step, and one update."""
    train = inputs.train
    device = inputs.device
    recompute = recompute_of(inputs.config)
    per_node = inputs.config.cluster.n_gpus_per_node
    model = inputs.model.holding(inputs.config.actor.mtp.train)
    states = (
        stage_state(model, train, pp, precision_of(inputs.config, inputs.element_bytes), lora=inputs.lora)
        for pp in range(train.pipeline)
    )
    state = max(states, key=lambda s: s.parameters + s.gradients + s.optimizer)
    scored = sample_work(inputs.config, inputs.model, batch.log_prob_micro, batch.samples, inputs.assumptions)
    updated = sample_work(
        inputs.config, inputs.model, batch.micro, batch.samples // batch.mini_batches, inputs.assumptions
    )
    updated = replace(updated, predicting=model.predicting_layers)
    return (
        pass_seconds(scored, train, device, per_node, Passes(), inputs.assumptions),
        update_seconds(
            updated,
            train,
            device,
            per_node,
            state,
            recompute,
            inputs.assumptions,
            overlap_of(inputs.config, batch.updates),
        ),
    )


# ---------------------------------------------------------------- passes of the actor in a layout


@dataclass(frozen=True)
class PassWork:
    """The work of passes over samples, in any layout."""

    model: ModelSpec
    micro: MicroBatchShape  # of one data-parallel replica
    tokens: float  # of all samples
    flops_per_token: float  # of a forward pass
    once_a_node: bool = False  # DeepEP or HybridEP send a token to each node once
    lora: Lora | None = None  # trained adapters
    longest: float = 0.0  # tokens of a sample, which gated delta layers of torch pass chunk by chunk
    grouped_gemm: str = "cublas"  # model.grouped_gemm
    gated_delta: str = "torch"  # model.gated_delta
    measured: Lengths | None = None  # mean tokens as runs had them: micro-batches then have their mean size
    packs: bool = False  # micro-batches are filled by tokens, not by samples
    predicting: int = 0  # layers that the last stage trains behind the output layer, each with logits of its own

    @property
    def predicted_share(self) -> float:
        """Share of the tokens whose log-prob is computed."""
        return self.micro.response / self.micro.length

    def on_average(self, layout: TrainLayout) -> "PassWork":
        """Returns the work in micro-batches of mean size instead of full ones, where lengths were measured.

        Samples fill a micro-batch up to its tokens, or it has `rows` of them.
        """
        lengths = self.measured
        if lengths is None:
            return self
        of_a_replica = self.tokens / layout.data
        samples = of_a_replica / lengths.total
        count = max(1, ceil(of_a_replica / self.micro.tokens if self.packs else samples / self.micro.rows))
        if layout.virtual_pipeline > 1:
            count = round_up(count, layout.pipeline)
        tokens = max(1, ceil(of_a_replica / count))
        response = round(tokens * lengths.response / lengths.total)
        return replace(self, micro=replace(self.micro, rows=1, length=tokens, response=response), measured=None)


def sample_work(
    config: RunConfig, model: ModelSpec, micro: MicroBatchShape, samples: int, assumed: Assumptions
) -> PassWork:
    """Returns the work of `samples` samples of mean length."""
    lengths = mean_lengths(config, assumed)
    once = config.model.override_transformer_config.get("moe_token_dispatcher_type") == "flex"
    flops = mean_flops_per_token(model, lengths)
    kernels = {"grouped_gemm": config.model.grouped_gemm, "gated_delta": config.model.gated_delta}
    tokens = samples * lengths.total
    packs = config.actor.use_dynamic_bsz and config.actor.ppo_max_token_len_per_gpu is not None
    is_measured = assumed.measured is not None and assumed.measured.lengths is not None
    return PassWork(
        model,
        micro,
        tokens,
        flops,
        once,
        config.actor.lora.adapters,
        lengths.total,
        **kernels,
        measured=lengths if is_measured else None,
        packs=packs,
    )


@dataclass(frozen=True)
class PassSeconds:
    """Seconds of a pass on the slowest stage."""

    compute: float
    tensor: float
    expert: float
    context: float
    pipeline: float  # sending between stages
    data: float  # gradients and parameters over data parallelism, without the part beside computing
    bubble: float

    @property
    def total(self) -> float:
        """Seconds, the pipeline's bubble included."""
        return self.compute + self.tensor + self.expert + self.context + self.pipeline + self.data + self.bubble

    @property
    def bubble_share(self) -> float:
        """Share of the passes in which a pipeline stage waits."""
        return self.bubble / (self.total - self.data)


def update_seconds(
    work: PassWork,
    layout: TrainLayout,
    device: Device,
    per_node: int,
    state: StateBytes,
    recompute: Recompute,
    assumed: Assumptions,
    overlap: Overlap = Overlap(),
) -> PassSeconds:
    """Predicts one update: forward and backward passes, and the exchanges of data parallelism at its end.

    Exchanges that run beside the passes are subtracted.
    """
    work = work.on_average(layout)
    passes = update_passes(recompute, share_again(recompute, work.model, work.flops_per_token))
    added = _GRADIENT_TRAFFIC * state.trained / (device.memory_rate * assumed.decode_memory_share)
    seconds = pass_seconds(work, layout, device, per_node, passes, assumed, added)
    reduced, gathered = _data_seconds(layout, state, _Links(device, per_node, assumed.link_share))
    forward = (seconds.total - seconds.bubble) / micro_batch_count(work, layout) / passes.compute
    hidden = _hidden(overlap, reduced, gathered, forward, forward * (passes.compute - 1))
    return replace(seconds, data=reduced + gathered - hidden)


def _hidden(overlap: Overlap, reduced: float, gathered: float, forward: float, backward: float) -> float:
    """Returns the seconds of an update's exchanges that run beside one micro-batch's computing, as a mean over
    updates.
    """
    return overlap.gradients * min(reduced, backward) + overlap.weights * min(gathered, forward)


def pass_seconds(
    work: PassWork,
    layout: TrainLayout,
    device: Device,
    per_node: int,
    passes: Passes,
    assumed: Assumptions,
    fixed: float = 0.0,
) -> PassSeconds:
    """Predicts a pass as the sum of one rank's micro-batches. The stage with the most layers sets the pace.

    Each micro-batch takes `passes` forward passes and `fixed` seconds.
    """
    work = work.on_average(layout)
    count = micro_batch_count(work, layout)
    *others, last = map(sum, layout.chunk_layers)
    layers = max([*others, last + work.predicting])
    compute = count * (fixed + _computing(work, layout, device, passes, assumed))
    links = _Links(device, per_node, assumed.link_share)
    volumes = _volumes(work, layout, layers)
    tensor, context, pipeline = (
        count * passes.others * volumes[name] / links.rate(size)
        for name, size in (
            ("tensor", layout.tensor),
            ("context", layout.tensor * layout.context),
            ("pipeline", layout.world_size),
        )
    )
    repeated = count * passes.experts * assumed.expert_load_in(layout)
    expert = repeated * _expert_seconds(work, layout, volumes["expert"], links)
    waiting, working = pipeline_slots(layout, count)
    bubble = (compute + tensor + expert + context + pipeline) * waiting / working
    return PassSeconds(compute, tensor, expert, context, pipeline, 0.0, bubble)


def micro_batch_count(work: PassWork, layout: TrainLayout) -> int:
    """Returns the micro-batches of one rank; with virtual stages a multiple of the stages."""
    count = max(1, -(-int(work.tokens) // (work.micro.tokens * layout.data)))
    if layout.virtual_pipeline > 1:
        return round_up(count, layout.pipeline)
    return count


def _computing(work: PassWork, layout: TrainLayout, device: Device, passes: Passes, assumed: Assumptions) -> float:
    """Predicts one micro-batch on the slowest stage. The last one has the output layer, which recomputes by itself.

    These are matrix products and the memory traffic between them. The busiest expert rank has more of both than the
    mean. Where the host's launches take longer, they count instead; on a CPU, which computes itself, they add to it.
    Only tokens whose log-prob is computed have logits.
    """
    m = work.model
    load = assumed.expert_load_in(layout)
    tokens = work.micro.tokens / (layout.tensor * layout.context)
    products = tokens / (device.flops * assumed.compute_share)
    through = tokens / (device.memory_rate * assumed.decode_memory_share)
    experts = module_flops_per_token(m, 0)["moe"]
    head = 2.0 * m.hidden_size * m.vocab_size
    attention = work.flops_per_token - forward_flops_per_token(m, 0)
    beside, inside = _traffic(m, layout.expert_tensor, work.gated_delta)
    body = products * (passes.compute * (work.flops_per_token - head) + (load - 1) * passes.experts * experts)
    body += products * passes.backwards * (_ATTENTION_BACKWARD - 2) * attention
    body += through * (passes.others * beside + load * passes.experts * inside)
    output = (
        min(passes.others, 3)
        * work.predicted_share
        * (
            products * head * assumed.compute_share / assumed.head_share
            + through * assumed.logit_passes * _F32 * m.vocab_size
        )
    )
    stages = [sum(chunks) for chunks in layout.chunk_layers]
    launch = _layer_launches(work, layout, passes, assumed)
    single = passes.others * adapter_launches(work, layout, device) + delta_launches(work, passes)
    launch = (device.own_host or 1.0) * assumed.host * (launch + single * assumed.dense_launch / _LAUNCHES)

    def together(computed: float, launched: float) -> float:
        return computed + launched if device.own_host else max(computed, launched)

    seconds = [together(body * layers / m.num_layers, layers * launch) for layers in stages]
    # a predicting layer joins two states into one, and is never recomputed as a whole
    backward = 3 / passes.compute  # share of the passes that are no recomputation
    joined = products * 3 * 4.0 * m.hidden_size**2
    output += work.predicting * (together(body / m.num_layers, launch) * backward + joined + output)
    if len(seconds) > 1:
        return max(*seconds[:-1], seconds[-1] + output)
    return seconds[0] + output


def _layer_launches(work: PassWork, layout: TrainLayout, passes: Passes, assumed: Assumptions) -> float:
    """Returns the host's least seconds for one layer in all `passes`.

    A backward launches `backward_launches` times what a forward does. In it each grouped product becomes two: of its
    input's gradient, and of its weights' unless they are frozen. Only the latter are products of single experts where
    CUTLASS has the others.
    """
    forwards = passes.others - 2 * passes.backwards
    if not work.model.is_moe:
        return assumed.dense_launch * (forwards + passes.backwards * assumed.backward_launches)
    with_experts = passes.experts - 2 * passes.backwards  # a forward that recomputes experts alone has nothing else
    of_weights = passes.backwards * (work.lora is None)
    backward, products = assumed.backward_launches, with_experts + passes.backwards + of_weights
    if work.grouped_gemm == "cutlass":
        backward, products = min(backward, assumed.backward_launches_grouped), of_weights
    launches = forwards * assumed.dense_launch + with_experts * (assumed.moe_launch - assumed.dense_launch)
    launches += passes.backwards * backward * assumed.moe_launch
    experts = work.model.num_experts // layout.expert
    return launches + products * _GROUPED_PRODUCTS * experts * assumed.expert_launch


def delta_launches(work: PassWork, passes: Passes) -> float:
    """Returns the kernel launches that a layer has on average for passing states from chunk to chunk, in all `passes`.

    Sequences of a micro-batch pass together, so the longest one counts. flash-linear-attention has one kernel for it.
    """
    if work.gated_delta == "fla" or not work.model.is_hybrid:
        return 0.0
    steps = -(-work.longest // DELTA_CHUNK)
    forward, backward = _DELTA_STEP
    forwards = passes.others - 2 * passes.backwards
    share = len(work.model.linear_layers) / work.model.num_layers
    return share * steps * (forwards * forward + passes.backwards * backward)


def adapter_launches(work: PassWork, layout: TrainLayout, device: Device) -> int:
    """Returns the kernel launches of a layer's adapters in a forward pass.

    Modules that share an input join their factors A. Each pair has two products and a scale, and its result is placed.
    All together add a norm, or the experts' ends and a sum. Where torch has no product of several experts, each expert
    has products of its own.
    """
    if work.lora is None:
        return 0
    experts = 1
    if work.model.is_moe and not has_grouped_product(device.platform, _BF16):
        experts = work.model.num_experts // layout.expert
    total = 0
    attention: tuple[tuple[str, ...], ...] = (_QKV,)
    if work.model.is_latent:
        attention = _LATENT
    out = _OUT
    if work.model.is_hybrid:  # most layers
        attention = DELTA_INPUTS
        out = _OUT_OF_DELTA
    found = set(adapted_modules(work.model, work.lora))
    for names, copies in (
        *((names, 1) for names in (*attention, out)),
        (_GATED, experts),
        (_DOWN, experts),
    ):
        targets = len(found.intersection(names))
        if targets:
            total += copies * (targets + 2 + 2 * (targets > 1)) + 2
    return total


@cache
def _traffic(m: ModelSpec, expert_tensor: int, gated_delta: str) -> tuple[float, float]:
    """Returns the bytes that a token moves through memory in a forward pass: beside experts, and in experts.

    Reads and writes of what layers store separately are counted. Norms and residuals are sixteen times the hidden size.
    Queries, keys, values and attention's output count six times. Results of gated delta layers are written and
    read. Tokens of an expert are sorted, read, written and put back. The halves of its gate are written and read.
    """
    heads = (2 * m.num_attention_heads + 2 * m.num_key_value_heads) * m.head_dim
    attending = m.attending_layers * 6 * heads
    chunks = delta_float32(m) * _F32
    if gated_delta == "fla":
        chunks = delta_of_fla(m) * _BF16
    linear = len(m.linear_layers) * (3 * m.linear_channels + 2 * chunks // _BF16)
    sparse = len(m.moe_layers)
    dense = (m.num_layers - sparse) * 6 * m.intermediate_size
    beside = _BF16 * (m.num_layers * 16 * m.hidden_size + attending + linear + dense)
    inside = 0
    if m.is_moe:
        width = expert_tensor * m.hidden_size + m.moe_intermediate_size
        inside = sparse * m.num_experts_per_tok * 6 * width
    return float(beside), float(_BF16 * inside)


@dataclass(frozen=True)
class _Links:
    device: Device
    per_node: int
    share: float

    def rate(self, group: int) -> float:
        """Returns the bytes per second inside a group of consecutive ranks: the node's link while the group fits in
        one.
        """
        return self.share * (self.device.node_rate if group <= self.per_node else self.device.network_rate)


def _volumes(work: PassWork, layout: TrainLayout, layers: int) -> dict[str, float]:
    """Returns the bytes that a rank sends in the forward pass of one micro-batch through its stage."""
    m = work.model
    tokens = work.micro.tokens / layout.context
    hidden = tokens * m.hidden_size * _BF16
    sharded = hidden / layout.tensor
    has_dense_layers = len(m.moe_layers) < m.num_layers
    kv_of_a_layer = cache_bytes_per_token(m, layout.tensor, _BF16) // m.num_layers
    return {
        "tensor": layers * (4 if has_dense_layers else 2) * hidden * (layout.tensor - 1) / layout.tensor,
        "expert": layers * m.is_moe * 2 * sharded,  # for one expert of each token
        "context": layers * tokens * kv_of_a_layer * (layout.context - 1),
        "pipeline": sharded * layout.virtual_pipeline * (layout.pipeline > 1),
    }


def _expert_seconds(work: PassWork, layout: TrainLayout, nbytes: float, links: _Links) -> float:
    """Predicts the time to send each token to its experts and back. `nbytes` are those for one expert of each token.

    Traffic inside a node overlaps with traffic between nodes. DeepEP and HybridEP send a token to another node once,
    however many of its experts are there.
    """
    size = layout.expert * layout.expert_tensor
    chosen = work.model.num_experts_per_tok
    here = min(size, links.per_node)
    slices = layout.expert_tensor - 1  # a sliced expert's tokens are gathered on all ranks that have a part of it
    inside = chosen * ((here - 1) / size + slices) * nbytes / links.rate(here)
    if size == here:
        return inside
    others = size / here - 1
    copies = others * (1 - (1 - here / size) ** chosen) if work.once_a_node else chosen * (1 - here / size)
    return max(inside, copies * nbytes / links.rate(size))


def _data_seconds(layout: TrainLayout, state: StateBytes, links: _Links) -> tuple[float, float]:
    """Predicts the reduce-scatter of the gradients and the all-gather of the trained parameters, once an update."""
    ranks = layout.data * layout.context
    if ranks == 1:
        return 0.0, 0.0
    leaving = (ranks - 1) / ranks  # share of evenly spread data that leaves a rank
    share = leaving / links.rate(layout.tensor * ranks)
    return state.gradients * share, state.trained * share
