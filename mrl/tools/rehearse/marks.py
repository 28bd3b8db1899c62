"""Table of switches: which ones a configuration has on, and what shows that the code of each ran.

A switch counts as exercised only if its mark is found. Its code may have been seen to run (watched.py). Otherwise
metrics, checkpoint files or samples must show an effect that only it has. Where nothing can show it, the
table gives the reason, and the switch never counts.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mrl.config.schema import RunConfig, leaf
from mrl.tools.rehearse.compose import STEPS, Rehearsal
from mrl.tools.rehearse.evidence import Evidence
from mrl.tools.rehearse.notes import OutOfReach

Found = str | None  # what was found, in words
Mark = Callable[[Evidence, RunConfig, Any], Found]  # finds the mark of a switch with this value
Value = Callable[[RunConfig], Any]
NO_MARK = "no mark of it"
_CALLS = re.compile(r"tools/.+/calls")


@dataclass(frozen=True)
class Switch:
    """One switch.

    `name` is its key, or words where no single key is it. `mark` finds what it left behind; None means that its code
    is watched. `missing` says why it may have left nothing. `off` are values at which it is off, beside None,
    False and 0. `value` computes its value, None when off, where that is not the key's own value.
    """

    name: str
    mark: Mark | None = None
    missing: str = "nothing shows that its code ran"
    off: tuple[Any, ...] = ()
    value: Value | None = None

    def value_in(self, config: RunConfig) -> Any:
        """Returns its value in a configuration; None when off."""
        if self.value is not None:
            return self.value(config)
        value = leaf(config, self.name)
        if value in (None, False, *self.off):
            return None
        return value

    def found_in(self, evidence: Evidence, config: RunConfig, value: Any) -> Found:
        """Returns the mark that it left behind, or None."""
        if self.mark is None:
            return _ran(evidence, self.name, value)
        return self.mark(evidence, config, value)


@dataclass(frozen=True)
class Exercised:
    """A switch that was on and left its mark."""

    switch: str
    value: Any
    mark: str


def judge(rehearsal: Rehearsal, evidence: Evidence) -> tuple[list[Exercised], list[OutOfReach]]:
    """Divides the switches that the rehearsal has on by whether their mark is found.

    Switches that were out of reach from the start are among the second list.
    """
    exercised: list[Exercised] = []
    lost = list(rehearsal.out_of_reach)
    named = {entry.switch for entry in lost}
    for switch in SWITCHES:
        value = switch.value_in(rehearsal.config)
        if value is None or switch.name in named:
            continue
        mark = switch.found_in(evidence, rehearsal.config, value)
        if mark is not None:
            exercised.append(Exercised(switch.name, value, mark))
        elif switch.mark is _never:
            lost.append(OutOfReach(switch.name, switch.missing))
        else:
            lost.append(OutOfReach(switch.name, f"{NO_MARK}: {switch.missing}"))
    return exercised, lost


# ---------------------------------------------------------------- values


def _data_parallel(config: RunConfig) -> int | None:
    size = config.actor.layout.data_parallel_size
    if size > 1:
        return size
    return None


def _reference_offload(config: RunConfig) -> bool | None:
    return (config.ref.param_offload and config.algorithm.needs_reference) or None


def _teacher_offload(config: RunConfig) -> bool | None:
    return (config.distillation.enabled and config.distillation.teacher_model.param_offload) or None


def _critic(config: RunConfig) -> float | None:
    if config.algorithm.needs_critic:
        return config.critic.cliprange_value
    return None


def _lies_otherwise(config: RunConfig) -> bool | None:
    """Whether there is a critic with a layout of its own."""
    return (config.algorithm.needs_critic and config.critic.layout is not None) or None


def _of_critic(switch: str) -> Value:
    """Builds the value of a critic's switch. None without a critic."""
    return lambda config: (config.algorithm.needs_critic and getattr(config.critic, switch)) or None


def _kl(config: RunConfig) -> str | None:
    if config.algorithm.use_kl_loss:
        return config.algorithm.kl_loss_type
    return None


def _filter(config: RunConfig) -> str | None:
    if config.algorithm.filter_groups.enable:
        return config.algorithm.filter_groups.metric
    return None


def _overlong_buffer(config: RunConfig) -> bool | None:
    return config.algorithm.overlong_buffer.enable or None


def _correction(config: RunConfig) -> str | None:
    correction = config.algorithm.rollout_correction
    if correction.level:
        return f"{correction.level}, {correction.mode}"
    return None


def _bonus_rules(config: RunConfig) -> tuple[str, ...] | None:
    return tuple(config.reward.bonus_rules) or None


def _validates_first(config: RunConfig) -> bool | None:
    if config.trainer.val_before_train and config.data.val_files:
        return True
    return None


def _validates(config: RunConfig) -> int | None:
    if config.trainer.test_freq > 0:
        return config.trainer.test_freq
    return None


def _acts_on(config: RunConfig) -> tuple[str, ...] | None:
    turns = config.rollout.turns
    if turns is None:
        return None
    if config.rollout.endpoint:
        return ("agent",)
    return (*turns.tools, *turns.environments)


# ---------------------------------------------------------------- marks


def _ran(evidence: Evidence, key: str, value: Any) -> Found:
    """Finds that the code of the key's value ran, and that of no other value."""
    name = key if value is True else f"{key}={value}"
    others = {said for said in evidence.exercised if said.startswith(f"{key}=")} - {name}
    processes = evidence.exercised[name]
    if others or not processes:
        return None
    return f"ran in {processes} process{'es' * (processes > 1)}"


def _never(*_: Any) -> Found:
    return None


def _metric(name: str) -> Mark:
    """Builds a mark: a metric that only the switch's code writes."""

    def mark(evidence: Evidence, *_: Any) -> Found:
        value = evidence.metric(name)
        if value is None:
            return None
        return f"{name} {value:.4g}"

    return mark


def _above(name: str, least: float) -> Mark:
    """Builds a mark: a metric that only the switch's code brings above `least`."""

    def mark(evidence: Evidence, *_: Any) -> Found:
        value = evidence.largest(name)
        if value > least:
            return f"{name} {value:.4g}"
        return None

    return mark


def _penalised(evidence: Evidence, *_: Any) -> Found:
    name = "train/overlong_penalty_mean"
    values = [row[name] for row in evidence.steps if row.get(name)]
    if values:
        return f"{name} {values[0]:.4g}"
    return None


def _called_tools(evidence: Evidence, *_: Any) -> Found:
    """Finds that each tool and each action was called."""
    calls = {name: evidence.largest(name) for row in evidence.lines for name in row if _CALLS.fullmatch(name)}
    return ", ".join(f"{name} {calls[name]:g}" for name in sorted(calls)) or None


def _parts(name: str) -> Mark:
    """Builds a mark: as many parts in the checkpoint's files as the degree."""

    def mark(evidence: Evidence, _: RunConfig, degree: int) -> Found:
        parts = evidence.degrees.get(name)
        if parts == degree:
            return f"step-1/manifest.json: {parts} parts"
        return None

    return mark


def _replicas(evidence: Evidence, config: RunConfig, _: int) -> Found:
    """Finds copies of each part among the ranks. Context parallelism makes copies, too."""
    d = evidence.degrees
    layout = config.actor.layout
    copies = 0
    if d:
        copies = d["ranks"] // (d["tensor"] * d["pipeline"])
    wanted = layout.data_parallel_size * layout.context_parallel_size
    if copies == wanted:
        return f"step-1/manifest.json: {d['ranks']} ranks, {copies} of each part"
    return None


def _received(name: str, wanted: Value) -> Mark:
    """Builds a mark: a metric has the value wanted for this configuration."""

    def mark(evidence: Evidence, config: RunConfig, _: Any) -> Found:
        if evidence.metric(name) == wanted(config):
            return f"{name} {wanted(config)}"
        return None

    return mark


_ENGINES = _received("reshard/engines", lambda config: config.rollout.num_engines)
_WORKERS = _received("reshard/workers", lambda config: config.rollout.num_engines * config.rollout.workers_per_engine)


def _placed(evidence: Evidence, _: RunConfig, placement: str) -> Found:
    switched = evidence.metric("switch/*")
    if placement == "colocated":
        names = sorted({key for row in evidence.lines for key in row if key.startswith("switch/")})
        return ", ".join(names) or None
    moved = evidence.metric("reshard/bytes_moved")
    if moved and switched is None:
        return f"reshard/bytes_moved {moved:.4g}, no switch/*"
    return None


def _synced(evidence: Evidence, _: RunConfig, path: str) -> Found:
    fast = evidence.metric("reshard/verified")
    if path == "fast":
        if fast is not None:
            return f"reshard/verified {fast:g}"
        return None
    if fast is not None:
        return None
    return _metric("reshard/bytes_moved")(evidence)


def _saved(evidence: Evidence, *_: Any) -> Found:
    manifest = evidence.manifests.get(1)
    if manifest is None:
        return None
    return f"step-1/manifest.json: {len(manifest.files())} files"


def _saved_beside(evidence: Evidence, *_: Any) -> Found:
    """Finds the timing of an asynchronous save."""
    if evidence.manifests.get(STEPS):
        return _metric("timing_s/save_checkpoint")(evidence)
    return None


def _resumed(evidence: Evidence, *_: Any) -> Found:
    """Finds that the second process's checkpoint continues the first one's count of updates."""
    manifests = [evidence.manifests.get(step) for step in (1, STEPS)]
    if None in manifests:
        return None
    first, last = (manifest.optimizer.get("num_updates") for manifest in manifests)
    if last > first > 0:
        return f"step-{STEPS}/manifest.json: {first} + {last - first} updates"
    return None


def _called(evidence: Evidence, *_: Any) -> Found:
    calls = evidence.reward_calls
    kinds = sorted({call["kind"] for call in calls})
    if calls:
        return f"logs/reward.log: {len(calls)} calls, each gave {' or '.join(kinds)}"
    return None


def _bonus(evidence: Evidence, _: RunConfig, rules: tuple[str, ...]) -> Found:
    present = [rule for rule in rules if any(rule in sample["reward"] for sample in evidence.samples)]
    if len(present) == len(rules):
        return f"samples/: parts {', '.join(present)}"
    return None


def _refilled(evidence: Evidence, *_: Any) -> Found:
    batches = evidence.largest("train/num_gen_batches")
    uniform = evidence.largest("train/uniform_group_share")
    found = f"train/num_gen_batches {batches:g}, train/uniform_group_share {uniform:.2g}"
    if batches > 1 or uniform > 0:
        return found
    return None


def _rates_differ(evidence: Evidence, *_: Any) -> Found:
    rates = list(dict.fromkeys(row["actor/lr"] for row in evidence.steps if "actor/lr" in row))
    if len(rates) > 1:
        return f"actor/lr {' then '.join(f'{rate:.4g}' for rate in rates)}"
    return None


def _validated_first(evidence: Evidence, *_: Any) -> Found:
    if len(evidence.lines) > len(evidence.steps):
        return "a line of step 0"
    return None


# ---------------------------------------------------------------- the table

_CUT = "the checkpoint's files are cut otherwise"
_FEW = "not as many took part in the weight sync"
_OTHER = "no response was trained by it, or others were trained by another"
_LAYOUT = "actor.layout"
_PARALLEL = "parallel_size"
_ADAM = "actor.optim.override_optimizer_config"
_DDP = "actor.override_ddp_config"

SWITCHES: tuple[Switch, ...] = (
    Switch("cluster.placement", _placed, "no hand-over was timed"),
    Switch(f"{_LAYOUT}.tensor_model_{_PARALLEL}", _parts("tensor"), _CUT, off=(1,)),
    Switch(f"{_LAYOUT}.pipeline_model_{_PARALLEL}", _parts("pipeline"), _CUT, off=(1,)),
    Switch(f"{_LAYOUT}.virtual_pipeline_model_{_PARALLEL}", off=(1,)),
    Switch(f"{_LAYOUT}.context_{_PARALLEL}", _replicas, _CUT, off=(1,)),
    Switch(f"{_LAYOUT}.expert_model_{_PARALLEL}", _parts("expert"), _CUT, off=(1,)),
    Switch(f"{_LAYOUT}.expert_tensor_{_PARALLEL}", _parts("expert_tensor"), _CUT, off=(1,)),
    Switch("data parallelism", _replicas, _CUT, value=_data_parallel),
    Switch("rollout.num_engines", _ENGINES, _FEW, off=(1,)),
    Switch("rollout.tensor_model_parallel_size", _WORKERS, _FEW, off=(1,)),
    Switch("rollout.data_parallel_size", _WORKERS, _FEW, off=(1,)),
    Switch("rollout.expert_parallel_size", _WORKERS, _FEW, off=(1,)),
    Switch("rollout.enable_prefix_caching", _never, "it leaves no mark: vLLM's engines say nothing of it"),
    Switch("actor.param_offload", _metric("offload/parameters_bytes")),
    Switch("actor.grad_offload", _metric("offload/gradients_bytes")),
    Switch("actor.optimizer_offload", _metric("offload/optimizer_bytes")),
    Switch(f"{_ADAM}.optimizer_cpu_offload"),
    Switch("model.override_transformer_config.recompute_granularity"),
    Switch("actor.mtp.train"),
    Switch(f"{_DDP}.overlap_grad_reduce"),
    Switch(f"{_DDP}.overlap_param_gather", _never, "it leaves no mark: nothing records whether a gather is under way"),
    Switch("actor.use_remove_padding", _metric("actor/packed_sequences")),
    Switch("actor.use_dynamic_bsz", _metric("actor/token_budget_share")),
    Switch("actor.router_replay", missing="no choice of experts was replayed in an update", off=("disabled",)),
    Switch("actor.freeze_router"),
    Switch("actor.lora.rank", off=(0,)),
    Switch("actor.lora.dropout", off=(0.0,)),
    Switch("model.vision", missing="no image was in an update"),
    Switch("actor.optim.vision_lr"),
    Switch("rollout.quantization"),
    Switch("algorithm.adv_estimator", missing=_OTHER),
    Switch("critic", _metric("critic/vf_loss"), "no update of a critic", value=_critic),
    Switch("critic.layout", missing="it lies as the actor in small", value=_lies_otherwise),
    Switch("critic.param_offload", _metric("offload/critic_parameters_bytes"), value=_of_critic("param_offload")),
    Switch("critic.grad_offload", _metric("offload/critic_gradients_bytes"), value=_of_critic("grad_offload")),
    Switch(
        "critic.optimizer_offload", _metric("offload/critic_optimizer_bytes"), value=_of_critic("optimizer_offload")
    ),
    Switch("algorithm.policy_loss.loss_mode", missing=_OTHER),
    Switch("actor.optim.lr_decay_style", _rates_differ, "the rate stayed the same", off=("constant",)),
    Switch("algorithm.anchor", missing=_OTHER, off=("recompute",)),
    Switch("algorithm.rollout_correction", _metric("rollout_corr/weight_mean"), value=_correction),
    Switch("algorithm.use_kl_loss", _metric("actor/kl_loss"), value=_kl),
    Switch("algorithm.use_kl_in_reward", _metric("actor/reward_kl_penalty")),
    Switch("ref.param_offload", value=_reference_offload),
    Switch("distillation.enabled", _metric("timing_s/teacher")),
    Switch("distillation.teacher_model.param_offload", value=_teacher_offload),
    Switch("algorithm.entropy_coeff", _metric("actor/entropy_loss")),
    Switch("algorithm.filter_groups", _refilled, "no group had one value", value=_filter),
    Switch("algorithm.overlong_buffer", _penalised, "no response was long enough", value=_overlong_buffer),
    Switch("algorithm.overlong_filter", _metric("train/overlong_filtered_share")),
    Switch("rollout.turns", _called_tools, "no response called anything", value=_acts_on),
    Switch("reward", _called, "it was never called", value=lambda config: "called"),
    Switch("reward.bonus_rules", _bonus, "no sample has their parts", value=_bonus_rules),
    Switch("reshard.path", _synced),
    Switch("trainer.schedule", _metric("async/groups_ahead"), off=("sync",)),
    Switch(
        "trainer.partial_rollouts",
        _above("async/versions_per_sample", 1.0),
        "no response was under way when weights changed: a step and its resume leave no step to be ahead of",
    ),
    Switch("trainer.val_before_train", _validated_first, "no line of step 0", value=_validates_first),
    Switch("trainer.test_freq", _metric("val-core/*"), value=_validates),
    Switch("trainer.save_freq", _saved, "no checkpoint of step 1"),
    Switch("trainer.async_save", _saved_beside, f"no checkpoint of step {STEPS}"),
    Switch("--resume", _resumed, "the second run did not go on from the first", value=lambda config: True),
    Switch("trainer.deterministic", _never, "it leaves no mark; mrl verify --resume compares runs"),
)
