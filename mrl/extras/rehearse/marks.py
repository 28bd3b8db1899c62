"""Which switches a configuration has on, and the mark that each leaves in the run directory when its code ran: one
table.

A switch counts as exercised only when its mark is there. A mark is written by the switch's own code: a metric that
nothing else writes, a value that it alone can have, boxes of a checkpoint's files. Where a switch writes no mark,
the reason stands here and it is never counted.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mrl.config.schema import RunConfig, leaf
from mrl.extras.rehearse.compose import STEPS, Rehearsal
from mrl.extras.rehearse.evidence import Evidence
from mrl.extras.rehearse.notes import OutOfReach

Found = str | None  # what was found, in words
NO_MARK = "no mark of it"
_TRANSFORMER = "model.override_transformer_config"
_DDP = "actor.override_ddp_config"
_COLOCATED = "colocated"


@dataclass(frozen=True)
class Switch:
    """One switch: `value` says how it stands (None: off), `mark` what it left behind (None: nothing); `missing`:
    why it may be so.
    """

    name: str
    value: Callable[[RunConfig], Any]
    mark: Callable[[Evidence, RunConfig], Found]
    missing: str


@dataclass(frozen=True)
class Exercised:
    """A switch that was on and left its mark."""

    switch: str
    value: Any
    mark: str


def judge(rehearsal: Rehearsal, evidence: Evidence) -> tuple[list[Exercised], list[OutOfReach]]:
    """Every switch that the rehearsal has on, by whether its mark is there; what was out of its reach from the
    beginning.
    """
    exercised, lost = [], list(rehearsal.out_of_reach)
    named = {entry.switch for entry in lost}
    for switch in SWITCHES:
        value = switch.value(rehearsal.config)
        if value is None or switch.name in named:
            continue
        mark = switch.mark(evidence, rehearsal.config)
        if mark is None:
            lost.append(
                OutOfReach(switch.name, switch.missing if switch.mark is _never else f"{NO_MARK}: {switch.missing}")
            )
        else:
            exercised.append(Exercised(switch.name, value, mark))
    return exercised, lost


# ---------------------------------------------------------------- values


def _is(field: str, *off: Any) -> Callable[[RunConfig], Any]:
    """The key's value; None where it is off."""
    return lambda config: None if (value := leaf(config, field)) in (None, False, *off) else value


def _more(field: str) -> Callable[[RunConfig], Any]:
    """A degree, where it is above 1."""
    return lambda config: value if (value := leaf(config, field) or 1) > 1 else None


def _always(field: str) -> Callable[[RunConfig], Any]:
    return lambda config: leaf(config, field)


def _given(key: str, field: str) -> Callable[[RunConfig], Any]:
    """A field of an override key."""
    return lambda config: leaf(config, key).get(field) or None


def _data_parallel(config: RunConfig) -> int | None:
    size = config.actor.layout.data_parallel_size
    return size if size > 1 else None


def _kl(config: RunConfig) -> str | None:
    return config.algorithm.kl_loss_type if config.algorithm.use_kl_loss else None


def _filter(config: RunConfig) -> str | None:
    return config.algorithm.filter_groups.metric if config.algorithm.filter_groups.enable else None


def _validates(config: RunConfig) -> int | None:
    return config.trainer.test_freq if config.trainer.test_freq > 0 else None


def _validates_first(config: RunConfig) -> bool | None:
    return True if config.trainer.val_before_train and config.data.val_files else None


def _correction(config: RunConfig) -> str | None:
    correction = config.algorithm.rollout_correction
    return f"{correction.level}, {correction.mode}" if correction.level else None


# ---------------------------------------------------------------- marks


def _metric(name: str) -> Callable[[Evidence, RunConfig], Found]:
    """A metric that nothing but the switch's code writes."""

    def mark(evidence: Evidence, _: RunConfig) -> Found:
        value = evidence.metric(name)
        return None if value is None else f"{name} {value:.4g}"

    return mark


def _above(name: str, least: float) -> Callable[[Evidence, RunConfig], Found]:
    """A metric that is above `least` by the switch's code alone."""

    def mark(evidence: Evidence, _: RunConfig) -> Found:
        value = evidence.largest(name)
        return f"{name} {value:.4g}" if value > least else None

    return mark


def _not_zero(name: str) -> Callable[[Evidence, RunConfig], Found]:
    def mark(evidence: Evidence, _: RunConfig) -> Found:
        values = [row[name] for row in evidence.steps if row.get(name)]
        return f"{name} {values[0]:.4g}" if values else None

    return mark


def _ran(field: str, family: str = "") -> Callable[[Evidence, RunConfig], Found]:
    """Responses that were trained by the code of the key's name, as that code counted them;
    and by no other of its kind.
    """
    prefix = f"ran/{family or field.rpartition('.')[2]}/"

    def mark(evidence: Evidence, config: RunConfig) -> Found:
        name = prefix + leaf(config, field)
        others = {key for row in evidence.lines for key in row if key.startswith(prefix)} - {name}
        return None if others else _not_zero(name)(evidence, config)

    return mark


def _replayed(evidence: Evidence, config: RunConfig) -> Found:
    """Routes at the old log-probs and in the update were compared; on policy both are one,
    and the engine's routes were asked for.
    """
    return _metric("router/missing_routes" if config.algorithm.on_policy else "router/drift")(evidence, config)


def _degree(name: str, field: str) -> Callable[[Evidence, RunConfig], Found]:
    """Parts that the checkpoint's files show, as many as the degree."""

    def mark(evidence: Evidence, config: RunConfig) -> Found:
        parts = evidence.degrees.get(name)
        return f"step-1/manifest.json: {parts} parts" if parts == leaf(config, field) else None

    return mark


def _replicas(evidence: Evidence, config: RunConfig) -> Found:
    """Ranks over the parts that one copy has; context parallelism makes copies, too."""
    d, layout = evidence.degrees, config.actor.layout
    copies = d["ranks"] // (d["tensor"] * d["pipeline"]) if d else 0
    wanted = layout.data_parallel_size * layout.context_parallel_size
    return f"step-1/manifest.json: {d['ranks']} ranks, {copies} of each part" if copies == wanted else None


def _workers(evidence: Evidence, config: RunConfig) -> Found:
    wanted = config.rollout.num_engines * config.rollout.workers_per_engine
    return f"reshard/workers {wanted}" if evidence.metric("reshard/workers") == wanted else None


def _engines(evidence: Evidence, config: RunConfig) -> Found:
    wanted = config.rollout.num_engines
    return f"reshard/engines {wanted}" if evidence.metric("reshard/engines") == wanted else None


def _placement(evidence: Evidence, config: RunConfig) -> Found:
    switched = evidence.metric("switch/*")
    if config.cluster.placement == _COLOCATED:
        names = sorted({key for row in evidence.lines for key in row if key.startswith("switch/")})
        return ", ".join(names) or None
    moved = evidence.metric("reshard/bytes_moved")
    return f"reshard/bytes_moved {moved:.4g}, no switch/*" if moved and switched is None else None


def _synced(evidence: Evidence, config: RunConfig) -> Found:
    fast = evidence.metric("reshard/verified")
    if config.reshard.path == "fast":
        return f"reshard/verified {fast:g}" if fast is not None else None
    return None if fast is not None else _metric("reshard/bytes_moved")(evidence, config)


def _saved(evidence: Evidence, _: RunConfig) -> Found:
    manifest = evidence.manifests.get(1)
    return None if manifest is None else f"step-1/manifest.json: {len(manifest.files())} files"


def _saved_beside(evidence: Evidence, config: RunConfig) -> Found:
    """The write of a save that the training waits for is over with the save."""
    return _metric("timing_s/save_checkpoint")(evidence, config) if evidence.manifests.get(STEPS) else None


def _resumed(evidence: Evidence, config: RunConfig) -> Found:
    """The second process's checkpoint counts the first one's updates."""
    manifests = [evidence.manifests.get(step) for step in (1, STEPS)]
    if None in manifests:
        return None
    first, last = (manifest.optimizer.get("num_updates") for manifest in manifests)
    return f"step-{STEPS}/manifest.json: {first} + {last - first} updates" if last > first > 0 else None


def _called(evidence: Evidence, _: RunConfig) -> Found:
    calls = evidence.reward_calls
    kinds = sorted({call["kind"] for call in calls})
    return f"logs/reward.log: {len(calls)} calls, each gave {' or '.join(kinds)}" if calls else None


def _bonus(evidence: Evidence, config: RunConfig) -> Found:
    names = config.reward.bonus_rules
    present = [n for n in names if any(n in sample["reward"] for sample in evidence.samples)]
    return f"samples/: parts {', '.join(present)}" if len(present) == len(names) else None


def _refilled(evidence: Evidence, _: RunConfig) -> Found:
    batches, uniform = evidence.largest("train/num_gen_batches"), evidence.largest("train/uniform_group_share")
    return (
        f"train/num_gen_batches {batches:g}, train/uniform_group_share {uniform:.2g}"
        if batches > 1 or uniform > 0
        else None
    )


def _rates_differ(evidence: Evidence, _: RunConfig) -> Found:
    rates = list(dict.fromkeys(row["actor/lr"] for row in evidence.steps if "actor/lr" in row))
    return f"actor/lr {' then '.join(f'{rate:.4g}' for rate in rates)}" if len(rates) > 1 else None


def _never(_: Evidence, __: RunConfig) -> Found:
    return None


_ACTOR, _ROLLOUT, _LOSS = "actor.layout", "rollout", "algorithm.policy_loss"
_TP, _PP, _CP = (f"{_ACTOR}.{name}_parallel_size" for name in ("tensor_model", "pipeline_model", "context"))
_VP, _EP, _ETP = (
    f"{_ACTOR}.{name}_parallel_size" for name in ("virtual_pipeline_model", "expert_model", "expert_tensor")
)
_OTHER_CUT = "the checkpoint's files are cut otherwise"
_NOT_ALL = "not as many took part in the weight sync"
_NOT_WRITTEN = "the metric was not written"
_OTHER_RAN = "no response was trained by it"

SWITCHES: tuple[Switch, ...] = (
    Switch("cluster.placement", _always("cluster.placement"), _placement, "no hand-over was timed"),
    Switch(_TP, _more(_TP), _degree("tensor", _TP), _OTHER_CUT),
    Switch(_PP, _more(_PP), _degree("pipeline", _PP), _OTHER_CUT),
    Switch(_VP, _more(_VP), _metric("actor/model_chunks"), _NOT_WRITTEN),
    Switch(_CP, _more(_CP), _replicas, _OTHER_CUT),
    Switch(_EP, _more(_EP), _degree("expert", _EP), _OTHER_CUT),
    Switch(_ETP, _more(_ETP), _degree("expert_tensor", _ETP), _OTHER_CUT),
    Switch("data parallelism", _data_parallel, _replicas, _OTHER_CUT),
    Switch(f"{_ROLLOUT}.num_engines", _more(f"{_ROLLOUT}.num_engines"), _engines, _NOT_ALL),
    Switch(
        f"{_ROLLOUT}.tensor_model_parallel_size", _more(f"{_ROLLOUT}.tensor_model_parallel_size"), _workers, _NOT_ALL
    ),
    Switch(f"{_ROLLOUT}.data_parallel_size", _more(f"{_ROLLOUT}.data_parallel_size"), _workers, _NOT_ALL),
    Switch(f"{_ROLLOUT}.expert_parallel_size", _more(f"{_ROLLOUT}.expert_parallel_size"), _workers, _NOT_ALL),
    Switch(
        f"{_ROLLOUT}.enable_prefix_caching",
        _is(f"{_ROLLOUT}.enable_prefix_caching"),
        _never,
        "it leaves no mark: vLLM's engines say nothing of it",
    ),
    Switch("actor.param_offload", _is("actor.param_offload"), _metric("offload/parameters_bytes"), _NOT_WRITTEN),
    Switch("actor.grad_offload", _is("actor.grad_offload"), _metric("offload/gradients_bytes"), _NOT_WRITTEN),
    Switch("actor.optimizer_offload", _is("actor.optimizer_offload"), _metric("offload/optimizer_bytes"), _NOT_WRITTEN),
    Switch(
        "actor.optim.override_optimizer_config.optimizer_cpu_offload",
        _given("actor.optim.override_optimizer_config", "optimizer_cpu_offload"),
        _metric("offload/host_adam_bytes"),
        _NOT_WRITTEN,
    ),
    Switch(
        f"{_TRANSFORMER}.recompute_granularity",
        _given(_TRANSFORMER, "recompute_granularity"),
        _metric("actor/recomputed_layers"),
        "no layer ran twice",
    ),
    Switch(
        f"{_DDP}.overlap_grad_reduce",
        _given(_DDP, "overlap_grad_reduce"),
        _metric("actor/early_reductions"),
        "no sum of gradients had begun when its backward ended",
    ),
    Switch(
        f"{_DDP}.overlap_param_gather",
        _given(_DDP, "overlap_param_gather"),
        _never,
        "it leaves no mark: nobody asks whether a gather is under way",
    ),
    Switch(
        "actor.use_remove_padding", _is("actor.use_remove_padding"), _metric("actor/packed_sequences"), _NOT_WRITTEN
    ),
    Switch("actor.use_dynamic_bsz", _is("actor.use_dynamic_bsz"), _metric("actor/token_budget_share"), _NOT_WRITTEN),
    Switch(
        "actor.router_replay",
        _is("actor.router_replay", "disabled"),
        _replayed,
        "no choice of experts was compared",
    ),
    Switch("actor.freeze_router", _is("actor.freeze_router"), _metric("router/frozen"), _NOT_WRITTEN),
    Switch("algorithm.adv_estimator", _always("algorithm.adv_estimator"), _ran("algorithm.adv_estimator"), _OTHER_RAN),
    Switch(f"{_LOSS}.loss_mode", _always(f"{_LOSS}.loss_mode"), _ran(f"{_LOSS}.loss_mode", "policy_loss"), _OTHER_RAN),
    Switch(
        "actor.optim.lr_decay_style",
        _is("actor.optim.lr_decay_style", "constant"),
        _rates_differ,
        "the rate stayed the same",
    ),
    Switch("algorithm.anchor", _is("algorithm.anchor", "recompute"), _ran("algorithm.anchor"), _OTHER_RAN),
    Switch("algorithm.rollout_correction", _correction, _metric("rollout_corr/weight_mean"), _NOT_WRITTEN),
    Switch("algorithm.use_kl_loss", _kl, _metric("actor/kl_loss"), _NOT_WRITTEN),
    Switch(
        "algorithm.use_kl_in_reward",
        _is("algorithm.use_kl_in_reward"),
        _metric("actor/reward_kl_penalty"),
        _NOT_WRITTEN,
    ),
    Switch(
        "ref.param_offload",
        lambda c: (c.ref.param_offload and c.algorithm.needs_reference) or None,
        _metric("offload/reference_bytes"),
        _NOT_WRITTEN,
    ),
    Switch("algorithm.entropy_coeff", _is("algorithm.entropy_coeff", 0.0), _metric("actor/entropy_loss"), _NOT_WRITTEN),
    Switch("algorithm.filter_groups", _filter, _refilled, "no group had one value"),
    Switch(
        "algorithm.overlong_buffer",
        _is("algorithm.overlong_buffer.enable"),
        _not_zero("train/overlong_penalty_mean"),
        "no response was long enough",
    ),
    Switch(
        "algorithm.overlong_filter",
        _is("algorithm.overlong_filter"),
        _metric("train/overlong_filtered_share"),
        _NOT_WRITTEN,
    ),
    Switch("reward", lambda c: "called", _called, "it was never called"),
    Switch("reward.bonus_rules", lambda c: tuple(c.reward.bonus_rules) or None, _bonus, "no sample has their parts"),
    Switch("reshard.path", _always("reshard.path"), _synced, _NOT_WRITTEN),
    Switch("trainer.schedule", _is("trainer.schedule", "sync"), _metric("async/groups_ahead"), _NOT_WRITTEN),
    Switch(
        "trainer.partial_rollouts",
        _is("trainer.partial_rollouts"),
        _above("async/versions_per_sample", 1.0),
        "no response was under way when weights changed: a step and its resume leave no step to be ahead of",
    ),
    Switch(
        "trainer.val_before_train",
        _validates_first,
        lambda e, c: "a line of step 0" if len(e.lines) > len(e.steps) else None,
        "no line of step 0",
    ),
    Switch("trainer.test_freq", _validates, _metric("val-core/*"), _NOT_WRITTEN),
    Switch("trainer.save_freq", _always("trainer.save_freq"), _saved, "no checkpoint of step 1"),
    Switch("trainer.async_save", _is("trainer.async_save"), _saved_beside, f"no checkpoint of step {STEPS}"),
    Switch("--resume", lambda c: True, _resumed, "the second run did not go on from the first"),
    Switch(
        "trainer.deterministic",
        _is("trainer.deterministic"),
        _never,
        "it leaves no mark; mrl verify --resume holds runs against each other",
    ),
)
