"""Tables of advantages, losses, aggregations, KL estimators and corrections, with their properties; no torch.

Configuration and docs read these tables. The implementations bind to them by name, and a test compares the two sets. So
every name here has an implementation. Names are verl's; ALIASES holds names that other projects use.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class AdvantageSpec:
    """An advantage estimator.

    `needs_group`: it compares responses to one prompt, so it needs several of them. `needs_parts`: it reads the parts
    of the reward that algorithm.gdpo_reward_keys names. `by_turn`: turns of a response differ in it.
    """

    name: str
    needs_group: bool
    needs_parts: bool
    summary: str
    by_turn: bool = False


@dataclass(frozen=True)
class AggregationSpec:
    """An aggregation. `denominator` is the global count that divides the sum; None: nothing does.

    `needs_scale_factor`: it needs `loss_scale_factor`.
    """

    name: str
    denominator: Literal["tokens", "sequences"] | None
    needs_scale_factor: bool
    summary: str


@dataclass(frozen=True)
class LossSpec:
    """A policy loss.

    * `aggregations`: those under which the loss is that of its paper.
    * `constants`: keys of algorithm.policy_loss that it reads, beside the two bounds of the clip.
    * `clip_warning_above`: a larger clip ratio is noted, and refused from a multiple of it on (config/loss_rules.py).
    * `clips_tokens`: a clip ratio below TOKEN_BAND is a likely mistake, since it suits the ratio of a sequence.
    * `needs_rollout_anchor`: it measures the change since generation, so it needs `anchor: rollout`.
    * `selects_tokens`: it treats some tokens differently, which mrl.algo.selection chooses from a whole mini-batch.
    """

    name: str
    aggregations: tuple[str, ...]
    summary: str
    clip_warning_above: float | None = None
    needs_rollout_anchor: bool = False
    selects_tokens: bool = False
    has_dual_clip: bool = False
    constants: tuple[str, ...] = ()
    clips_tokens: bool = False


@dataclass(frozen=True)
class KlSpec:
    """A KL estimator. `estimator` gives the value.

    With `k2_gradient` the gradient is k2's, whatever gives the value (verl's trailing `+`).
    """

    name: str
    estimator: Literal["k1", "abs", "k2", "k3"]
    k2_gradient: bool
    summary: str


@dataclass(frozen=True)
class CorrectionSpec:
    """A published correction as a point on the two axes, with the bounds of its authors or users."""

    level: str
    mode: str
    low: float | None
    high: float
    summary: str
    weigh: bool = True  # whether what is inside the band is weighed by its ratio


def _table(*specs):
    return {spec.name: spec for spec in specs}


def _advantage(
    name: str, summary: str, needs_group: bool = True, needs_parts: bool = False, by_turn: bool = False
) -> AdvantageSpec:
    return AdvantageSpec(name, needs_group, needs_parts, summary, by_turn)


ADVANTAGES: dict[str, AdvantageSpec] = _table(
    _advantage(
        "grpo",
        "(score - group mean) / group std (arXiv:2402.03300); norm_adv_by_std_in_grpo=False drops the std (Dr.GRPO)",
    ),
    _advantage("rloo", "score - mean score of the group's other responses (arXiv:2402.14740)"),
    _advantage(
        "reinforce_plus_plus",
        "reward still to come, whitened over all tokens of the batch (arXiv:2501.03262)",
        needs_group=False,
    ),
    _advantage(
        "reinforce_plus_plus_baseline", "score - group mean, whitened over all tokens of the batch (arXiv:2501.03262)"
    ),
    _advantage(
        "grpo_passk",
        "only the group's best response counts, by its lead over the second (arXiv:2503.19595)",
    ),
    _advantage(
        "gdpo",
        "each part of the reward as in grpo, weighted sum, whitened over all tokens of the batch (arXiv:2601.05242)",
        needs_parts=True,
    ),
    _advantage(
        "maxrl",
        "(score - group mean) / group mean, of scores that are at least 0: maximum likelihood of a success (MaxRL, "
        "arXiv:2602.02710)",
    ),
    _advantage("opo", "score - mean score of the group weighted by length (arXiv:2505.23585)"),
    _advantage(
        "gae",
        "a critic's temporal differences, discounted and summed, whitened over all tokens of the batch "
        "(PPO, arXiv:1506.02438)",
        needs_group=False,
    ),
    _advantage(
        "grpo_turn",
        "a turn's discounted return to go against the group's at the same turn (arXiv:2402.03300, by turn)",
        by_turn=True,
    ),
    _advantage(
        "gigpo",
        "grpo's, plus a turn's discounted return against all turns of the group behind the same reply "
        "(GiGPO, arXiv:2505.10978)",
        by_turn=True,
    ),
    _advantage(
        "turn_return",
        "a turn's discounted return to go, whitened over all tokens of the batch (REINFORCE, by turn)",
        needs_group=False,
        by_turn=True,
    ),
)
BY_TURN = tuple(name for name, spec in ADVANTAGES.items() if spec.by_turn)

AGGREGATIONS: dict[str, AggregationSpec] = _table(
    AggregationSpec(
        "token-mean", "tokens", False, "every token of the mini-batch weighs the same (DAPO, arXiv:2503.14476)"
    ),
    AggregationSpec("token-sum", None, False, "tokens summed, without a mean (Tinker's losses, verl)"),
    AggregationSpec("seq-mean-token-sum", "sequences", False, "tokens summed in a sequence, mean over sequences"),
    AggregationSpec(
        "seq-mean-token-mean",
        "sequences",
        False,
        "mean over the tokens of a sequence, mean over sequences (GRPO, GSPO)",
    ),
    AggregationSpec(
        "seq-mean-token-sum-norm",
        "sequences",
        True,
        "tokens summed in a sequence and divided by the constant loss_scale_factor, mean over sequences "
        "(Dr.GRPO, arXiv:2503.20783)",
    ),
)

ANY_AGGREGATION = tuple(AGGREGATIONS)
PER_SEQUENCE = ("seq-mean-token-mean",)
# The ratio of a sequence spreads less than that of a token, by sqrt(length). A band of 0.2 never clips it, and 0.02 is
# wide already for 4 tokens.
SEQUENCE_BAND = 0.02
TOKEN_BAND = 0.005  # a tenth of the narrowest in use (DPPO's 0.05); GSPO's 3e-4 would clip nearly every token

# bound of a log ratio, in nats: a larger one tells no more, and its exp overflows in half precision
LOG_RATIO_LIMIT = 20.0

LOSSES: dict[str, LossSpec] = _table(
    LossSpec(
        "gspo",
        PER_SEQUENCE,
        "the sequence's ratio as value of each of its tokens, each token's own gradient, so that advantages and "
        "weights may differ by token (arXiv:2507.18071, eq. 13; eq. 5 where they do not)",
        SEQUENCE_BAND,
    ),
    LossSpec("gspo-token", PER_SEQUENCE, "gspo by the paper's name of eq. 13", SEQUENCE_BAND),
    LossSpec(
        "vanilla",
        ANY_AGGREGATION,
        "token-level PPO clipping with separate bounds (arXiv:1707.06347) and the dual clip (arXiv:1912.09729)",
        has_dual_clip=True,
        constants=("clip_ratio_c",),
        clips_tokens=True,
    ),
    LossSpec(
        "cispo",
        ANY_AGGREGATION,
        "log-probability weighted by the clipped ratio without gradient (arXiv:2506.13585)",
        clips_tokens=True,
    ),
    LossSpec(
        "geo_mean",
        PER_SEQUENCE,
        "geometric mean of a sequence's clipped token ratios (GMPO, arXiv:2507.20673), times the mean of its "
        "advantages and the geometric mean of its weights",
        clips_tokens=True,
    ),
    LossSpec(
        "dro",
        ANY_AGGREGATION,
        "log-probability weighted by the advantage, less a squared log ratio in the place of the clip (DRO, "
        "arXiv:2405.19107; arXiv:2501.12599)",
        constants=("dro_beta",),
    ),
    LossSpec(
        "sapo",
        PER_SEQUENCE,
        "a sigmoid gate in the place of the clip, tau_neg for A <= 0 (arXiv:2511.20347)",
        constants=("tau_pos", "tau_neg"),
    ),
    LossSpec(
        "clip_cov",
        ANY_AGGREGATION,
        "PPO clipping, and no gradient for a few tokens of high covariance of advantage and "
        "log-probability (arXiv:2505.22617)",
        constants=("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub"),
        clips_tokens=True,
        selects_tokens=True,
    ),
    LossSpec(
        "kl_cov",
        ANY_AGGREGATION,
        "unclipped ratio, and |d| as a penalty on the tokens of the highest covariance (arXiv:2505.22617)",
        constants=("kl_cov_ratio", "ppo_kl_coef"),
        selects_tokens=True,
    ),
    LossSpec(
        "dppo_tv",
        ANY_AGGREGATION,
        "tokens masked where the probability moved further than the clip in the advantage's "
        "direction (arXiv:2602.04879)",
        needs_rollout_anchor=True,
        constants=("clip_ratio_c",),
        clips_tokens=True,
    ),
    LossSpec(
        "dppo_kl",
        ANY_AGGREGATION,
        "as dppo_tv, with the binary KL of the probability as the distance (arXiv:2602.04879)",
        needs_rollout_anchor=True,
        constants=("clip_ratio_c",),
    ),
)

KL_TYPES: dict[str, KlSpec] = _table(
    *(
        KlSpec(name + plus, estimator, bool(plus), summary + (", with the gradient of k2" if plus else ""))
        for plus in ("", "+")
        for name, estimator, summary in (
            ("kl", "k1", "log ratio"),
            ("k1", "k1", "log ratio"),
            ("abs", "abs", "absolute log ratio"),
            ("mse", "k2", "half the squared log ratio"),
            ("k2", "k2", "half the squared log ratio"),
            ("low_var_kl", "k3", "exp(-l) + l - 1, never negative"),
            ("k3", "k3", "exp(-l) + l - 1, never negative"),
        )
    )
)

# KL to a teacher over its top tokens; other estimators need only the sampled token's log-prob
REVERSE_OVER_TOP_K = "reverse_kl_topk"  # of the student to the teacher, with all other tokens taken as one
FORWARD_OVER_TOP_K = "forward_kl_topk"  # of the teacher to the student, those tokens alone, as in verl
OVER_TOP_K = (REVERSE_OVER_TOP_K, FORWARD_OVER_TOP_K)

LEVELS = ("token", "sequence", "geometric")
MODES = ("mask", "icepop", "clip", "truncate")
BAND_MODES = ("mask", "icepop")  # those that take out what is outside the band, and may leave the rest at weight 1
CORRECTIONS: dict[str, CorrectionSpec] = {
    "TIS": CorrectionSpec("token", "truncate", None, 2.0, "truncated importance sampling: min(ratio, 2)"),
    "sequence TIS": CorrectionSpec("sequence", "truncate", None, 2.0, "the same with the ratio of the whole response"),
    "MIS": CorrectionSpec(
        "sequence", "mask", 0.5, 2.0, "masked importance sampling: responses outside the band leave the batch"
    ),
    "IcePop": CorrectionSpec("token", "icepop", 0.5, 5.0, "tokens outside the band have weight 0 (arXiv:2510.18855)"),
    "geometric rejection": CorrectionSpec(
        "geometric", "mask", 0.999, 1.001, "responses leave whose mean ratio is outside the band", weigh=False
    ),
}

ON_POLICY = "on_policy"  # the anchor that needs no forward pass: the current log-probs, detached
ANCHORS = ("recompute", "rollout", ON_POLICY)

# names elsewhere -> names here; the message that refuses one suggests the other
ALIASES: dict[str, str] = {
    "ppo": "vanilla",
    "grpo": "vanilla",
    "dapo": "vanilla",
    "gmpo": "geo_mean",
    "dppo": "dppo_tv",
    "gspo_token": "gspo-token",
    "dr_grpo": "grpo",
    "reinforce++": "reinforce_plus_plus",
    "reinforce++-baseline": "reinforce_plus_plus_baseline",
    "pass@k": "grpo_passk",
    "max_rl": "maxrl",
}
NEEDS_CRITIC = ("gae",)  # estimators that read the values of a critic, which is then trained beside the actor
