"""Rules of advantage, loss, aggregation, clip, correction and sampling: names that exist, and settings that go
together.
"""

from collections.abc import Callable, Collection, Iterator

from mrl.algo.kl_control import LARGEST_ERROR
from mrl.algo.spec import (
    ADVANTAGES,
    AGGREGATIONS,
    ALIASES,
    BAND_MODES,
    BY_TURN,
    CORRECTIONS,
    KL_TYPES,
    LOSSES,
    MODES,
    TOKEN_BAND,
    LossSpec,
)
from mrl.config.rule_row import Rule, RuleRow, on_only_where
from mrl.config.schema import AlgorithmConfig, PolicyLossConfig, RolloutCorrectionConfig, RunConfig
from mrl.config.schema_algorithm import KlControlConfig
from mrl.config.section import unknown_name
from mrl.errors import Violation
from mrl.model import ModelSpec

_LOSS = "algorithm.policy_loss"
_CORRECTION = "algorithm.rollout_correction"
_GROUPS = "algorithm.filter_groups"
_ON_POLICY = "algorithm.anchor: on_policy"
_PASS = "algorithm.anchor: recompute makes the pass that it needs"
_SELECTING = " or ".join(name for name, loss in LOSSES.items() if loss.selects_tokens)
_CLIPS = ("clip_ratio_low", "clip_ratio_high")
# A clip this many times wider than the widest sensible one was written for another kind of ratio.
_OTHER_SCALE = 10
_SLOW = 10  # steps of samples in the horizon of an adaptive weight, at least
# rows of a drawn mini-batch on a replica: the fullest has 16 % more work than the mean at 64, half more at 16
_EVEN_ROWS = 32
_WITHOUT_GRADIENT = [name for name, spec in KL_TYPES.items() if spec.estimator == "k1" and not spec.k2_gradient]
_PENALISED = "reward"  # the part that is the score after penalties


def loss_notes(config: RunConfig) -> Iterator[str]:
    """Yields notes on settings of a loss that are legal and may be a mistake."""
    algorithm = config.algorithm
    limit = _clip_limit(config)
    for name in _CLIPS if limit is not None else ():
        value = getattr(algorithm.policy_loss, name)
        if limit < value < limit * _OTHER_SCALE:
            yield (
                f"{_LOSS}.{name} = {value:g} is wide for {algorithm.policy_loss.loss_mode} (over "
                f"{limit:g}): it may never clip"
            )
    if config.updates_per_step == 1 and algorithm.anchor == "recompute":
        yield (
            "with one update a rollout and anchor recompute every ratio is exactly 1: the clip of the loss has no "
            "effect; where nothing else reads old log-probs, algorithm.anchor: on_policy makes the same update "
            "without the pass for them"
        )
    if algorithm.filter_groups.enable and config.trainer.total_training_steps is None:
        yield (
            "dynamic sampling may draw several batches of prompts a step, so trainer.total_epochs passes "
            "over the data more often"
        )
    of_tokens = algorithm.needs_critic or (
        algorithm.adv_estimator == "reinforce_plus_plus" and algorithm.use_kl_in_reward
    )
    if of_tokens and algorithm.policy_loss.loss_mode == "geo_mean":
        yield (
            f"algorithm.adv_estimator: {algorithm.adv_estimator} gives each token its own advantage, and "
            "policy_loss.loss_mode geo_mean takes the mean of a response's; gspo keeps them apart"
        )
    if algorithm.use_kl_loss and not algorithm.kl_loss_coef:
        yield "algorithm.use_kl_loss is true and kl_loss_coef 0: a reference model is computed and changes nothing"
    if algorithm.kl_loss_coef and not algorithm.use_kl_loss:
        yield f"algorithm.kl_loss_coef = {algorithm.kl_loss_coef:g} is not read: algorithm.use_kl_loss is false"
    if algorithm.use_kl_loss and algorithm.kl_loss_coef and algorithm.kl_loss_type in _WITHOUT_GRADIENT:
        yield (
            f"algorithm.kl_loss_type: {algorithm.kl_loss_type} has a gradient whose mean is 0 on the policy's own "
            f"tokens, so the KL holds nothing back; {algorithm.kl_loss_type}+ has its value and the KL's gradient"
        )
    control = algorithm.kl_ctrl
    if control.type == "adaptive" and control.horizon < _SLOW * _samples(config):
        change = LARGEST_ERROR * _samples(config) / control.horizon
        yield (
            f"algorithm.kl_ctrl.horizon = {control.horizon:g} is {control.horizon / _samples(config):.2g} times the "
            f"samples of a step: the weight may change by {change:.0%} in each; {_SLOW * _samples(config):g} are usual"
        )
    if config.actor.ppo_epochs > 1 and config.actor.shuffles:
        yield from _uneven_epochs(config)
    yield from _unread_constants(algorithm.policy_loss)


def _uneven_epochs(config: RunConfig) -> Iterator[str]:
    """Rows stay on the replica of the first epoch, so a drawn mini-batch has unequally many on each."""
    replicas = config.actor.layout.data_parallel_size
    rows = config.actor.ppo_mini_batch_size * config.rollout.n
    if replicas > 1 and rows < _EVEN_ROWS * replicas:
        yield (
            f"actor.shuffle draws the mini-batches of further epochs, and {rows} rows on {replicas} data-parallel "
            f"ranks (under {_EVEN_ROWS} each) are drawn unevenly: every rank waits for the fullest, which the plan's "
            "seconds do not count (actor/dp_imbalance measures it); actor.shuffle: false keeps all epochs even"
        )


def _unread_constants(loss: PolicyLossConfig) -> Iterator[str]:
    """Constants that are not at their defaults and that belong to another loss or aggregation; a loss of the user's may
    read all those of losses.
    """
    aggregation = AGGREGATIONS.get(loss.loss_agg_mode)
    if loss.loss_scale_factor is not None and aggregation is not None and not aggregation.needs_scale_factor:
        scaled = ", ".join(name for name, spec in AGGREGATIONS.items() if spec.needs_scale_factor)
        yield (
            f"{_LOSS}.loss_scale_factor = {loss.loss_scale_factor:g} is not read with loss_agg_mode "
            f"{loss.loss_agg_mode}; it is the divisor of {scaled}"
        )
    if loss.custom is not None or loss.loss_mode not in LOSSES:
        return
    for name in sorted({name for spec in LOSSES.values() for name in spec.constants}):
        value = getattr(loss, name)
        readers = [spec.name for spec in LOSSES.values() if name in spec.constants]
        if loss.loss_mode not in readers and value != PolicyLossConfig.model_fields[name].default:
            constant = f"it is a constant of {', '.join(readers)}"
            yield f"{_LOSS}.{name} = {value:g} is not read by {loss.loss_mode}; {constant}"


def _known(field: str, name: str, table: Collection[str]) -> Iterator[Violation]:
    if name not in table:
        yield Violation(field, unknown_name(name, table, ALIASES), "", tuple(table))


def _estimator(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    field = "algorithm.adv_estimator"
    name = config.algorithm.adv_estimator
    if config.algorithm.custom_advantage is None:
        yield from _known(field, name, ADVANTAGES)
    elif name in ADVANTAGES:
        why = "algorithm.custom_advantage.path is set, and a function of one's own needs a name of its own"
        yield Violation(field, "is the name of a built-in advantage", why)


def _needs_parts(config: RunConfig) -> bool:
    spec = ADVANTAGES.get(config.algorithm.adv_estimator)
    return spec is not None and spec.needs_parts


def _parts(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    if not _needs_parts(config):
        return
    keys = config.algorithm.gdpo_reward_keys
    name = config.algorithm.adv_estimator
    if not keys:
        why = f"{name} normalises each part of the reward by itself; name the parts that the function returns"
        yield Violation("algorithm.gdpo_reward_keys", "names no part of the reward", why)
    elif len(set(keys)) < len(keys):
        why = "each part counts once; a larger gdpo_reward_weights makes it count more"
        yield Violation("algorithm.gdpo_reward_keys", "names a part twice", why)
    elif config.algorithm.gdpo_reward_weights and len(config.algorithm.gdpo_reward_weights) != len(keys):
        yield Violation(
            "algorithm.gdpo_reward_weights",
            f"must have one number for each of the {len(keys)} gdpo_reward_keys, or none",
        )


def _of_parts(name: str) -> RuleRow:
    """Builds the row of a key that an advantage reads with the parts of the reward; one of the user's may."""
    return on_only_where(
        f"algorithm.{name}",
        lambda c, m: _needs_parts(c) or c.algorithm.custom_advantage is not None,
        "must be empty unless algorithm.adv_estimator is gdpo",
        "other advantages read the score alone, and the setting would be ignored",
        ((),),
    )


def _parts_with_penalty(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    keys = config.algorithm.gdpo_reward_keys
    if _needs_parts(config) and keys and config.algorithm.overlong_buffer.enable and _PENALISED not in keys:
        name = config.algorithm.adv_estimator
        why = (
            f"{name} reads the named parts of the reward, and the penalty is in none but {_PENALISED}, the whole of it"
        )
        yield Violation(
            "algorithm.gdpo_reward_keys", f"must name {_PENALISED} with algorithm.overlong_buffer.enable", why
        )


def _by_turn(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    """Checks that turns' own advantages are not lost, and that keys of theirs are read."""
    algorithm = config.algorithm
    name = algorithm.adv_estimator
    if not algorithm.by_turn:
        usual = AlgorithmConfig()
        names = ("step_advantage_weight", "branch_rewards")
        given = [each for each in names if getattr(algorithm, each) != getattr(usual, each)]
        if given and algorithm.custom_advantage is None:
            why = f"{name} gives a response one advantage, and {given[0]} would not be read"
            yield Violation(f"algorithm.{given[0]}", f"does not go with adv_estimator {name}", why)
        return
    loss = algorithm.policy_loss.loss_mode
    if loss in ("gspo", "geo_mean"):
        why = (
            f"{name} gives each turn of a response its own advantage, and {loss} is the loss of one advantage for all "
            "of a response's tokens; gspo-token has the same ratio and takes advantages by token"
        )
        rule = f"must not be {loss} with adv_estimator {name}"
        yield Violation(
            f"{_LOSS}.loss_mode", rule, why, tuple(each for each in LOSSES if each not in (loss, "gspo", "geo_mean"))
        )
    if config.rollout.turns is None:
        why = "a response of one turn has nothing that is credited by turn"
        yield Violation("rollout.turns", f"must be given with adv_estimator {name}", why)


def _loss_name(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    loss = config.algorithm.policy_loss
    if loss.custom is None:
        yield from _known(f"{_LOSS}.loss_mode", loss.loss_mode, LOSSES)
        return
    if loss.loss_mode in LOSSES:
        why = f"{_LOSS}.custom.path is set, and a function of one's own needs a name of its own"
        yield Violation(f"{_LOSS}.loss_mode", "is the name of a built-in loss", why)


def _group(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    if config.rollout.n > 1:
        return
    spec = ADVANTAGES.get(config.algorithm.adv_estimator)
    if spec is not None and spec.needs_group:
        name = config.algorithm.adv_estimator
        if not config.distillation.alone:
            why = "the advantage compares responses to one prompt, and a single one has nothing to be compared with"
            yield Violation("rollout.n", f"must be at least 2 with adv_estimator {name}", why, (2, 4, 8, 16))
    elif config.algorithm.filter_groups.enable:
        why = "dynamic sampling keeps groups whose responses differ, and one response does not"
        yield Violation("rollout.n", f"must be at least 2 with {_GROUPS}.enable", why, (2, 4, 8, 16))


def _without_level(name: str) -> Rule:
    def judge(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
        correction = config.algorithm.rollout_correction
        default = getattr(RolloutCorrectionConfig(), name)
        if correction.level is None and getattr(correction, name) != default:
            why = "without a level nothing is corrected, and the setting would be ignored"
            yield Violation(f"{_CORRECTION}.{name}", f"needs {_CORRECTION}.level", why, (default,))

    return judge


def _of_adaptive(name: str) -> Rule:
    def judge(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
        control = config.algorithm.kl_ctrl
        default = getattr(KlControlConfig(), name)
        if control.type == "fixed" and getattr(control, name) != default:
            why = "a fixed weight follows no KL, and the setting would be ignored"
            yield Violation(f"algorithm.kl_ctrl.{name}", "needs algorithm.kl_ctrl.type: adaptive", why, (default,))

    return judge


def _samples(config: RunConfig) -> int:
    """Returns the samples of a step."""
    return config.data.train_batch_size * config.rollout.n


def _correction_mode(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    correction = config.algorithm.rollout_correction
    if correction.level is not None:
        yield from _known(f"{_CORRECTION}.mode", correction.mode, MODES)


def _rejection_band(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    """Checks the rejection beside the weights, which mode mask has by itself."""
    correction = config.algorithm.rollout_correction
    low = correction.reject_low or 0.0
    if correction.level is None:
        return
    if correction.reject is None:
        for name in ("reject_low", "reject_high"):
            default = getattr(RolloutCorrectionConfig(), name)
            if getattr(correction, name) != default:
                why = "nothing is rejected beside the weights, and the setting would be ignored"
                yield Violation(f"{_CORRECTION}.{name}", f"needs {_CORRECTION}.reject", why, (default,))
        return
    if correction.mode == "mask":
        why = (
            "mask rejects by its own ratio; a weight with a rejection of another level is mode truncate, clip or icepop"
        )
        yield Violation(f"{_CORRECTION}.reject", "must be null with mode mask", why, (None,))
    if low >= correction.reject_high:
        rule = f"must be below {_CORRECTION}.reject_high = {correction.reject_high:g}"
        yield Violation(f"{_CORRECTION}.reject_low", rule, "what is between the two is kept")
    elif not low <= 1 <= correction.reject_high:
        field = "reject_high" if correction.reject_high < 1 else "reject_low"
        why = "where generation and training agree the ratio is 1"
        yield Violation(f"{_CORRECTION}.{field}", "leaves 1 outside the band", why)


def _correction_band(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    correction = config.algorithm.rollout_correction
    if correction.level is None:
        return
    low = correction.low
    usual = next((c for c in CORRECTIONS.values() if (c.level, c.mode) == (correction.level, correction.mode)), None)
    if correction.mode == "truncate" and low is not None:
        why = "truncation bounds the ratio above only; mode clip bounds it on both sides"
        yield Violation(f"{_CORRECTION}.low", "must be null with mode truncate", why, (None,))
    elif low is not None and low >= correction.high:
        allowed = ()
        if usual:
            allowed = (usual.low,)
        rule = f"must be below {_CORRECTION}.high = {correction.high:g}"
        yield Violation(f"{_CORRECTION}.low", rule, "the ratio is kept between the two", allowed)
    elif correction.high < 1 or (low or 0) > 1:
        field = "low"
        if correction.high < 1:
            field = "high"
        why = "where generation and training agree the ratio is 1"
        yield Violation(
            f"{_CORRECTION}.{field}", "leaves 1 outside the band", why, (getattr(usual, field),) if usual else ()
        )


def _aggregation(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    loss = config.algorithm.policy_loss
    if loss.loss_agg_mode not in AGGREGATIONS:
        return
    if loss.custom is not None:
        allowed = loss.custom.aggregations
        why = f"{_LOSS}.custom.aggregations does not name it"
    elif loss.loss_mode in LOSSES:
        allowed = LOSSES[loss.loss_mode].aggregations
        why = (
            f"{loss.loss_mode} is defined per sequence, and {loss.loss_agg_mode} would weigh sequences by their length"
        )
    else:
        return
    if allowed and loss.loss_agg_mode not in allowed:
        why = f"{why}; {_LOSS}.force: true keeps it as it is"
        yield Violation(f"{_LOSS}.loss_agg_mode", f"does not go with loss_mode {loss.loss_mode}", why, allowed)


def _clip(name: str) -> Rule:
    def judge(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
        limit = _clip_limit(config)
        value = getattr(config.algorithm.policy_loss, name)
        if limit is not None and value >= limit * _OTHER_SCALE:
            why = (
                "the ratio of a whole sequence is a mean over its tokens and spreads as 1/sqrt(length). So a band "
                f"made for single tokens never clips; {_LOSS}.force: true keeps it as it is"
            )
            rule = (
                "is a token-level clip, too wide for loss_mode "
                f"{config.algorithm.policy_loss.loss_mode} (at most {limit:g})"
            )
            yield Violation(f"{_LOSS}.{name}", rule, why, (3e-4, 4e-4))

    return judge


def _clip_limit(config: RunConfig) -> float | None:
    """Returns the widest sensible clip ratio of the loss, or None where it has no such limit."""
    loss = config.algorithm.policy_loss
    if loss.loss_mode in LOSSES:
        return LOSSES[loss.loss_mode].clip_warning_above
    return None


def _is(config: RunConfig, kind: Callable[[LossSpec], bool]) -> bool:
    """Tells whether the loss is of a kind by its row in LOSSES. A loss of the user's is of none."""
    spec = LOSSES.get(config.algorithm.policy_loss.loss_mode)
    return spec is not None and kind(spec)


def _unless_forced(rule: Rule) -> Rule:
    """Wraps a rule against a likely mistake, so that algorithm.policy_loss.force switches it off."""

    def judged(config: RunConfig, model: ModelSpec) -> Iterator[Violation]:
        if config.algorithm.policy_loss.force:
            return iter(())
        return rule(config, model)

    return judged


# besides widths of clips and aggregations
_LIKELY_MISTAKES = (
    RuleRow(
        f"{_LOSS}.clip_ratio_high",
        lambda c, m: _is(c, lambda loss: loss.clips_tokens) and c.algorithm.policy_loss.clip_ratio_high < TOKEN_BAND,
        "is too narrow for loss_mode {c.algorithm.policy_loss.loss_mode}, which clips single tokens "
        f"(at least {TOKEN_BAND:g})",
        f"a range for the ratio of a whole sequence would clip nearly all tokens; {_LOSS}.force: true keeps it",
        (0.2, 0.28),
    ),
    RuleRow(
        "algorithm.anchor",
        lambda c, m: _is(c, lambda loss: loss.needs_rollout_anchor) and c.algorithm.anchor != "rollout",
        "must be rollout with loss_mode {c.algorithm.policy_loss.loss_mode}",
        "{c.algorithm.policy_loss.loss_mode} bounds how far a step leads from the policy that generated; "
        f"{_LOSS}.force: true keeps it as it is",
        ("rollout",),
    ),
)

LOSS_RULES = (
    _estimator,
    _parts,
    *map(_of_parts, ("gdpo_reward_keys", "gdpo_reward_weights")),
    RuleRow(
        "algorithm.gdpo_reward_weights",
        lambda c, m: (
            _needs_parts(c) and bool(c.algorithm.gdpo_reward_weights) and not any(c.algorithm.gdpo_reward_weights)
        ),
        "must not all be 0",
        "every advantage would be 0, and nothing would be learned",
    ),
    on_only_where(
        "algorithm.use_kl_in_reward",
        lambda c, m: not _needs_parts(c),
        "must be false with an adv_estimator that reads parts of the reward (gdpo)",
        "it reads the named parts of the reward, and the KL is in none of them; algorithm.use_kl_loss works with it",
    ),
    _parts_with_penalty,
    _by_turn,
    on_only_where(
        "algorithm.use_kl_in_reward",
        lambda c, m: not c.algorithm.by_turn,
        f"must be false with adv_estimator {' or '.join(BY_TURN)}",
        "the estimator credits turns, and this KL belongs to tokens; algorithm.use_kl_loss works with it",
    ),
    _loss_name,
    _group,
    on_only_where(
        "algorithm.use_kl_in_reward",
        lambda c, m: not c.algorithm.use_kl_loss,
        "does not go with algorithm.use_kl_loss: true",
        "the KL to the reference would count twice, once as a reward and once as a loss",
    ),
    RuleRow(
        "algorithm.kl_ctrl.type",
        lambda c, m: c.algorithm.kl_ctrl.type == "adaptive" and not c.algorithm.use_kl_in_reward,
        "must be fixed without algorithm.use_kl_in_reward",
        "it controls the weight of the KL in the reward, and there is none; kl_loss_coef is constant",
        ("fixed",),
    ),
    *map(_of_adaptive, ("target_kl", "horizon")),
    RuleRow(
        "algorithm.kl_ctrl.kl_coef",
        lambda c, m: c.algorithm.kl_ctrl.type == "adaptive" and c.algorithm.kl_ctrl.kl_coef == 0,
        "must be above 0 with algorithm.kl_ctrl.type: adaptive",
        "the weight changes by a part of itself, so it would stay 0",
    ),
    RuleRow(
        "algorithm.kl_ctrl.horizon",
        lambda c, m: (
            c.algorithm.kl_ctrl.type == "adaptive" and c.algorithm.kl_ctrl.horizon <= LARGEST_ERROR * _samples(c)
        ),
        f"must be above {LARGEST_ERROR:g} times the samples of a step (data.train_batch_size x rollout.n)",
        "a step with a small KL would make the weight 0 or negative",
        lambda c, m: (10.0 * _samples(c),),
    ),
    *map(_without_level, ("mode", "weigh", "low", "high", "reject", "reject_low", "reject_high")),
    _correction_mode,
    _correction_band,
    _rejection_band,
    RuleRow(
        f"{_CORRECTION}.weigh",
        lambda c, m: (
            c.algorithm.rollout_correction.weigh is not None
            and c.algorithm.rollout_correction.level is not None
            and c.algorithm.rollout_correction.mode not in BAND_MODES
        ),
        f"must be null unless mode is {' or '.join(BAND_MODES)}",
        "only these two modes can leave weight 1 inside the range",
        (None,),
    ),
    RuleRow(
        f"{_CORRECTION}.mode",
        lambda c, m: (
            c.algorithm.policy_loss.loss_mode == "geo_mean"
            and c.algorithm.rollout_correction.mode == "icepop"
            and c.algorithm.rollout_correction.level == "token"
        ),
        "must not be icepop at level token with loss_mode geo_mean",
        "the loss weighs a response by the geometric mean of its tokens' weights, so a single weight of 0 would take "
        "the whole response out",
        tuple(mode for mode in MODES if mode != "icepop"),
    ),
    RuleRow(
        f"{_CORRECTION}.level",
        lambda c, m: c.algorithm.rollout_correction.level is not None and c.algorithm.anchor == "rollout",
        "does not go with algorithm.anchor: rollout",
        "the loss takes its ratio against generation already, so a correction would count the same gap twice; use "
        "algorithm.anchor: recompute with a correction",
        (None,),
    ),
    RuleRow(
        "algorithm.adv_estimator",
        lambda c, m: (
            c.algorithm.adv_estimator == "maxrl"
            and (c.algorithm.use_kl_in_reward or c.algorithm.overlong_buffer.enable)
        ),
        "maxrl does not go with algorithm.use_kl_in_reward or algorithm.overlong_buffer.enable",
        "it divides by the mean score of a group, which a penalty may make negative; use_kl_loss works with it",
        ("grpo",),
    ),
    RuleRow(
        "reward.failure_score",
        lambda c, m: c.algorithm.adv_estimator == "maxrl" and (c.reward.failure_score or 0) < 0,
        "must be at least 0 with algorithm.adv_estimator: maxrl",
        "it divides by the mean score of a group",
        (0.0,),
    ),
    RuleRow(
        "reward.bonus_rules",
        lambda c, m: c.algorithm.adv_estimator == "maxrl" and min(c.reward.bonus_rules.values(), default=0) < 0,
        "must have no weight below 0 with algorithm.adv_estimator: maxrl",
        "it divides by the mean score of a group, which must not be negative",
    ),
    RuleRow(
        "actor.ppo_epochs",
        lambda c, m: c.algorithm.on_policy and c.actor.ppo_epochs > 1,
        "must be 1 with " + _ON_POLICY,
        f"after the first of several updates the policy is no longer the one that generated; {_PASS}",
        (1,),
    ),
    RuleRow(
        "actor.shuffle",
        lambda c, m: c.actor.ppo_epochs > 1 and c.actor.shuffles and c.actor.router_replay == "R2" and m.is_moe,
        "must be false with actor.router_replay: R2 and actor.ppo_epochs above 1",
        "R2 replays the routes of whole micro-batches, and drawn mini-batches have others in each epoch; R3 replays "
        "each token's own",
        (False,),
    ),
    RuleRow(
        "actor.shuffle",
        lambda c, m: c.actor.ppo_epochs > 1 and c.actor.shuffles and _is(c, lambda loss: loss.selects_tokens),
        f"must be false with loss_mode {_SELECTING} and actor.ppo_epochs above 1",
        "it chooses tokens of the whole mini-batch before the update, and drawn mini-batches are others in each epoch",
        (False,),
    ),
    RuleRow(
        "actor.ppo_mini_batch_size",
        lambda c, m: c.algorithm.on_policy and c.mini_batches > 1,
        "must be data.train_batch_size = {c.data.train_batch_size} with " + _ON_POLICY,
        f"after the first of several updates the policy is no longer the one that generated; {_PASS}",
        lambda c, m: (c.data.train_batch_size,),
    ),
    RuleRow(
        f"{_CORRECTION}.level",
        lambda c, m: c.algorithm.rollout_correction.level is not None and c.algorithm.on_policy,
        f"does not go with {_ON_POLICY}",
        f"its weights and rejections are computed before the update, from old log-probs; {_PASS}",
        (None,),
    ),
    on_only_where(
        "algorithm.use_kl_in_reward",
        lambda c, m: not c.algorithm.on_policy,
        f"does not go with {_ON_POLICY}",
        f"rewards are computed before the update, and this KL needs old log-probs; {_PASS}, use_kl_loss needs none",
    ),
    on_only_where(
        "record.trainer_log_probs",
        lambda c, m: not c.algorithm.on_policy,
        f"does not go with {_ON_POLICY}",
        f"the trainer's log-probs are known only after the rows are gone; {_PASS}",
    ),
    RuleRow(
        f"{_LOSS}.loss_mode",
        lambda c, m: c.algorithm.on_policy and _is(c, lambda loss: loss.selects_tokens),
        f"must not be {_SELECTING} with {_ON_POLICY}",
        f"it chooses tokens of the whole mini-batch before the update, by old log-probs; {_PASS}",
        tuple(name for name, each in LOSSES.items() if not (each.selects_tokens or each.needs_rollout_anchor)),
    ),
    RuleRow(
        "actor.router_replay",
        lambda c, m: c.algorithm.on_policy and c.actor.router_replay == "R2" and m.is_moe,
        f"must not be R2 with {_ON_POLICY}",
        "R2 replays the routes of the pass for old log-probs, which on_policy leaves out; in a single "
        "update the routes are the same anyway",
        ("disabled", "R3"),
    ),
    RuleRow(
        "data.gen_batch_size",
        lambda c, m: not c.algorithm.filter_groups.enable and c.data.prompts_at_a_time != c.data.train_batch_size,
        "must be data.train_batch_size = {c.data.train_batch_size}",
        f"without {_GROUPS}.enable a step trains on all that it generates",
        lambda c, m: (c.data.train_batch_size,),
    ),
    RuleRow(
        f"{_GROUPS}.max_num_gen_batches",
        lambda c, m: (
            c.algorithm.filter_groups.enable
            and c.algorithm.filter_groups.on_exhausted != "error"
            and c.algorithm.filter_groups.max_num_gen_batches == 0
        ),
        "must be at least 1 unless on_exhausted is error",
        "0 sets no limit, so the batches are never used up",
        (5, 10),
    ),
    RuleRow(
        "algorithm.overlong_buffer.len",
        lambda c, m: (
            c.algorithm.overlong_buffer.enable and (c.algorithm.overlong_buffer.len or 0) > c.data.max_response_length
        ),
        "must be at most data.max_response_length = {c.data.max_response_length}",
        "the penalty begins that many tokens before the longest response",
        lambda c, m: (max(c.data.max_response_length // 5, 1),),
    ),
    RuleRow(
        f"{_LOSS}.clip_cov_lb",
        lambda c, m: (
            c.algorithm.policy_loss.loss_mode == "clip_cov"
            and c.algorithm.policy_loss.clip_cov_lb >= c.algorithm.policy_loss.clip_cov_ub
        ),
        "must be below clip_cov_ub = {c.algorithm.policy_loss.clip_cov_ub:g}",
        "tokens are taken whose covariance lies between the two",
        (1.0,),
    ),
    *map(_unless_forced, (_aggregation, *map(_clip, _CLIPS), *_LIKELY_MISTAKES)),
)
