"""Keys of the algorithm: advantage, loss, trust region, correction, dynamic sampling, penalties."""

from typing import Literal

from mrl.algo.spec import AGGREGATIONS, ALIASES, ANCHORS, KL_TYPES, LEVELS, NEEDS_CRITIC, ON_POLICY
from mrl.config.section import Section, key, known_name


class CustomLossConfig(Section):
    """A user's loss: the Python file at `path` binds a function to `loss_mode` with @register_loss; what holds for it
    stands here.
    """

    path: str = key(..., "Python file that registers a loss of your own under the name in loss_mode.", is_path=True)
    aggregations: tuple[str, ...] = key(
        (),
        "Aggregations it may be combined with; none named: all.",
        rule=known_name(AGGREGATIONS, ALIASES),
    )
    parameters: dict[str, float] = key({}, "Its constants.")


class PolicyLossConfig(Section):
    """Policy loss; names and allowed pairs stand in mrl/algo/spec.py."""

    loss_mode: str = key("gspo", "The policy loss.", advice="gspo for MoE; the list is below.")
    custom: CustomLossConfig | None = None
    loss_agg_mode: str = key(
        "seq-mean-token-mean",
        "How token losses become one number.",
        advice="seq-mean-token-mean with gspo (and the first GRPO), token-mean with DAPO and Dr. GRPO's "
        "kin. It changes the size of gradients tenfold: never compare learning rates across it.",
        rule=known_name(AGGREGATIONS, ALIASES),
    )
    clip_ratio_low: float = key(
        3e-4,
        "Lower half of the trust region, below 1.",
        ge=0,
        advice="3e-4 for gspo, 0.2 for token-level losses. gspo with 0.2 never clips; mrl refuses the pair.",
        verl="actor_rollout_ref.actor.clip_ratio_low",
    )
    clip_ratio_high: float = key(
        4e-4,
        "Upper half, above 1.",
        ge=0,
        advice="4e-4 for gspo, 0.28 for DAPO (it keeps entropy up), 0.2 for GRPO.",
        verl="actor_rollout_ref.actor.clip_ratio_high",
    )
    clip_ratio_c: float = key(
        10.0,
        "Dual clip, of the losses that have one: bound of the loss where the advantage is negative.",
        gt=1,
        verl="actor_rollout_ref.actor.clip_ratio_c",
    )
    loss_scale_factor: float | None = key(
        None,
        "Divisor of seq-mean-token-sum-norm; left out: max_response_length.",
        gt=0,
        verl="actor_rollout_ref.actor.loss_scale_factor",
    )
    tau_pos: float = key(
        1.0,
        "sapo: temperature of the gate where the advantage is positive.",
        gt=0,
        verl="actor_rollout_ref.actor.tau_pos",
    )
    tau_neg: float = key(1.05, "sapo: temperature elsewhere.", gt=0, verl="actor_rollout_ref.actor.tau_neg")
    clip_cov_ratio: float = key(
        2e-4,
        "clip_cov: share of tokens left out.",
        ge=0,
        le=1,
        verl="actor_rollout_ref.actor.policy_loss.clip_cov_ratio",
    )
    clip_cov_lb: float = key(
        1.0,
        "clip_cov: covariance that a token must exceed to be left out.",
        verl="actor_rollout_ref.actor.policy_loss.clip_cov_lb",
    )
    clip_cov_ub: float = key(
        5.0,
        "clip_cov: and stay below.",
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
    force: bool = key(False, "Accepts a pair of loss and aggregation or clip that is refused as a likely mistake.")


class RolloutCorrectionConfig(Section):
    """Weights or rejections for the gap between generation's and training's probabilities; named points in
    mrl/algo/spec.py.
    """

    level: str | None = key(
        None,
        "Level at which the gap between engine and trainer is corrected; left out: no correction.",
        advice="Look at training/rollout_log_probs_abs_diff_mean first: a large gap is a broken sync more often "
        "than a matter of numerics.",
        rule=known_name(LEVELS, ALIASES),
    )
    mode: str = key("truncate", "What happens to a ratio outside the bounds.")
    low: float | None = key(None, "Lower bound of the ratio training / generation; left out: none.", ge=0)
    high: float = key(2.0, "Upper bound of the ratio.", gt=0)


class FilterGroupsConfig(Section):
    """Dynamic sampling (DAPO): groups whose responses all have the same value are replaced by new prompts."""

    enable: bool = key(
        False,
        "Dynamic sampling: groups whose responses all have the same value are replaced by new ones.",
        advice="DAPO's. They give no gradient, and cost generation.",
        verl="algorithm.filter_groups.enable",
    )
    metric: str = key(
        "score",
        "Which value is compared inside a group: score (as the reward function gave it), reward (after "
        "penalties), or a part of the reward by name.",
    )
    max_num_gen_batches: int = key(
        0,
        "Batches of prompts that one step may generate; 0: without end.",
        ge=0,
        advice="10.",
    )
    on_exhausted: Literal["error", "partial", "unfiltered"] = key(
        "error",
        "What happens when they are used up. partial: trains on what there is; unfiltered: fills up with "
        "groups that are all alike.",
    )


class OverlongBufferConfig(Section):
    """Soft overlong penalty (DAPO): from 0 at data.max_response_length - len tokens down to -penalty_factor at
    max_response_length.
    """

    enable: bool = key(
        False,
        "A penalty that grows over the last tokens before the limit.",
        advice="DAPO's; keeps length in bounds.",
    )
    len: int | None = key(
        None,
        "Tokens over which it grows; left out: a fifth of data.max_response_length.",
        ge=1,
        unit="tokens",
        advice="A fifth of max_response_length: 4096 of 20480.",
    )
    penalty_factor: float = key(1.0, "Penalty at the limit.", ge=0)


class KlControlConfig(Section):
    """KL in the reward."""

    kl_coef: float = key(1e-3, "Its weight.", ge=0, verl="algorithm.kl_ctrl.kl_coef")


class CustomAdvantageConfig(Section):
    """A user's advantage: the Python file at `path` binds a function to `adv_estimator` with @register_advantage."""

    path: str = key(
        ..., "Python file that registers an advantage of your own under the name in adv_estimator.", is_path=True
    )
    parameters: dict[str, float] = key({}, "Its constants.")


class AlgorithmConfig(Section):
    """Advantage and loss."""

    adv_estimator: str = key(
        "grpo",
        "How rewards become advantages.",
        advice="grpo; the list is below.",
        verl="algorithm.adv_estimator",
    )
    custom_advantage: CustomAdvantageConfig | None = None
    norm_adv_by_std_in_grpo: bool = key(
        True,
        "Advantages are divided by the group's standard deviation.",
        advice="false is Dr. GRPO.",
        verl="algorithm.norm_adv_by_std_in_grpo",
    )
    gdpo_reward_keys: tuple[str, ...] = key(
        (),
        "gdpo: the parts of the reward that are normalised each for itself.",
        verl="algorithm.gdpo_reward_keys",
    )
    gdpo_reward_weights: tuple[float, ...] = key(
        (),
        "gdpo: their weights; none: all 1.",
        verl="algorithm.gdpo_reward_weights",
    )
    gamma: float = key(
        1.0,
        "gae: discount of a reward for each token that it is away.",
        gt=0,
        le=1,
        advice="1: the reward stands at the end of a response.",
    )
    lam: float = key(
        1.0,
        "gae: discount of later temporal differences; 1 trusts rewards alone, 0 the critic alone.",
        ge=0,
        le=1,
        advice="1, or 0.95 once critic/vf_explained_var is well above 0.",
    )
    anchor: str = key(
        "recompute",
        "Whose log-probs the trust region starts from: the trainer's, recomputed; the engine's own (rollout); those "
        "of the step's one update itself (on_policy), without a pass for them.",
        advice="on_policy where a step is one update: the same gradients as recompute, a forward pass less.",
        rule=known_name(ANCHORS, ALIASES),
    )
    rollout_correction: RolloutCorrectionConfig = RolloutCorrectionConfig()
    filter_groups: FilterGroupsConfig = FilterGroupsConfig()
    overlong_buffer: OverlongBufferConfig = OverlongBufferConfig()
    overlong_filter: bool = key(
        False,
        "Responses cut off at the limit are not trained on, and neither are those whose tools' answers have no room in "
        "it.",
    )
    use_kl_in_reward: bool = key(
        False,
        "Subtracts the KL to the reference model from the reward.",
        advice="PPO does; GRPO and DAPO do not.",
        verl="algorithm.use_kl_in_reward",
    )
    kl_penalty: str = key(
        "kl", "Estimator of that KL.", verl="algorithm.kl_penalty", rule=known_name(KL_TYPES, ALIASES)
    )
    kl_ctrl: KlControlConfig = KlControlConfig()
    policy_loss: PolicyLossConfig = PolicyLossConfig()
    entropy_coeff: float = key(
        0.0,
        "Weight of an entropy bonus.",
        advice="0; a little of it drives long responses apart.",
        verl="actor_rollout_ref.actor.entropy_coeff",
    )
    use_kl_loss: bool = key(
        False,
        "Adds the KL to a reference model to the loss.",
        advice="GRPO's first form; DAPO, GSPO and Dr. GRPO go without.",
        verl="actor_rollout_ref.actor.use_kl_loss",
    )
    kl_loss_coef: float = key(
        0.0,
        "Its weight.",
        ge=0,
        advice="From 0.001; more keeps rewards from being gamed, and exploration down.",
        verl="actor_rollout_ref.actor.kl_loss_coef",
    )
    kl_loss_type: str = key(
        "low_var_kl",
        "Estimator of that KL.",
        verl="actor_rollout_ref.actor.kl_loss_type",
        rule=known_name(KL_TYPES, ALIASES),
    )

    @property
    def on_policy(self) -> bool:
        """Whether the one update of a step gives the old log-probs itself, so that no pass is made for them."""
        return self.anchor == ON_POLICY

    @property
    def scores_before_update(self) -> bool:
        """Whether there is a pass before the update, under the old policy, of a reference model or of a critic."""
        return not self.on_policy or self.needs_reference or self.needs_critic

    @property
    def needs_critic(self) -> bool:
        """Whether advantages are estimated from the values of a critic."""
        return self.adv_estimator in NEEDS_CRITIC

    @property
    def needs_reference(self) -> bool:
        """Whether log-probs of a reference model are needed."""
        return self.use_kl_loss or self.use_kl_in_reward
