"""Keys of the algorithm: advantage, loss, trust region, correction, dynamic sampling, penalties."""

from typing import Literal

from mrl.algo.kl_control import next_kl_coef
from mrl.algo.spec import (
    ADVANTAGES,
    AGGREGATIONS,
    ALIASES,
    ANCHORS,
    BY_TURN,
    KL_TYPES,
    LEVELS,
    NEEDS_CRITIC,
    ON_POLICY,
)
from mrl.config.section import Section, key, known_name


class CustomLossConfig(Section):
    """A loss of your own. The Python file at `path` binds a function to `loss_mode` with @register_loss."""

    path: str = key(..., "Python file that registers your loss under the name in loss_mode.", is_path=True)
    aggregations: tuple[str, ...] = key(
        (),
        "Aggregations that the loss may be combined with; empty: all.",
        rule=known_name(AGGREGATIONS, ALIASES),
    )
    parameters: dict[str, float] = key({}, "Constants that the loss is given.")


class PolicyLossConfig(Section):
    """The policy loss. Its names and allowed pairs are in mrl/algo/spec.py."""

    loss_mode: str = key("gspo", "Name of the policy loss.", advice="gspo for models with experts. The list is below.")
    custom: CustomLossConfig | None = None
    loss_agg_mode: str = key(
        "seq-mean-token-mean",
        "How the losses of tokens become one number.",
        advice="seq-mean-token-mean with gspo and the first GRPO, token-mean with DAPO and Dr. GRPO's relatives. "
        "Gradients change tenfold with it: never compare learning rates between aggregations.",
        rule=known_name(AGGREGATIONS, ALIASES),
    )
    clip_ratio_low: float = key(
        3e-4,
        "Distance of the trust region's lower bound from a ratio of 1. dppo_tv: distance of probabilities. "
        "dppo_kl: KL.",
        ge=0,
        advice="3e-4 for gspo, 0.2 for losses by token. gspo with 0.2 never clips, so mrl refuses the pair.",
        verl="actor_rollout_ref.actor.clip_ratio_low",
    )
    clip_ratio_high: float = key(
        4e-4,
        "Distance of the trust region's upper bound from a ratio of 1. dppo_tv: distance of probabilities. "
        "dppo_kl: KL.",
        ge=0,
        advice="4e-4 for gspo, 0.28 for DAPO (it keeps entropy high), 0.2 for GRPO.",
        verl="actor_rollout_ref.actor.clip_ratio_high",
    )
    clip_ratio_c: float = key(
        10.0,
        "Bound of the loss where the advantage is negative, for losses with a dual clip. dppo_tv and dppo_kl: largest "
        "ratio that weighs a token.",
        gt=1,
        verl="actor_rollout_ref.actor.clip_ratio_c",
    )
    loss_scale_factor: float | None = key(
        None,
        "Divisor of the aggregation seq-mean-token-sum-norm; left out: data.max_response_length.",
        gt=0,
        verl="actor_rollout_ref.actor.loss_scale_factor",
    )
    dro_beta: float = key(
        0.05,
        "dro: weight of the squared log ratio, which holds the policy where it was.",
        gt=0,
        advice="0.05, Tinker's default. The larger, the smaller the step.",
        verl="actor_rollout_ref.actor.policy_loss.dro_beta",
    )
    tau_pos: float = key(
        1.0,
        "sapo: temperature of the gate where the advantage is positive.",
        gt=0,
        verl="actor_rollout_ref.actor.tau_pos",
    )
    tau_neg: float = key(1.05, "sapo: temperature of the gate elsewhere.", gt=0, verl="actor_rollout_ref.actor.tau_neg")
    clip_cov_ratio: float = key(
        2e-4,
        "clip_cov: share of tokens that are left out of the loss.",
        ge=0,
        le=1,
        verl="actor_rollout_ref.actor.policy_loss.clip_cov_ratio",
    )
    clip_cov_lb: float = key(
        1.0,
        "clip_cov: a token is left out only where its covariance is above this.",
        verl="actor_rollout_ref.actor.policy_loss.clip_cov_lb",
    )
    clip_cov_ub: float = key(
        5.0,
        "clip_cov: a token is left out only where its covariance is below this.",
        verl="actor_rollout_ref.actor.policy_loss.clip_cov_ub",
    )
    kl_cov_ratio: float = key(
        2e-4,
        "kl_cov: share of tokens that are penalised.",
        ge=0,
        le=1,
        verl="actor_rollout_ref.actor.policy_loss.kl_cov_ratio",
    )
    ppo_kl_coef: float = key(
        0.1,
        "kl_cov: weight of the penalty.",
        ge=0,
        verl="actor_rollout_ref.actor.policy_loss.ppo_kl_coef",
    )
    force: bool = key(False, "Accepts a pair of loss and aggregation, or a clip, that mrl refuses as a likely mistake.")


class RolloutCorrectionConfig(Section):
    """Weights or rejects tokens for the gap between the probabilities of engine and trainer.

    Named combinations are in mrl/algo/spec.py.
    """

    level: str | None = key(
        None,
        "Level at which the gap between engine and trainer is corrected; left out: no correction.",
        advice="Look at training/rollout_log_probs_abs_diff_mean first. A large gap comes more often from a broken "
        "sync than from rounding.",
        rule=known_name(LEVELS, ALIASES),
    )
    mode: str = key(
        "truncate",
        "What happens outside the bounds. truncate: the ratio is bounded above. clip: on both sides. mask: tokens or "
        "responses leave the loss and its denominators. icepop: they have weight 0 and stay in the denominators.",
    )
    weigh: bool | None = key(
        None,
        "mask and icepop: weighs what is inside the bounds by its ratio. false: its weight is 1, as of verl's "
        "rollout_rs without rollout_is. Left out: true, but false at level geometric, whose mean is no importance "
        "weight.",
    )
    low: float | None = key(
        None, "Lower bound of the ratio, the trainer's probability over the engine's; left out: none.", ge=0
    )
    high: float = key(2.0, "Upper bound of the ratio, the trainer's probability over the engine's.", gt=0)
    reject: str | None = key(
        None,
        "Level of a rejection beside the weights of modes truncate, clip and icepop: tokens or responses whose ratio "
        "at this level is outside reject_low to reject_high leave the loss and its denominators. Left out: none.",
        advice="geometric beside level token is verl's Geo-RS-Token-TIS.",
        rule=known_name(LEVELS, ALIASES),
    )
    reject_low: float | None = key(None, "Lower bound of the ratio that reject tests; left out: none.", ge=0)
    reject_high: float = key(2.0, "Upper bound of the ratio that reject tests.", gt=0)


class FilterGroupsConfig(Section):
    """Dynamic sampling (DAPO): new prompts replace groups whose responses all have the same value."""

    enable: bool = key(
        False,
        "Replaces groups whose responses all have the same value by new ones (dynamic sampling).",
        advice="true with DAPO. Such groups give no gradient, and replacing them costs generation.",
        verl="algorithm.filter_groups.enable",
    )
    metric: str = key(
        "score",
        "The value that is compared within a group. score: what the reward function returned. reward: the "
        "score after penalties. Other names are parts of the reward.",
    )
    max_num_gen_batches: int = key(
        0,
        "Most batches of prompts that one step may generate; 0: no limit.",
        ge=0,
        advice="10.",
    )
    on_exhausted: Literal["error", "partial", "unfiltered"] = key(
        "error",
        "What happens when these batches are used up. error: ends the run. partial: trains on the groups so "
        "far. unfiltered: fills up with groups whose values are equal.",
    )


class OverlongBufferConfig(Section):
    """Soft penalty for long responses (DAPO).

    It falls from 0 at data.max_response_length - len tokens to -penalty_factor at data.max_response_length.
    """

    enable: bool = key(
        False,
        "Adds a penalty that grows over the last tokens before data.max_response_length.",
        advice="true with DAPO. It keeps responses from growing to the limit.",
    )
    len: int | None = key(
        None,
        "Tokens over which the penalty grows; left out: a fifth of data.max_response_length.",
        ge=1,
        unit="tokens",
        advice="A fifth of max_response_length, such as 4096 of 20480.",
    )
    penalty_factor: float = key(1.0, "Penalty of a response that reaches the limit.", ge=0)


class KlControlConfig(Section):
    """The weight of the KL that is subtracted from the reward."""

    type: Literal["fixed", "adaptive"] = key(
        "fixed",
        "Whether the weight stays as it is, or follows the measured KL (arXiv:1909.08593): it grows while the KL is "
        "above target_kl, and falls while it is below.",
        advice="fixed. adaptive where a run should end at a certain distance from the reference model.",
        verl="algorithm.kl_ctrl.type",
    )
    kl_coef: float = key(
        1e-3,
        "Weight of the KL in the reward, with use_kl_in_reward. adaptive: that of the first step.",
        ge=0,
        verl="algorithm.kl_ctrl.kl_coef",
    )
    target_kl: float = key(
        0.1,
        "adaptive: KL a token that the weight aims at, in nats (actor/reward_kl).",
        gt=0,
        unit="nats",
        advice="1e-3 to 1e-2 where policies stay near their reference: while the KL is below, the weight falls.",
        verl="algorithm.kl_ctrl.target_kl",
    )
    horizon: float = key(
        10_000,
        "adaptive: how slowly the weight follows, in samples: a step of S samples changes it by at most 0.2 S / horizon"
        " of itself.",
        gt=0,
        unit="samples",
        advice="10 times the samples of a step, or more.",
        verl="algorithm.kl_ctrl.horizon",
    )

    def next_coef(self, kl_coef: float, kl: float, samples: int) -> float:
        """Returns the weight of the next step, as `next_kl_coef`."""
        return next_kl_coef(self.type, kl_coef, kl, self.target_kl, samples, self.horizon)


class CustomAdvantageConfig(Section):
    """An advantage of your own. The file at `path` binds a function to `adv_estimator` with @register_advantage."""

    path: str = key(..., "Python file that registers your advantage under the name in adv_estimator.", is_path=True)
    parameters: dict[str, float] = key({}, "Constants that the advantage is given.")


class AlgorithmConfig(Section):
    """Advantage, KL, corrections and loss."""

    adv_estimator: str = key(
        "grpo",
        "How rewards become advantages.",
        advice="grpo. The list is below.",
        verl="algorithm.adv_estimator",
    )
    custom_advantage: CustomAdvantageConfig | None = None
    norm_adv_by_std_in_grpo: bool = key(
        True,
        "Divides advantages by the standard deviation of their group.",
        advice="true. Dr. GRPO has false.",
        verl="algorithm.norm_adv_by_std_in_grpo",
    )
    gdpo_reward_keys: tuple[str, ...] = key(
        (),
        "gdpo: parts of the reward, each of which is normalised separately.",
        verl="algorithm.gdpo_reward_keys",
    )
    gdpo_reward_weights: tuple[float, ...] = key(
        (),
        "gdpo: weight of each part in gdpo_reward_keys; empty: all 1.",
        verl="algorithm.gdpo_reward_weights",
    )
    gamma: float = key(
        1.0,
        "gae: discount of a reward per token of distance. grpo_turn, gigpo and turn_return: per turn of distance.",
        gt=0,
        le=1,
        advice="1 for gae, because the reward comes at the end of a response. 0.95 for gigpo, as in its paper.",
    )
    step_advantage_weight: float = key(
        1.0,
        "gigpo: weight of the advantage among turns of the same state, beside that among responses.",
        ge=0,
        advice="1, as in its paper.",
    )
    branch_rewards: Literal["session", "own"] = key(
        "session",
        "grpo_turn, gigpo and turn_return, where an agent's response has several branches: whether each branch ends "
        "with the reward of the response's last turn (session), or has the rewards of its own answers alone (own).",
        advice="own where the agent gives each sub-agent's answers a reward.",
    )
    lam: float = key(
        1.0,
        "gae: discount of later temporal differences. 1 trusts rewards alone, 0 trusts the critic alone.",
        ge=0,
        le=1,
        advice="1. 0.95 once critic/vf_explained_var is well above 0.",
    )
    anchor: str = key(
        "recompute",
        "The log-probs that the trust region starts from. recompute: the trainer computes them before the "
        "update. rollout: the engine's own. on_policy: those of the step's only update, without a separate "
        "pass.",
        advice="on_policy where a step has one update: the gradients equal those of recompute, and one forward pass "
        "is saved.",
        rule=known_name(ANCHORS, ALIASES),
    )
    rollout_correction: RolloutCorrectionConfig = RolloutCorrectionConfig()
    filter_groups: FilterGroupsConfig = FilterGroupsConfig()
    overlong_buffer: OverlongBufferConfig = OverlongBufferConfig()
    overlong_filter: bool = key(
        False,
        "Leaves responses out of training that were cut off at the length limit. Responses whose tool answers "
        "did not fit below the limit are left out, too.",
    )
    use_kl_in_reward: bool = key(
        False,
        "Subtracts the KL to the reference model from the reward.",
        advice="true with PPO; GRPO and DAPO do not use it.",
        verl="algorithm.use_kl_in_reward",
    )
    kl_penalty: str = key(
        "kl", "Estimator of the KL in the reward.", verl="algorithm.kl_penalty", rule=known_name(KL_TYPES, ALIASES)
    )
    kl_ctrl: KlControlConfig = KlControlConfig()
    policy_loss: PolicyLossConfig = PolicyLossConfig()
    entropy_coeff: float = key(
        0.0,
        "Weight of an entropy bonus in the loss.",
        advice="0. Even a small bonus makes long responses drift.",
        verl="actor_rollout_ref.actor.entropy_coeff",
    )
    use_kl_loss: bool = key(
        False,
        "Adds the KL to a reference model to the loss.",
        advice="true for the first form of GRPO. DAPO, GSPO and Dr. GRPO do not use it.",
        verl="actor_rollout_ref.actor.use_kl_loss",
    )
    kl_loss_coef: float = key(
        0.0,
        "Weight of the KL in the loss, with use_kl_loss.",
        ge=0,
        advice="From 0.001. A larger weight makes reward hacking harder, and lowers exploration.",
        verl="actor_rollout_ref.actor.kl_loss_coef",
    )
    kl_loss_type: str = key(
        "low_var_kl",
        "Estimator of the KL in the loss.",
        verl="actor_rollout_ref.actor.kl_loss_type",
        rule=known_name(KL_TYPES, ALIASES),
    )

    @property
    def on_policy(self) -> bool:
        """Whether the only update of a step provides the old log-probs, so that no pass computes them."""
        return self.anchor == ON_POLICY

    @property
    def scores_before_update(self) -> bool:
        """Whether the old policy, a reference model or a critic computes a pass before the update."""
        return not self.on_policy or self.needs_reference or self.needs_critic

    @property
    def needs_critic(self) -> bool:
        """Whether advantages are estimated from a critic's values."""
        return self.adv_estimator in NEEDS_CRITIC

    @property
    def by_turn(self) -> bool:
        """Whether the turns of a response have advantages of their own."""
        return self.adv_estimator in BY_TURN

    @property
    def needs_group(self) -> bool:
        """Whether advantages may compare responses to one prompt. A user's own advantage may."""
        spec = ADVANTAGES.get(self.adv_estimator)
        return spec is None or spec.needs_group

    @property
    def needs_reference(self) -> bool:
        """Whether log-probs of a reference model are needed."""
        return self.use_kl_loss or self.use_kl_in_reward
