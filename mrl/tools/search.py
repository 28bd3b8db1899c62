"""Finds layouts that fit: tries every legal combination of degrees on so many devices, and orders them by predicted
speed.

Degrees are all divisors of the world size. Pipeline stages are split evenly, counting the embedding, the loss, both or
neither. These splits follow from flags; explicit lists of layers would be endless. A combination is skipped without
further analysis only if parameters, gradients and optimizer alone are too large.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from typing import Any

from mrl.config.family_rules import cuts_context
from mrl.errors import ConfigError
from mrl.model import ModelSpec
from mrl.model.adapters import Lora
from mrl.model.layout import TrainLayout, is_legal_layout
from mrl.model.precision import BF16, Precision
from mrl.model.quantised_shards import ranks_fault
from mrl.plan.activations import Activations, MicroBatchShape, Recompute
from mrl.plan.devices import USUAL, Assumptions, Device
from mrl.plan.fit import error_of
from mrl.plan.memory_phases import ActorBytes, Offload, Phase, actor_phases
from mrl.plan.model_state import StateBytes, layer_kinds, layers_alike, stage_state
from mrl.plan.plan_inputs import actor_groups
from mrl.plan.times import Overlap, PassSeconds, PassWork, micro_batch_count, update_seconds
from mrl.platforms.hosting import get_hosting
from mrl.platforms.versions import MEGATRON, release_of, shares_key_value_heads
from mrl.reshard.plan import no_collection
from mrl.units import GIB

# cheaper ways first; the plan counts matrix products alone, so that norms and activations cost it nothing
_RECOMPUTE_EXPERTS = (
    Recompute(),
    Recompute("selective", modules=("layernorm", "moe_act")),
    Recompute("selective", modules=("moe",)),
    Recompute("full"),
)
_RECOMPUTE_DENSE = (Recompute(), Recompute("selective", modules=("mlp",)), Recompute("full"))
_NOTATIONS = tuple(
    {"account_for_embedding_in_pipeline_split": embedding, "account_for_loss_in_pipeline_split": loss}
    for embedding, loss in product((False, True), repeat=2)
)
_TP = "tensor_model_parallel_size"
_PP = "pipeline_model_parallel_size"
_VPP = "virtual_pipeline_model_parallel_size"
_CP = "context_parallel_size"
_EP = "expert_model_parallel_size"
_ETP = "expert_tensor_parallel_size"


@dataclass(frozen=True)
class SearchProblem:
    """The problem to solve. `per_node`: devices of a node."""

    work: PassWork
    device: Device
    devices: int
    per_node: int
    sync_staging: int
    megatron: str  # version of megatron-core
    assumptions: Assumptions = USUAL
    precision: Precision = BF16
    micro_of: Callable[[TrainLayout], MicroBatchShape] | None = None  # None: that of `work` in every layout
    offload: Offload = field(default_factory=Offload)  # what the actor keeps on the host
    scores_old: bool = True  # old log-probs need a pass
    overlap: Overlap = field(default_factory=Overlap)
    lora: Lora | None = None  # adapters that are trained instead of the weights
    dropout: bool = False  # of the adapters' inputs
    fp8_block: int = 0  # rows and columns of blocks that no rank may cut, see ranks_block
    ways: tuple[Recompute, ...] = ()  # of recomputation, the cheapest first; empty: those that a model usually has
    # of layouts that were analysed, whose layers others have, too
    activations: dict[tuple, Activations] = field(default_factory=dict, compare=False, repr=False)

    @property
    def model(self) -> ModelSpec:
        return self.work.model

    @property
    def recomputes(self) -> tuple[Recompute, ...]:
        """The ways of recomputation that are tried, the cheapest first."""
        return self.ways or recomputes(self.model)

    def state(self, layout: TrainLayout, pp: int) -> StateBytes:
        """Returns the bytes of a rank of pipeline stage `pp`, with a predicting layer that is trained along."""
        trained = self.model.with_predicting(self.work.predicting)
        return stage_state(trained, layout, pp, self.precision, lora=self.lora)

    def device_in(self, layout: TrainLayout) -> Device:
        """Returns the device with the communicators of a layout's process groups."""
        return _with_communicators(self.device, actor_groups(layout, self.model))

    def work_in(self, layout: TrainLayout) -> PassWork:
        """Returns the work with a layout's micro-batches. Budgets of a device grow with context parallelism."""
        if self.micro_of is None:
            return self.work
        return replace(self.work, micro=self.micro_of(layout))


@cache
def _with_communicators(device: Device, groups: int) -> Device:
    return replace(device, communicators_of_ranks=device.group * groups)


@dataclass(frozen=True)
class Candidate:
    """A layout that fits, with the cheapest recomputation with which it does."""

    degrees: dict[str, Any]  # keys of actor.layout that differ from their defaults
    layout: TrainLayout
    recompute: Recompute
    phase: Phase  # the fullest
    seconds: PassSeconds
    micro_batches: int

    @property
    def order(self) -> tuple:
        """Sort key: faster first, then more free memory, then fewer splits of the model."""
        return (
            self.seconds.total,
            self.phase.total,
            tuple(str(self.degrees.get(key, "")) for key in (_TP, _PP, _VPP, _CP, _EP, _ETP, *_NOTATIONS[0])),
        )

    @property
    def bubble(self) -> float:
        """The pipeline bubble's share of the update."""
        return self.seconds.bubble / self.seconds.total

    def reasons(self, per_node: int) -> str:
        """Explains the rank of the layout in one line."""
        s = self.seconds
        layout = self.layout
        costs = {"tensor": s.tensor, "expert": s.expert, "context": s.context, "bubble": s.bubble, "data": s.data}
        worst = max(costs, key=lambda name: costs[name])
        where = "across nodes"
        if layout.tensor <= per_node:
            where = "inside a node"
        experts = layout.expert * layout.expert_tensor
        spread = ""
        if experts > 1:
            spread = f"; experts {'inside a node' if experts <= per_node else 'across nodes'}"
        text = (
            f"{self.phase.total / GIB:.1f} of {self.phase.device_bytes / GIB:.1f} GiB in {self.phase.name}, "
            f"most {self.phase.largest}"
        )
        share = f"computing {s.compute / s.total:.0%} of the update, then {worst} {costs[worst] / s.total:.0%}"
        return f"{text}; {share}; tensor {where}{spread}; recompute {self.recompute}"


@dataclass(frozen=True)
class SearchResult:
    """All layouts that fit, best first; the number of legal ones; and the main reasons against the others.

    `near`: where none fits, those that lack less than the plan may be wrong by.
    """

    fitting: tuple[Candidate, ...]
    legal: int
    too_large: Counter[str]
    near: int = 0


@no_collection()
def search(problem: SearchProblem, tell: Callable[[int, int], None] | None = None) -> SearchResult:
    """Analyses every legal layout. `tell` is called before each, with the numbers of layouts so far and of fitting
    ones.
    """
    fitting = []
    too_large = Counter()
    legal = near = 0
    for degrees, layout in legal_layouts(problem):
        if tell is not None:
            tell(legal, len(fitting))
        legal += 1
        best = best_fit(problem, degrees, layout)
        if isinstance(best, Candidate):
            fitting.append(best)
        else:
            too_large[best.largest] += 1
            near += not fitting and _is_near(best)
    return SearchResult(tuple(sorted(fitting, key=lambda c: c.order)), legal, too_large, 0 if fitting else near)


def _is_near(phase: Phase) -> bool:
    """Whether a phase that is too large lacks less than the plan may be wrong by. Weights alone say nothing of it."""
    return "activations" in phase.terms and phase.total - error_of(phase.terms) <= phase.device_bytes


def first_fit(problem: SearchProblem) -> Candidate | None:
    """Returns any layout that fits, or None: sooner than all of them."""
    for degrees, layout in legal_layouts(problem):
        found = best_fit(problem, degrees, layout)
        if isinstance(found, Candidate):
            return found
    return None


def legal_layouts(problem: SearchProblem) -> Iterator[tuple[dict[str, Any], TrainLayout]]:
    """Yields each legal layout once. If two notations split the layers equally, the first is used."""
    seen: set[TrainLayout] = set()
    for degrees, layout in _legal(problem):
        if layout not in seen:
            seen.add(layout)
            kept = {key for key, value in degrees.items() if value is True or value not in (None, False, 1)}
            yield {key: value for key, value in degrees.items() if key in kept or key == "world_size"}, layout


def _legal(problem: SearchProblem) -> Iterator[tuple[dict[str, Any], TrainLayout]]:
    """Yields legal layouts. No rule connects the split of dense weights with that of experts, so both are checked
    separately and then combined.

    Raises ConfigError if `problem.megatron` is not a version.
    """
    if release_of(problem.megatron) is None:
        raise ConfigError(f"--megatron {problem.megatron}: not a version of megatron-core, such as {MEGATRON}")
    model = problem.model
    world = problem.devices
    # adapters need whole heads
    shares_heads = shares_key_value_heads(problem.megatron) and problem.lora is None
    divisors = [n for n in range(1, world + 1) if world % n == 0]
    interleaves = get_hosting(problem.device.platform).interleaves_stages
    for pp, vp, notation in _pipelines(model.num_layers, divisors, interleaves):
        base = {"world_size": world, _PP: pp, _VPP: vp, **notation}
        experts = [
            (ep, etp) for ep, etp in product(divisors, repeat=2) if is_legal_layout(base | {_EP: ep, _ETP: etp}, model)
        ]
        for tp, cp in product(divisors, repeat=2):
            dense = base | {_TP: tp, _CP: cp}
            if cp > 1 and not cuts_context(model, problem.device.platform):
                continue
            if (model.num_key_value_heads % tp and not shares_heads) or not is_legal_layout(dense, model):
                continue
            layout = TrainLayout.build(dense, model)
            for ep, etp in experts:
                found = replace(layout, expert=ep, expert_tensor=etp, expert_data=world // (ep * etp * pp))
                if not ranks_fault(model, found, problem.fp8_block):
                    yield dense | {_EP: ep, _ETP: etp}, found


def _pipelines(
    num_layers: int, divisors: list[int], interleaves: bool
) -> Iterator[tuple[int, int | None, dict[str, bool]]]:
    """Yields (stages, virtual stages, notation) that give every stage whole layers."""
    for pp, notation in product(divisors, _NOTATIONS):
        counted = num_layers + sum(notation.values())
        if counted % pp == 0:
            per_stage = counted // pp
            yield from (
                (pp, v if v > 1 else None, notation)
                for v in range(1, per_stage + 1)
                if per_stage % v == 0 and (v == 1 or (pp > 1 and interleaves))
            )


def recomputes(model: ModelSpec) -> tuple[Recompute, ...]:
    """Returns the ways of recomputation that a model usually has, the cheapest first."""
    return _RECOMPUTE_EXPERTS if model.is_moe else _RECOMPUTE_DENSE


def stronger(problem: SearchProblem, recompute: Recompute) -> tuple[Recompute, ...]:
    """Returns the ways that are tried after this one, because they spare more memory."""
    ways = problem.recomputes
    return ways[ways.index(recompute) + 1 :]


def best_fit(
    problem: SearchProblem, degrees: dict[str, Any], layout: TrainLayout, ways: Iterable[Recompute] = ()
) -> Candidate | Phase:
    """Returns the layout with the first recomputation that fits, or the phase that is too large in every case."""
    problem = replace(problem, device=problem.device_in(layout), work=problem.work_in(layout), micro_of=None)
    states = {pp: problem.state(layout, pp) for pp in unlike_stages(problem.model, layout)}
    heaviest = heaviest_stage(states.values())
    on_device = {"parameters": heaviest.parameters, "gradients": heaviest.gradients, "optimizer": heaviest.optimizer}
    fullest = Phase("train", on_device, problem.device.usable)
    if not fullest.fits:
        return fullest
    *cheaper, last = ways or problem.recomputes
    for recompute in cheaper:
        phases = _phases_that_fit(problem, layout, recompute, states)
        if phases:
            fullest = max(phases, key=lambda phase: phase.total)
            return candidate_of(problem, degrees, layout, recompute, fullest, heaviest)
    fullest = fullest_phase(problem, layout, last, states)
    if fullest.fits:
        return candidate_of(problem, degrees, layout, last, fullest, heaviest)
    return fullest


def _phases_that_fit(
    problem: SearchProblem, layout: TrainLayout, recompute: Recompute, states: dict[int, StateBytes]
) -> list[Phase]:
    """Returns all phases if they fit. The first that does not ends the analysis, and then there are none."""
    found = []
    for phase in _phases(problem, layout, recompute, states):
        if not phase.fits:
            return []
        found.append(phase)
    return found


def heaviest_stage(states: Iterable[StateBytes]) -> StateBytes:
    """Returns the state with the most bytes on the device."""
    return max(states, key=lambda state: state.parameters + state.gradients + state.optimizer)


def unlike_stages(model: ModelSpec, layout: TrainLayout) -> list[int]:
    """Returns the first stage of each kind. Later ones have the same layers and fewer micro-batches in flight, and only
    the first one has the embedding.
    """
    first: dict[tuple, int] = {}
    for pp in range(layout.pipeline):
        kinds = layout.chunk_layers[pp]
        if not layers_alike(model):
            kinds = tuple(layer_kinds(model, layout, pp, vp) for vp in range(layout.virtual_pipeline))
        first.setdefault((kinds, pp == layout.pipeline - 1), pp)
    return list(first.values())


def fullest_phase(
    problem: SearchProblem, layout: TrainLayout, recompute: Recompute, states: dict[int, StateBytes]
) -> Phase:
    """Returns the fullest of the actor's phases over the given stages."""
    return max(_phases(problem, layout, recompute, states), key=lambda phase: phase.total)


def _phases(
    problem: SearchProblem, layout: TrainLayout, recompute: Recompute, states: dict[int, StateBytes]
) -> Iterator[Phase]:
    """Yields the actor's phases on each of the given stages."""
    load = problem.assumptions.expert_load_in(layout)
    work = problem.work_in(layout)
    activations = Activations(
        problem.model,
        layout,
        work.micro,
        problem.precision.parameters,
        recompute=recompute,
        expert_load=load,
        lora=problem.lora,
        dropout=problem.dropout,
        gated_delta=work.gated_delta,
        predicting=work.predicting,
    ).beside(problem.activations)
    count = micro_batch_count(work, layout)
    for pp, state in states.items():
        actor = ActorBytes(
            parameters=state.parameters,
            gradients=state.gradients,
            optimizer=state.optimizer,
            optimizer_host=state.optimizer_host,
            activations=activations.stage_saved(pp, count),
            temporaries=activations.stage_temporaries(pp),
            log_prob=activations.forward_only(pp),
            sync_staging=problem.sync_staging,
            offload=problem.offload,
            scores_old=problem.scores_old,
        )
        yield from actor_phases(actor, problem.device)


def candidate_of(
    problem: SearchProblem,
    degrees: dict[str, Any],
    layout: TrainLayout,
    recompute: Recompute,
    phase: Phase,
    state: StateBytes,
) -> Candidate:
    """Returns the layout with its predicted time. `phase` is the fullest, `state` that of the heaviest stage."""
    work = problem.work_in(layout)
    seconds = update_seconds(
        work, layout, problem.device, problem.per_node, state, recompute, problem.assumptions, problem.overlap
    )
    return Candidate(degrees, layout, recompute, phase, seconds, micro_batch_count(work, layout))
