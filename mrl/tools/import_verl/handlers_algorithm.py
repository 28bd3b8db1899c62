"""Handlers of verl's keys of loss, correction and filter. All other handlers stand in handlers.py."""

from collections.abc import Callable
from typing import Any

from mrl.algo.spec import LOSSES, NEEDS_CRITIC
from mrl.tools.import_verl.keys import A
from mrl.tools.import_verl.report import Import
from mrl.tools.import_verl.verl_command import Override, VerlSettings
from mrl.tools.import_verl.verl_defaults import VERL_DEFAULTS

Handler = Callable[[Override, Import, VerlSettings], None]

# Losses that verl averages within each sequence first, whatever loss_agg_mode says: loss -> in which versions
SEQUENCE_MEANS = {
    "gspo": "verl ignored the key and averaged each sequence first, its repository of August 2026 too; "
    "release 0.9.1 obeys it and would train another objective",
    "sapo": "verl ignores the key and averages each sequence first",
    "geo_mean": "verl ignores the key and takes the mean over the responses of a micro-batch, here of the mini-batch",
}
# Metrics that verl's DAPO trainer sums over a response's tokens: the score, which includes the overlong penalty, and
# the score less the KL penalty.
_METRICS = {"seq_reward": "reward", "seq_final_reward": "reward"}


# The weight of dro's penalty, in verl null until it is set. Tinker's documentation of its dro loss has 0.05.
_BETA = A + "policy_loss.dro_beta"
_OUR_BETA = "algorithm.policy_loss.dro_beta"
_TINKERS_BETA = 0.05


def _loss_mode(o: Override, out: Import, settings: VerlSettings) -> None:
    out.put("renamed", o.key, "algorithm.policy_loss.loss_mode", o.value, line=o.line)
    spec = None
    if isinstance(o.value, str):
        spec = LOSSES.get(o.value)
    if o.value == "dro" and settings.given(_BETA) is None:
        out.put("chosen", "", _OUR_BETA, _TINKERS_BETA, "verl stops without one; this is Tinker's default", o.line)
    bypassed = settings.value("algorithm.rollout_correction.bypass_mode")
    if spec is None or not spec.needs_rollout_anchor or bypassed or settings.as_written:
        return
    why = (
        f"verl measures the step of {o.value} from recomputed log-probs, its paper from those of generation "
        "(algorithm.anchor: rollout)"
    )
    out.put("chosen", "", "algorithm.policy_loss.force", True, why, o.line)
    out.warnings.append(f"line {o.line}: {why}; force: true keeps what verl computes")


def _aggregation(o: Override, out: Import, settings: VerlSettings) -> None:
    to = "algorithm.policy_loss.loss_agg_mode"
    ignored = SEQUENCE_MEANS.get(settings.loss_mode)
    if ignored is not None and o.value != "seq-mean-token-mean" and not settings.as_written:
        why = f"what verl computes for {settings.loss_mode}, whatever this key says ({o.value})"
        out.put("renamed", o.key, to, "seq-mean-token-mean", why, o.line)
        out.warnings.append(
            f"line {o.line}: {settings.loss_mode} with loss_agg_mode={o.value}: {ignored}. seq-mean-token-mean is "
            "written; --as-written keeps the key, and validation then refuses it"
        )
        return
    out.put("renamed", o.key, to, o.value, line=o.line)


def _clip(o: Override, out: Import, settings: VerlSettings) -> None:
    given = [name for name in ("clip_ratio_low", "clip_ratio_high") if A + name in settings.keys]
    for name in ("clip_ratio_low", "clip_ratio_high"):
        if name not in given:
            out.put("renamed", o.key, f"algorithm.policy_loss.{name}", o.value, line=o.line)
    if len(given) == 2:
        out.leave("implied", o.key, o.value, "clip_ratio_low and clip_ratio_high are given and win", o.line)
    else:
        out.warnings.append(
            f"line {o.line}: clip_ratio: verl's loss looks at clip_ratio_low and clip_ratio_high "
            f"first, which default to {VERL_DEFAULTS[A + 'clip_ratio_low']}"
        )


def _tis_cap(o: Override, out: Import, settings: VerlSettings) -> None:
    if not isinstance(o.value, int | float) or o.value <= 0:
        out.leave("implied", o.key, o.value, "no correction", o.line)
        return
    out.put("renamed", o.key, _CORRECTION + "high", float(o.value), line=o.line)
    out.put("implied", "", _CORRECTION + "level", "token", "tis_imp_ratio_cap weighs tokens", o.line)
    out.put("implied", "", _CORRECTION + "mode", "truncate", "tis_imp_ratio_cap truncates", o.line)


def _gamma(o: Override, out: Import, settings: VerlSettings) -> None:
    """Carries gamma over. Of verl's estimators without a critic only reinforce_plus_plus reads it."""
    if settings.estimator in NEEDS_CRITIC:
        out.put("carried", o.key, o.key, o.value, line=o.line)
    elif o.value == 1:
        out.leave("implied", o.key, o.value, "rewards are not discounted", o.line)
    elif settings.estimator == "reinforce_plus_plus":
        out.leave(
            "unsupported", o.key, o.value, "rewards are not discounted here: reinforce_plus_plus has gamma 1", o.line
        )
    else:
        out.leave("not_applicable", o.key, o.value, "the estimator does not discount", o.line)


_CORRECTION = "algorithm.rollout_correction."
# verl's rejections by the ratio itself, newer and older names -> the level here. Each keeps what is inside a band.
_REJECTIONS = {
    "token_k1": "token",
    "seq_sum_k1": "sequence",
    "seq_mean_k1": "geometric",
    "token": "token",
    "sequence": "sequence",
    "geometric": "geometric",
}
_UNKNOWN = "no such correction here; see algorithm.rollout_correction"
_OFF = "it belongs to a correction that is off"
_RATIO_WEIGHS = "with bypass_mode the loss takes its ratio against generation; verl applies no weights beside it"


def _correction(o: Override, out: Import, settings: VerlSettings) -> None:
    name = o.key.rpartition(".")[2]
    weighs = _of_correction(settings, "rollout_is")
    rejects = _of_correction(settings, "rollout_rs")
    bypassed = _of_correction(settings, "bypass_mode") and not settings.ahead
    match name, o.value:
        case (
            "rollout_is" | "rollout_rs" | "rollout_token_veto_threshold" | "rollout_rs_threshold_lower",
            None | False,
        ):
            out.leave("implied", o.key, o.value, "no correction", o.line)
        case ("rollout_is" | "rollout_is_threshold", _) if bypassed:
            out.leave("implied", o.key, o.value, _RATIO_WEIGHS, o.line)
        case ("rollout_rs", _) if bypassed:
            why = "with bypass_mode the loss takes its ratio against generation; nothing is rejected beside it here"
            out.leave("unsupported", o.key, o.value, why, o.line)
        case ("rollout_is", "token" | "sequence"):
            out.put("renamed", o.key, _CORRECTION + "level", o.value, line=o.line)
        case ("rollout_is_threshold", _) if not weighs:
            out.leave("implied", o.key, o.value, _OFF, o.line)
        case ("rollout_is_threshold", _) if rejects and _masked_weights(settings):
            why = "no ratio inside the band of the rejection reaches it"
            out.leave("implied", o.key, o.value, why, o.line)
        case ("rollout_is_threshold", _):
            _threshold(o, out, settings)
        case ("rollout_rs", str()) if o.value in _REJECTIONS:
            _rejection(o, out, settings, bool(weighs))
        case ("rollout_rs_threshold" | "rollout_rs_threshold_lower", _) if not rejects or bypassed:
            out.leave("implied", o.key, o.value, _OFF, o.line)
        case ("rollout_rs_threshold", _) if rejects in _REJECTIONS:
            _rejection_band(o, out, settings)
        case ("rollout_rs_threshold_lower", int() | float()) if rejects in _REJECTIONS and not _turned(rejects):
            out.leave("implied", o.key, o.value, "is the lower bound of rollout_rs_threshold", o.line)
        case ("bypass_mode", bool()):
            out.put("renamed", o.key, "algorithm.anchor", "rollout" if o.value else "recompute", line=o.line)
            if o.value and settings.loss_mode != VERL_DEFAULTS[A + "policy_loss.loss_mode"]:
                out.warnings.append(
                    f"line {o.line}: bypass_mode with loss_mode={settings.loss_mode}: verl's ray_trainer (0.7, and its "
                    "trainers that generate ahead) then computes token-level PPO whatever loss_mode says; its v1 "
                    f"trainer, the default of 0.9.1, computes {settings.loss_mode}, which is written"
                )
        case ("rollout_is_batch_normalize" | "use_policy_gradient", False) | ("loss_type", "ppo_clip"):
            out.leave("implied", o.key, o.value, "as it is here", o.line)
        case _:
            out.leave("unsupported", o.key, o.value, _UNKNOWN, o.line)


def _of_correction(settings: VerlSettings, name: str) -> Any:
    """Returns the value of a key of verl's correction. None and False are off."""
    return settings.value(_CORRECTION + name, f"algorithm.{name}") or None


def _turned(rejection: str) -> bool:
    """Whether verl tests rollout / old there. Its older names test old / rollout, as everything here does."""
    return rejection.endswith("_k1")


def _numbers(value: Any) -> list[float]:
    """Reads a threshold: one number, or `low_high`. Returns none where it is something else."""
    try:
        numbers = [float(part) for part in str(value).split("_")]
    except ValueError:
        return []
    if len(numbers) > 2 or min(numbers) <= 0:
        return []
    return numbers


def _kept_band(settings: VerlSettings) -> tuple[float, float] | None:
    """Returns the band of old / rollout that verl's rejection keeps, or None where its threshold is none.

    One number x is 1/x to x. Older releases may give the lower bound by a key of its own.
    """
    rejection = _of_correction(settings, "rollout_rs")
    numbers = _numbers(_of_correction(settings, "rollout_rs_threshold"))
    lower = _of_correction(settings, "rollout_rs_threshold_lower")
    if not numbers:
        return None
    low, high = numbers[0], numbers[-1]
    if len(numbers) == 1:
        low = 1 / high
        if isinstance(lower, int | float) and not _turned(rejection):
            low = float(lower)
    if _turned(rejection):
        return 1 / high, 1 / low
    return low, high


def _is_beside(settings: VerlSettings) -> bool:
    """Whether verl's rejection stands beside weights that are not the same ratio's inside its band."""
    return bool(_of_correction(settings, "rollout_is")) and not _masked_weights(settings)


def _masked_weights(settings: VerlSettings) -> bool:
    """Whether verl's weight and rejection together are mode mask: the same ratio, and no cap inside the band."""
    cap = _numbers(_of_correction(settings, "rollout_is_threshold") or 2.0)
    band = _kept_band(settings)
    same = _of_correction(settings, "rollout_is") == _REJECTIONS.get(_of_correction(settings, "rollout_rs"))
    return same and band is not None and len(cap) == 1 and cap[0] >= band[1]


def _rejection(o: Override, out: Import, settings: VerlSettings, weighs: bool) -> None:
    if _kept_band(settings) is None:
        why = "verl needs rollout_rs_threshold beside it: one number, or low_high"
        out.leave("unsupported", o.key, o.value, why, o.line)
        return
    level = _REJECTIONS[o.value]
    if _is_beside(settings):
        out.put("renamed", o.key, _CORRECTION + "reject", level, "beside the weights of rollout_is", o.line)
    else:
        out.put("renamed", o.key, _CORRECTION + "level", level, line=o.line)
        why = "what a rejection takes out leaves the denominators, as in verl"
        out.put("implied", o.key, _CORRECTION + "mode", "mask", why, o.line)
    if not weighs:
        why = "without rollout_is verl leaves what it keeps at weight 1"
        out.put("implied", o.key, _CORRECTION + "weigh", False, why, o.line)
    aggregation = settings.value(A + "loss_agg_mode")
    if level != "token" and (settings.loss_mode in SEQUENCE_MEANS or aggregation != "token-mean"):
        out.warnings.append(
            f"line {o.line}: rollout_rs={o.value} rejects whole responses, and the loss is a mean over responses: "
            "verl's trainer divides by all of the mini-batch, here those that are left are counted"
        )


def _rejection_band(o: Override, out: Import, settings: VerlSettings) -> None:
    band = _kept_band(settings)
    if band is None:
        out.leave("unsupported", o.key, o.value, "a threshold here is one number, or low_high", o.line)
        return
    why = ""
    if _turned(_of_correction(settings, "rollout_rs")):
        why = "verl tests rollout / old there, here it is old / rollout: 1/high to 1/low"
    prefix = _CORRECTION + "reject_" * _is_beside(settings)
    for name, value in zip(("low", "high"), band, strict=True):
        out.put("renamed", o.key, prefix + name, value, why, o.line)


def _threshold(o: Override, out: Import, settings: VerlSettings) -> None:
    """Carries the threshold of a weight over: an upper bound, or the band of IcePop."""
    numbers = _numbers(o.value)
    level = _of_correction(settings, "rollout_is")
    if len(numbers) == 2 and settings.loss_mode == "geo_mean" and level == "token":
        why = "geo_mean takes the geometric mean of a response's weights, so one weight of 0 would take all of it out"
        out.leave("unsupported", o.key, o.value, why, o.line)
        return
    if not numbers:
        out.leave("unsupported", o.key, o.value, "a threshold here is one number, or low_high", o.line)
        return
    out.put("renamed", o.key, _CORRECTION + "high", numbers[-1], line=o.line)
    if len(numbers) == 2:
        out.put("renamed", o.key, _CORRECTION + "low", numbers[0], line=o.line)
        why = "a band of weights is IcePop: outside it the weight is 0, and the denominators stay, as in verl"
        out.put("implied", o.key, _CORRECTION + "mode", "icepop", why, o.line)


_CONTROL = "algorithm.kl_ctrl."
_IN_REWARD = ("algorithm.use_kl_in_reward",)


def _kl_control(o: Override, out: Import, settings: VerlSettings) -> None:
    """Carries the controller of the KL's weight over, where verl reads it: with a KL in the reward, and adaptive."""
    if not settings.value(*_IN_REWARD):
        out.leave("implied", o.key, o.value, "there is no KL in the reward", o.line)
    elif not o.key.endswith(".type") and settings.value(f"{_CONTROL}type") != "adaptive":
        out.leave("implied", o.key, o.value, "only an adaptive weight has it", o.line)
    else:
        out.put("carried", o.key, o.key, o.value, line=o.line)


def _metric(o: Override, out: Import, settings: VerlSettings) -> None:
    out.put(
        "renamed" if o.value in _METRICS else "carried",
        o.key,
        "algorithm.filter_groups.metric",
        _METRICS.get(o.value, o.value),
        line=o.line,
    )


ALGORITHM_HANDLERS: dict[str, Handler] = {
    A + "clip_ratio": _clip,
    A + "loss_agg_mode": _aggregation,
    A + "policy_loss.loss_mode": _loss_mode,
    A + "tis_imp_ratio_cap": _tis_cap,
    "algorithm.filter_groups.metric": _metric,
    "algorithm.gamma": _gamma,
    **{f"{_CONTROL}{name}": _kl_control for name in ("type", "target_kl", "horizon")},
    "algorithm.rollout_correction.": _correction,
    "algorithm.rollout_is": _correction,
    "algorithm.rollout_is_threshold": _correction,
}
