"""The phases of a run on one device: the terms of memory in each, whether they fit, the largest one, and its cure."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any

from mrl.errors import ConfigError
from mrl.plan.devices import Device
from mrl.plan.sample_bytes import SampleBytes
from mrl.plan.teacher_costs import TeacherBytes

_MORE_MEMORY = "take nodes with more memory"
_FEWER_SAMPLES = (
    "a smaller data.train_batch_size or rollout.n, or actor.router_replay: disabled where routes are most of it"
)
_SPREAD = "raise expert_model_parallel_size or pipeline_model_parallel_size (tensor_model_parallel_size inside a node)"
_SMALLER_BUDGET = "a smaller reshard.budget_mb"
_APART = "cluster.placement: separate"
ACTOR, ENGINE = HOLDERS = ("actor", "engine")


@dataclass(frozen=True)
class Term:
    """A term of a plan's memory, and what to change where it is the largest. The likeliest help comes first.

    * `holder`: the process that has it on the device.
    * `cure`: the change for the device.
    * `packed_cure`: instead of it, where actor.use_dynamic_bsz packs micro-batches by tokens, not by samples.
    * `host_cure`: the change for a node's host memory.
    """

    name: str
    holder: str = ""
    cure: str = ""
    packed_cure: str = ""
    host_cure: str = ""


_ROWS = (
    Term("parameters", ACTOR, _SPREAD, host_cure=f"switch off actor.param_offload, or {_MORE_MEMORY}"),
    Term("gradients", ACTOR, _SPREAD),
    Term(
        "optimizer",
        ACTOR,
        "take more devices (its shards are divided over data parallelism), or optimizer_cpu_offload in "
        "actor.optim.override_optimizer_config",
        host_cure=f"switch off actor.optimizer_offload, or {_MORE_MEMORY}",
    ),
    Term(
        "optimizer_host",
        host_cure="lower optimizer_offload_fraction in actor.optim.override_optimizer_config, or " + _MORE_MEMORY,
    ),
    Term(
        "activations",
        ACTOR,
        "recompute_granularity: full in model.override_transformer_config, a smaller ppo_micro_batch_size_per_gpu, "
        "or a higher context_parallel_size",
        "recompute_granularity: full in model.override_transformer_config, a smaller ppo_max_token_len_per_gpu, "
        "or a higher context_parallel_size",
    ),
    Term(
        "temporaries",
        ACTOR,
        "a smaller micro-batch, or a higher tensor_model_parallel_size or context_parallel_size",
        "a smaller ppo_max_token_len_per_gpu, or a higher tensor_model_parallel_size or context_parallel_size",
    ),
    Term("log_prob", ACTOR, "a smaller log_prob_micro_batch_size_per_gpu", "a smaller log_prob_max_token_len_per_gpu"),
    Term(
        "reference",
        ACTOR,
        "ref.param_offload: true, or a loss without KL",
        host_cure=f"ref.param_offload: false, or {_MORE_MEMORY}",
    ),
    Term(
        "teacher",
        ACTOR,
        "distillation.teacher_model.param_offload: true, or a distillation.teacher_model.layout that cuts it further",
        host_cure=f"distillation.teacher_model.param_offload: false, or {_MORE_MEMORY}",
    ),
    Term(
        "critic",
        ACTOR,
        "critic.param_offload, critic.grad_offload and critic.optimizer_offload: true, or a critic.layout that cuts it "
        "further",
        host_cure=f"switch off critic.optimizer_offload and critic.param_offload, or {_MORE_MEMORY}",
    ),
    Term("vision_tower", ACTOR, "model.vision: null for data without images"),
    Term(
        "looking",
        ACTOR,
        "a smaller data.max_prompt_length (with tools or agents data.max_response_length, too), or model.vision: null "
        "for data without images",
    ),
    Term("batch", ACTOR, "a smaller data.train_batch_size, or more data parallelism"),
    Term("routes", ACTOR, "actor.router_replay: disabled, a smaller data.train_batch_size, or more data parallelism"),
    Term(
        "engine_weights",
        ENGINE,
        "raise rollout.tensor_model_parallel_size, or rollout.expert_parallel_size with data_parallel_size",
        host_cure=f"{_APART}, or {_MORE_MEMORY}",
    ),
    Term("engine_working_set", ENGINE, "a smaller rollout.max_num_batched_tokens or max_num_seqs"),
    Term("kv_cache", ENGINE, "a smaller rollout.gpu_memory_utilization"),
    Term("engine_asleep", ENGINE, _APART),
    Term("engine_outside", ENGINE, _APART),
    Term("sync_staging", ACTOR, _SMALLER_BUDGET),
    Term("engine_staging", ENGINE, _SMALLER_BUDGET),
    Term("staging", host_cure=_SMALLER_BUDGET),
    Term(
        "save",
        host_cure=f"{_MORE_MEMORY}, or spread the actor over more of them: every checkpoint is written from a copy on "
        "the host",
    ),
    Term("samples", host_cure=_FEWER_SAMPLES),
    Term("features", host_cure=f"a smaller data.train_batch_size, smaller images, or {_MORE_MEMORY}"),
    Term("kept_group", host_cure=_FEWER_SAMPLES),
    Term("tools", host_cure="a smaller rollout.turns.num_workers, max_memory_gib or python.max_memory_gib"),
    Term(
        "object_store",
        host_cure=f"{_FEWER_SAMPLES}; a smaller data.val_max_samples where answers to validation prompts are",
    ),
)
TERMS = {term.name: term for term in _ROWS}

_VALUES = "values"
_CRITIC = "critic"
# phases before the update, in which the actor's parameters are on the device
_LOG_PROBS = ("log_prob", "ref", "teacher", _VALUES, _CRITIC, "rollout_to_log_prob")
_UNTRACKED = ("engine_asleep", "engine_outside")


@dataclass(frozen=True)
class Phase:
    """Bytes on one device during a phase, by term. `device_bytes`: bytes that are available for them."""

    name: str
    terms: dict[str, int]
    device_bytes: int

    @property
    def total(self) -> int:
        """Bytes of all terms together."""
        return sum(self.terms.values())

    @property
    def fits(self) -> bool:
        """Whether the terms fit on the device."""
        return self.total <= self.device_bytes

    @property
    def largest(self) -> str:
        """The name of the largest term."""
        return max(self.terms, key=lambda name: self.terms[name])

    @property
    def cure(self) -> str:
        """What to change when it does not fit; empty when it does."""
        if self.fits:
            return ""
        return TERMS[self.largest].cure

    def to_json(self) -> dict:
        """Returns the phase as plain data."""
        return {
            "terms": self.terms,
            "bytes": self.total,
            "device_bytes": self.device_bytes,
            "fits": self.fits,
            "largest": self.largest,
            "change": self.cure,
        }


@dataclass(frozen=True)
class Offload:
    """What leaves the device while it is not needed, by the keys of `actor`, `ref` and the teacher."""

    parameters: bool = False
    gradients: bool = False
    optimizer: bool = False
    reference: bool = False
    teacher: bool = False


@dataclass(frozen=True)
class CriticBytes:
    """Terms of a critic on the rank of an actor.

    * `batch`: inputs of a micro-batch of its update.
    * `values_batch`: inputs of a micro-batch of a pass for values, and outputs of the pass.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    temporaries: int
    log_prob: int  # what a pass for values takes
    offload: Offload = field(default_factory=Offload)
    optimizer_host: int = 0  # state of an Adam on the host, where it stays
    batch: int = 0
    values_batch: int = 0
    looking: int = 0  # at images, as ActorBytes.looking: its tower is never trained

    @classmethod
    def fullest(cls, stages: Iterable["CriticBytes"]) -> "CriticBytes":
        """Each term of the stage that has most of it; `stages`: at least one, with the same switches."""
        first, *others = stages
        sizes = [each.name for each in fields(cls) if each.name != "offload"]
        return replace(first, **{name: max(getattr(each, name) for each in (first, *others)) for name in sizes})

    @property
    def host(self) -> int:
        """Bytes of host memory for what leaves the device."""
        o = self.offload
        return o.parameters * self.parameters + o.optimizer * self.optimizer + self.optimizer_host

    def at_rest(self, parameters: bool = False) -> int:
        """Returns the bytes that stay on the device between its passes. With `parameters` these are needed there."""
        o = self.offload
        kept = self.parameters * (parameters or not o.parameters)
        return kept + self.gradients * (not o.gradients) + self.optimizer * (not o.optimizer)

    @property
    def whole(self) -> int:
        """Bytes of its state while it is updated."""
        return self.parameters + self.gradients + self.optimizer


@dataclass(frozen=True)
class ScoringBytes:
    """Terms of a pass for log-probs. `batch`: inputs of a micro-batch, and outputs of the pass."""

    log_prob: int
    batch: int = 0
    routes: int = 0


@dataclass(frozen=True)
class ActorBytes:
    """Terms of the fullest pipeline stage of the actor, on one rank."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    temporaries: int
    log_prob: int
    sync_staging: int
    offload: Offload = field(default_factory=Offload)
    reference: int = 0  # parameters of a reference model; 0: there is none
    reference_pass: ScoringBytes | None = None  # by the reference's own limits; None: it is as the actor's
    teacher: TeacherBytes = field(default_factory=TeacherBytes)
    optimizer_host: int = 0  # state of an Adam on the host, where it stays
    scores_old: bool = True  # a pass is made for old log-probs
    scores_base: bool = False  # a reference's pass is the actor's own, with adapters off
    samples: SampleBytes = field(default_factory=SampleBytes)
    critic: CriticBytes | None = None  # beside the actor
    vision_tower: int = 0  # frozen ones; a trained tower is among parameters, gradients and optimizer
    looking: int = 0  # the tower's pass and a micro-batch's features, for log-probs
    looking_in_update: int = 0  # the same with what a trained tower keeps for going backward
    features: int = 0  # of a step's images, on the host

    @property
    def has_reference(self) -> bool:
        """Whether a pass is made for log-probs of a reference."""
        return self.reference > 0 or self.scores_base

    @property
    def host(self) -> dict[str, int]:
        """Bytes of host memory of one rank by term, for what leaves the device. They are kept from the first move
        on.
        """
        o = self.offload
        seen = {"features": self.features} if self.features else {}
        return seen | {
            "parameters": o.parameters * self.parameters,
            "optimizer": o.optimizer * self.optimizer,
            "reference": o.reference * self.reference,
            "teacher": o.teacher * self.teacher.parameters,
            "optimizer_host": self.optimizer_host,
            "critic": self.critic.host if self.critic is not None else 0,
        }


@dataclass(frozen=True)
class EngineBytes:
    """Terms of one engine worker."""

    weights: int
    working_set: int
    cache: int
    sync_staging: int
    asleep: int  # stays on the device while the engine sleeps: graphs, and `outside` without a pass over images
    outside: int = 0  # outside the engine's share: its context, communicators and buffers


@dataclass(frozen=True)
class PhaseBytes:
    """Planned bytes of one device in one phase, for the gate before the next phase.

    * `holders`: bytes of "actor" (a rank's process) and "engine" (a worker's process); 0 for one that has none.
    * `untracked`: bytes of the engine outside any tensor: context, graphs and communicators.
    * `available`: bytes that a plan may fill, without a rank's context and communicators, and the allocator's rest.
    * `host`: host memory of the process of each kind that has most, in every phase from the first save on.
    """

    name: str
    holders: dict[str, int]
    untracked: int
    available: int
    host: dict[str, int]

    @property
    def total(self) -> int:
        """Bytes of all holders together."""
        return sum(self.holders.values())


def phase_bytes(plan: dict[str, Any], name: str) -> PhaseBytes:
    """Returns the planned bytes on the fullest device in phase `name`, by holder. `plan` is a run's plan (plan.json).

    Bytes are those of tensors, and of what an engine has besides. The actor's own context is already taken off
    `available`. The fullest pipeline stage stands for all. On other stages less is held and more is free, with the same
    sum.

    The cpu device has no memory of its own. There `available` is a rank's nominal share of host memory
    (mrl/plan/devices.json). Nothing enforces it: a gate compares what each holder has live with its planned bytes.
    Raises ConfigError for a phase that the plan's placement does not have.
    """
    phases = plan["memory"]["phases"]
    if name not in phases:
        raise ConfigError(f"phase {name}: a plan with placement {plan['layout']['placement']} has {', '.join(phases)}")
    terms = phases[name]["terms"]
    holders = dict.fromkeys(HOLDERS, 0)
    for term, size in terms.items():
        who = TERMS[term].holder
        if who in holders:
            holders[who] += size
    host = plan["memory"]["host"]
    return PhaseBytes(
        name=name,
        holders=holders,
        untracked=sum(terms.get(term, 0) for term in _UNTRACKED),
        available=phases[name]["device_bytes"],
        host={ACTOR: host["bytes_of_a_rank"], ENGINE: host["bytes_of_a_worker"]},
    )


def actor_phases(actor: ActorBytes, device: Device) -> Iterator[Phase]:
    """Yields training, passes for log-probs where a run has them, and sync, on a device of the actor alone."""
    usable = device.usable
    return (Phase(name, terms, usable) for name, terms in _actor_terms(actor))


def engine_phases(engine: EngineBytes, device: Device) -> list[Phase]:
    """Returns generation and sync on a device that only an engine uses."""
    usable = device.usable_by_engine
    outside = _outside(engine)
    syncing = {"engine_weights": engine.weights, "engine_staging": engine.sync_staging}
    return [Phase("rollout", _awake(engine) | outside, usable), Phase("rollout_sync", syncing | outside, usable)]


def colocated_phases(actor: ActorBytes, engine: EngineBytes, device: Device) -> list[Phase]:
    """Returns every phase and every hand-over of a device that actor and engine share in turn.

    The engine sleeps while the actor works. During a sync it has its weights back, but no cache yet. What stays on the
    device during sleep is counted in every phase. Offloaded parameters come back for the sync; offloaded gradients and
    optimizer do not.
    """
    asleep = {"engine_asleep": engine.asleep}
    rest = _at_rest(actor)
    outside = _outside(engine)
    phases = [Phase(name, terms | asleep, device.usable) for name, terms in _actor_terms(actor) if name != "sync"]
    syncing = (
        _at_rest(actor, parameters=True)
        | asleep
        | {
            "engine_weights": engine.weights,
            "sync_staging": actor.sync_staging,
            "engine_staging": engine.sync_staging,
        }
    )
    phases += [
        Phase("train_to_sync", syncing, device.usable),
        Phase("sync_to_rollout", rest | _awake(engine) | outside, device.usable),
        Phase("rollout", rest | _awake(engine) | outside, device.usable),
    ]
    if actor.scores_old or actor.has_reference or actor.teacher.parameters or actor.critic:
        first = _scoring_reference if actor.has_reference and not actor.scores_old else _scoring
        phases.append(Phase("rollout_to_log_prob", first(actor) | asleep, device.usable))
    return phases


def with_optimizer_early(stages: list[list[Phase]], actors: list[ActorBytes]) -> list[list[Phase]]:
    """Returns the phases of a colocated run's stages, with the optimizer coming back during the passes for log-probs.

    The update then need not wait for it. Phases stay as given where it would not fit beside them on every stage.
    """
    early = []
    for phases, actor in zip(stages, actors, strict=True):
        early.append([_with_optimizer(phase, actor) for phase in phases])
    if all(phase.fits for phases in early for phase in phases if phase.name in _LOG_PROBS):
        return early
    return stages


def _with_optimizer(phase: Phase, actor: ActorBytes) -> Phase:
    if phase.name in _LOG_PROBS:
        return replace(phase, terms=phase.terms | {"optimizer": actor.optimizer})
    return phase


def _actor_terms(actor: ActorBytes) -> Iterator[tuple[str, dict[str, int]]]:
    """Yields the name of each phase with its terms. A search stops at the first that does not fit."""
    samples = actor.samples
    yield (
        "train",
        {"parameters": actor.parameters, "gradients": actor.gradients, "optimizer": actor.optimizer}
        | _beside(actor)
        | {"activations": actor.activations, "temporaries": actor.temporaries}
        | _looking(actor.looking_in_update)
        | _samples(samples.update, samples.update_routes + samples.recorded_routes),
    )
    if actor.scores_old:
        yield "log_prob", _scoring(actor)
    yield "sync", _at_rest(actor, parameters=True) | {"sync_staging": actor.sync_staging}
    if actor.has_reference:
        yield "ref", _scoring_reference(actor)
    if actor.teacher.parameters:
        # the teacher's pass, beside the actor's parameters
        teacher = actor.teacher
        passing = {"teacher": teacher.parameters, "log_prob": teacher.log_prob, "batch": teacher.batch}
        yield "teacher", _at_rest(actor, parameters=True) | passing | _looking(teacher.looking)
    if actor.critic is not None:
        yield from _critic_terms(actor, actor.critic).items()


def _critic_terms(actor: ActorBytes, critic: CriticBytes) -> dict[str, dict[str, int]]:
    """Returns the phases in which a critic computes. The actor's parameters stay on the device meanwhile."""
    rest = _at_rest(actor, parameters=True)
    passes = {"activations": critic.activations, "temporaries": critic.temporaries}
    routes = actor.samples.recorded_routes
    return {
        _VALUES: rest
        | {"critic": critic.at_rest(parameters=True), "log_prob": critic.log_prob}
        | _looking(critic.looking)
        | _samples(critic.values_batch, routes),
        _CRITIC: rest | {"critic": critic.whole} | passes | _looking(critic.looking) | _samples(critic.batch, routes),
    }


def _scoring(actor: ActorBytes) -> dict[str, int]:
    """Returns the terms of a pass for old log-probs, and of the hand-over before it."""
    return _pass_of(actor, ScoringBytes(actor.log_prob, actor.samples.log_prob, actor.samples.log_prob_routes))


def _scoring_reference(actor: ActorBytes) -> dict[str, int]:
    """Returns the terms of the reference's pass. Its weights replace the actor's meanwhile."""
    return _scoring(actor) if actor.reference_pass is None else _pass_of(actor, actor.reference_pass)


def _pass_of(actor: ActorBytes, scoring: ScoringBytes) -> dict[str, int]:
    batch = _samples(scoring.batch, scoring.routes + actor.samples.recorded_routes)
    return _at_rest(actor, parameters=True) | {"log_prob": scoring.log_prob} | _looking(actor.looking) | batch


def _samples(batch: int, routes: int) -> dict[str, int]:
    return {name: size for name, size in (("batch", batch), ("routes", routes)) if size}


def _looking(size: int) -> dict[str, int]:
    return {"looking": size} if size else {}


def _beside(actor: ActorBytes) -> dict[str, int]:
    """Returns the vision tower, and the reference model, the teacher and the critic where they stay on the device
    outside their own phases.
    """
    beside = {}
    if actor.vision_tower:
        beside["vision_tower"] = actor.vision_tower
    if actor.reference and not actor.offload.reference:
        beside["reference"] = actor.reference
    if actor.teacher.parameters and not actor.offload.teacher:
        beside["teacher"] = actor.teacher.parameters
    if actor.critic is not None and actor.critic.at_rest():
        beside["critic"] = actor.critic.at_rest()
    return beside


def _at_rest(actor: ActorBytes, parameters: bool = False) -> dict[str, int]:
    """Returns what stays on the device between updates. With `parameters` these are needed there."""
    o = actor.offload
    kept = {
        "parameters": 0 if o.parameters and not parameters else actor.parameters,
        "gradients": 0 if o.gradients else actor.gradients,
        "optimizer": 0 if o.optimizer else actor.optimizer,
    }
    return (
        {name: size for name, size in kept.items() if size}
        | _beside(actor)
        | _samples(0, actor.samples.recorded_routes)
    )


def _outside(engine: EngineBytes) -> dict[str, int]:
    if not engine.outside:
        return {}
    return {"engine_outside": engine.outside}


def _awake(engine: EngineBytes) -> dict[str, int]:
    return {"engine_weights": engine.weights, "engine_working_set": engine.working_set, "kv_cache": engine.cache}
